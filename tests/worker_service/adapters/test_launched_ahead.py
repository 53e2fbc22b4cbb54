"""Adapters in steps that are launched ahead and replayed, as on a GPU, are those of PEFT."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.support.lora import HEAD, PeftAdapter, make_adapter
from tests.support.rank_threads import AheadExecutor
from tests.worker_service.adapters.test_lora import (
    NUM_TOKENS,
    THROUGH_TRANSFORMERS,
    TOLERANCE,
    adapters,
    assert_prompts_equal_to_peft,
    base_of,
    generate,
    load_blocks,
    of_vocabulary,
    prompt,
    without_base,
)
from worker_service.config import AdapterConfig, CacheConfig, RunnerConfig
from worker_service.models.linear import additions, packing
from worker_service.runner.torch_executor import Profiler

pytestmark = pytest.mark.usefixtures("one_thread")


def ahead(family: str, max_loras: int = 2) -> AheadExecutor:
    """With as many slots as each test has adapters here, less one."""
    made = AheadExecutor(
        CacheConfig(),
        Profiler(Path()),
        lambda: load_blocks(base_of(family)),
        runner=RunnerConfig(max_graph_batch_size=4, max_graph_tokens=32),
        adapters=AdapterConfig(enable_lora=True, max_loras=max_loras, max_lora_rank=64),
    )
    made.load()
    return made


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are torch's, and what adapters add is looked up by slot, by the reference of the
    kernels."""
    monkeypatch.setattr(packing, "library", lambda: None)
    monkeypatch.setattr(additions, "is_on_cpu", lambda context: False)
    monkeypatch.setattr(additions, "find_spec", lambda name: None)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_tokens_and_log_probabilities_are_those_of_peft(family: str) -> None:
    assert_equal_to_peft(family, adapters(family))


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("family", THROUGH_TRANSFORMERS)
def test_models_that_run_through_transformers_have_the_tokens_of_peft(family: str) -> None:
    assert_equal_to_peft(family, adapters(family))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_models_that_run_through_transformers_change_their_head_and_norms_as_peft_does(
    tmp_path: Path,
) -> None:
    base = base_of("phi")
    head = without_base(make_adapter(base, tmp_path / "head", targets=(HEAD,)))
    dora = [make_adapter(base, tmp_path / str(i), seed=i, use_dora=True) for i in range(2)]
    assert_equal_to_peft("phi", [head, *dora])


def assert_equal_to_peft(family: str, made: Sequence[PeftAdapter]) -> None:
    """Three adapters."""
    here = ahead(family)
    digests = [here.adapters.load(str(adapter.folder)).digest for adapter in made]
    for mix in ([0, None, 1, 0], [2, 1, None], [None]):
        found = generate(here, [None if i is None else digests[i] for i in mix])
        for i, ((tokens, logprobs), which) in enumerate(zip(found, mix, strict=True)):
            if which is not None:
                expected, expected_logprobs = made[which].choices(prompt(i), tokens)
                assert len(tokens) == NUM_TOKENS
                assert tokens == expected
                np.testing.assert_allclose(logprobs, expected_logprobs, atol=TOLERANCE, rtol=0)
    assert here.num_recorded > 0


def test_prompt_tokens_have_the_log_probabilities_of_the_head_of_their_adapter() -> None:
    assert_prompts_equal_to_peft(ahead("llama"), of_vocabulary("llama")[1:])
