"""Ranks that share a model keep drafts, and give the tokens and bits of no speculation."""

from pathlib import Path

import pytest

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.eagle_heads import make_head
from tests.support.in_process import Output
from tests.support.rank_threads import NO_SPECULATION, ParallelEngine, ParallelWorker
from worker_service.config import RunnerConfig

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_TOKENS = 24
PROMPTS = [[5, 6, 7, 8] * 4, [9], [11, 12] * 9, list(range(20, 50)), [3, 3, 3]]
FEW_TOKENS = [{"token_id": token, "bias": 50.0} for token in (7, 8, 9)]
"""Biases with which outputs repeat themselves."""
SAMPLING = (
    {"logprobs": 2},
    {"temperature": 0.9, "top_p": 0.9, "seed": 5, "num_choices": 2, "logprobs": 0},
    {"temperature": 0.5, "seed": 6, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"temperature": 1.0, "seed": 7, "logit_bias": FEW_TOKENS},
)
LEAST_KEPT = {"ngram": 20, "suffix": 20, "draft": 200, "eagle": 20}
CASES = [((2, 1), "suffix"), ((1, 2), "ngram"), ((2, 2), "draft"), ((1, 2), "eagle")]
"""Ranks that share each layer, and stages; and the drafter."""
OTHERS = [
    ((2, 1), "draft"),
    ((1, 2), "suffix"),
    ((1, 2), "draft"),
    ((2, 2), "ngram"),
    ((2, 1), "eagle"),
    ((2, 2), "eagle"),
]


def outputs(
    tensor_parallel_size: int, pipeline_parallel_size: int, runner: RunnerConfig
) -> tuple[list[list[Output]], int]:
    """Of all requests, with so little memory that some are preempted; and the drafts kept."""
    engine = ParallelEngine(
        checkpoint("llama"),
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        num_gpu_blocks=44,
        num_cpu_blocks=20,
        config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=96,
            enable_prefix_caching=False,
            preemption_mode=PreemptionMode.AUTO,
        ),
        runner=runner,
    )
    try:
        found = [engine.generate(PROMPTS, NUM_TOKENS, **sampling) for sampling in SAMPLING]
        assert isinstance(engine.worker, ParallelWorker)
        assert engine.core.snapshot().num_running == 0
        return found, engine.worker.num_kept
    finally:
        engine.group.close()


@pytest.mark.parametrize(
    ("layout", "speculative"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS)],
)
def test_ranks_keep_drafts_and_every_bit(
    layout: tuple[int, int], speculative: str, tmp_path: Path
) -> None:
    plain, num_kept = outputs(*layout, NO_SPECULATION)
    assert num_kept == 0
    model = None
    if speculative == "draft":
        model = str(checkpoint("llama"))
    if speculative == "eagle":
        model = str(make_head(tmp_path, draft_vocab_size=VOCAB_SIZE))
    runner = RunnerConfig(
        speculative=speculative, speculative_model=model, num_speculative_tokens=5
    )
    drafting, num_kept = outputs(*layout, runner)
    assert drafting == plain
    assert num_kept > LEAST_KEPT[speculative]
