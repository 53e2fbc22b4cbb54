"""Texts with LoRA adapters get the vectors of PEFT, in a batch with others."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.checkpoints import checkpoint
from tests.support.encoders import make_encoder
from tests.support.lora import EMBEDDING, LAYERS, make_adapter, make_prompt
from tests.support.pooled_texts import BLOCK_SIZE, NUM_BLOCKS, PooledTexts
from worker_service.config import AdapterConfig, CacheConfig, ModelConfig
from worker_service.errors import BadAdapter
from worker_service.loader import load_model
from worker_service.plan import ContextKind, ContextPart, PoolingParams, PoolingType
from worker_service.runner.torch_executor import Profiler, TorchExecutor

TEXTS = [[7, 110, 3, 12], [*range(40, 75)], [99] * 9, [12, 5]]
TOLERANCE = 2e-5

pytestmark = pytest.mark.usefixtures("one_thread")


def executor_of(base: Path) -> TorchExecutor:
    config = ModelConfig(model=str(base), device="cpu", dtype="float32", runner="pooling")
    cache = CacheConfig(block_size=BLOCK_SIZE)
    adapters = AdapterConfig(enable_lora=True, max_loras=2)
    executor = TorchExecutor(
        cache, Profiler(Path()), lambda: load_model(config, cache), adapters=adapters
    )
    executor.load()
    return executor


def context_of(which: int | None, digests: Sequence[bytes]) -> tuple[ContextPart, ...]:
    if which is None:
        return ()
    return (ContextPart(kind=ContextKind.ADAPTER, digest=digests[which], start=0, length=0),)


@pytest.mark.parametrize("kind", [PoolingType.LAST, PoolingType.MEAN])
@pytest.mark.parametrize("family", ["qwen3", "bert", "modernbert"])
def test_vectors_are_those_of_peft(family: str, kind: PoolingType, tmp_path: Path) -> None:
    is_decoder = family == "qwen3"
    base = checkpoint(family) if is_decoder else make_encoder(family, tmp_path / "base")
    made = [
        make_adapter(
            base,
            tmp_path / str(seed),
            seed=seed,
            generates=False,
            targets=(LAYERS, EMBEDDING),
            r=4,
            exclude_modules="pooler.dense",
        )
        for seed in range(2)
    ]
    executor = executor_of(base)
    digests = [executor.adapters.load(str(adapter.folder)).digest for adapter in made]
    texts = PooledTexts(executor.loaded, runner=executor.make_runner(NUM_BLOCKS, 0, 1))
    chosen = [0, None, 1, 0]
    new = [
        texts.add(tokens, PoolingParams(type=kind), context=context_of(which, digests))
        for tokens, which in zip(TEXTS, chosen, strict=True)
    ]
    rows = [(seq.seq_id, len(seq.token_ids), True) for seq in new]
    vectors = texts.step(rows, new).vectors
    for row, (tokens, which) in enumerate(zip(TEXTS, chosen, strict=True)):
        with torch.inference_mode():
            model = made[which or 0].model
            ids = torch.tensor([tokens])
            if which is None:
                with model.disable_adapter():
                    [hidden] = model(ids).last_hidden_state
            else:
                [hidden] = model(ids).last_hidden_state
        expected = hidden.mean(0) if kind is PoolingType.MEAN else hidden[-1]
        np.testing.assert_allclose(vectors[row], expected.numpy(), atol=TOLERANCE, rtol=1e-5)


def test_prompts_are_refused_by_models_that_make_vectors(tmp_path: Path) -> None:
    made = make_prompt(checkpoint("qwen3"), tmp_path / "prompt", num_tokens=4)
    with pytest.raises(BadAdapter, match="peft_type: expected LORA for a model that makes vectors"):
        executor_of(checkpoint("qwen3")).adapters.load(str(made.folder))
