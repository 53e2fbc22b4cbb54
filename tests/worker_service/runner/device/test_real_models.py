"""Real models, on the CPU's own kernels: rows that fill up a batch disturb no others."""

import numpy as np
import pytest

from pagewire_kernels import flashinfer, reference
from pagewire_kernels.flashinfer import FlashInferBackend
from tests.support import fake_flashinfer
from tests.support.checkpoints import checkpoint
from tests.support.real_generations import generate
from tests.support.runners import RUNNERS, SIZES, EagerRecorder, HostEvent
from worker_service.config import ModelConfig
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.loader import load_model
from worker_service.models.interface import Model
from worker_service.models.llama import LlamaModel
from worker_service.runner.device_state import DeviceState
from worker_service.runner.device_steps import DeviceSteps
from worker_service.runner.model_runner import ModelRunner


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32"), ("gpt2", "float32")],
)
def test_every_runner_gives_the_same_tokens(family: str, dtype: str) -> None:
    config = ModelConfig(model=str(checkpoint(family)), device="cpu", dtype=dtype)
    loaded = load_model(config)
    expected_tokens, expected_logprobs = generate(loaded, RUNNERS["host"])
    for kind in ("eager", "recorded"):
        tokens, logprobs = generate(loaded, RUNNERS[kind])
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)


def test_flashinfer_plans_before_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer, "WORKSPACE_BYTES", 16)
    wrappers = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setattr(wrappers, "made", [])
    config = ModelConfig(
        model=str(checkpoint("llama")),
        device="cpu",
        dtype="bfloat16",
        attention_backend="reference",
    )
    loaded = load_model(config)
    expected_tokens, expected_logprobs = generate(loaded, RUNNERS["host"])
    backend = FlashInferBackend(fake_flashinfer, reference.write_kv)
    assert isinstance(loaded.model, LlamaModel)
    for _, layer in loaded.model.named_layers():
        layer.attention._backend = backend

    def with_decode_graphs(model: Model, cache: CacheEngine, block_size: int) -> ModelRunner:
        state = DeviceState(model, cache, block_size, EagerRecorder(), SIZES)
        device = DeviceSteps(model, cache, state, make_event=HostEvent)
        return ModelRunner(model, cache, block_size, device=device)

    for make_runner in (RUNNERS["host"], RUNNERS["eager"], with_decode_graphs):
        wrappers.made.clear()
        tokens, logprobs = generate(loaded, make_runner)
        assert tokens == expected_tokens
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
    graphs = [each for each in wrappers.made if each.is_graph]
    assert len(graphs) == len(SIZES)
    assert sum(each.num_plans for each in graphs) > 2 * len(SIZES)
