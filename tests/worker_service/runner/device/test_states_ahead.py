"""Models with states, launched ahead and replayed in padded batches: the tokens of transformers,
and the bits of a run alone."""

from functools import cache
from typing import Any

import pytest

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.cases import each_with_one_of
from tests.support.checkpoints import checkpoint
from tests.support.in_process import AheadWorker, InProcessEngine, InProcessWorker, Output
from tests.support.paged_driver import NAN
from tests.worker_service.runner.test_states import NUM_TOKENS, expected_tokens, prompts

FAMILIES = ("lfm2", "qwen3_5", "kimi_linear", "granite_hybrid", "falcon_h1", "mamba")
"""One of each kind of state, of a layer with a state beside attention, and without attention."""

pytestmark = pytest.mark.usefixtures("one_thread")


class AheadEngine(InProcessEngine):
    """Launches ahead, over blocks that are full of NaN until something is written to them."""

    def make_worker(self, num_gpu_blocks: int, num_cpu_blocks: int) -> InProcessWorker:
        worker = AheadWorker(
            self.loaded.model,
            num_gpu_blocks=num_gpu_blocks,
            block_size=self.block_size,
            num_cpu_blocks=num_cpu_blocks,
        )
        worker._cache.device_cache.fill_(NAN)
        return worker


@cache
def _alone(family: str) -> list[Output]:
    """Each prompt by itself, with nothing found in a cache."""
    engine = AheadEngine(checkpoint(family), config=SchedulerConfig(enable_prefix_caching=False))
    return [engine.generate([prompt], NUM_TOKENS, logprobs=0)[0] for prompt in prompts()]


def _check(family: str, outputs: list[Output]) -> None:
    assert [output.token_ids for output in outputs] == expected_tokens(family)
    assert [output.logprobs for output in outputs] == [o.logprobs for o in _alone(family)]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_also_from_saved_states(family: str) -> None:
    engine = AheadEngine(checkpoint(family), block_size=16)
    for _ in range(2):  # the second time with hits
        outputs = engine.generate(prompts(), NUM_TOKENS, logprobs=0)
        _check(family, outputs)
    assert max(output.cached_tokens for output in outputs) >= 32


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_prompts_change_no_bit(family: str) -> None:
    config = SchedulerConfig(max_num_batched_tokens=7, max_num_seqs=7)
    engine = AheadEngine(checkpoint(family), config=config)
    _check(family, engine.generate(prompts(), NUM_TOKENS, logprobs=0))


@pytest.mark.parametrize(
    ("family", "mode"),
    each_with_one_of(FAMILIES, (PreemptionMode.SWAP,), (PreemptionMode.RECOMPUTE,)),
)
def test_preempted_sequences_continue_to_the_bit(family: str, mode: PreemptionMode) -> None:
    config = SchedulerConfig(preemption_mode=mode, max_num_batched_tokens=24, watermark=0.0)
    engine = AheadEngine(checkpoint(family), num_gpu_blocks=60, num_cpu_blocks=160, config=config)
    _check(family, engine.generate(prompts(), NUM_TOKENS, logprobs=0))
    assert (engine.core.snapshot().num_preemptions > 0) == (family != "mamba")


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_continue_from_a_copy_of_their_prompts_state(family: str) -> None:
    sampling: dict[str, Any] = {"temperature": 1.0, "seed": 7, "logprobs": 0}
    path, without = checkpoint(family), SchedulerConfig(enable_prefix_caching=False)
    engines = [AheadEngine(path), AheadEngine(path, block_size=16, config=without)]
    outputs = [engine.generate(prompts()[1:4], 40, 3, **sampling) for engine in engines]
    tokens = [[(o.token_ids, o.logprobs) for o in of_engine] for of_engine in outputs]
    assert tokens[0] == tokens[1]
    assert len({tuple(token_ids) for token_ids, _ in tokens[0]}) == len(tokens[0])
