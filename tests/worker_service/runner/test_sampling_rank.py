"""Whatever the sampling rank does with logits, the group does as one rank."""

from typing import Any

import pytest

from scheduler_service.core.config import SchedulerConfig
from tests.support.beams import BeamCase
from tests.support.checkpoints import checkpoint
from tests.support.in_process import InProcessEngine
from tests.support.rank_threads import ParallelEngine

PROMPTS = [[1, 2, 3], [4] * 9, list(range(30)), [7]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11}
PENALISED = {
    "temperature": 0.0,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.2,
}
FORKED = {"temperature": 1.1, "seed": 5, "num_choices": 3, "logprobs": 2}
PROMPT_LOGPROBS = {"temperature": 0.0, "prompt_logprobs": 2}
TIGHT = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=True)


@pytest.mark.parametrize(
    "sampling",
    [SAMPLED, PENALISED, FORKED, PROMPT_LOGPROBS],
    ids=["sampled", "penalised", "forked", "prompt log probabilities"],
)
def test_a_group_samples_what_one_rank_samples(sampling: dict[str, Any]) -> None:
    # So few blocks that sequences are preempted, forgotten and introduced again on the way.
    alone = InProcessEngine(checkpoint("llama"), num_gpu_blocks=22, config=TIGHT)
    expected = alone.generate(PROMPTS, 24, **sampling)
    group = ParallelEngine(
        checkpoint("llama"),
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        num_gpu_blocks=22,
        config=TIGHT,
    )
    try:
        outputs = group.generate(PROMPTS, 24, **sampling)
    finally:
        group.group.close()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert alone.core.snapshot().num_preemptions > 0


def test_a_group_offers_the_candidates_that_one_rank_offers() -> None:
    # Beams fork, and the core appends what it chose, while other rows are in flight.
    cases = [BeamCase(prompt=[9, 8, 7, 6], width=3, n=2, max_tokens=8)]
    cases.append(BeamCase(prompt=list(range(11)), width=2, n=2, max_tokens=5))
    requests = [case.request(10 * (i + 1)) for i, case in enumerate(cases)]
    expected = InProcessEngine(checkpoint("llama"), config=TIGHT).run(requests)
    engine = ParallelEngine(
        checkpoint("llama"), tensor_parallel_size=2, pipeline_parallel_size=2, config=TIGHT
    )
    try:
        outputs = engine.run([case.request(10 * (i + 1)) for i, case in enumerate(cases)])
    finally:
        engine.group.close()
    found, wanted = ({h: o.token_ids for h, o in x.items()} for x in (outputs, expected))
    assert found == wanted
    assert all(wanted.values())
