"""Ranks that share a model keep drafts, and give the tokens and bits of no speculation."""

from pathlib import Path

import pytest

from scheduler_service.core.config import PreemptionMode, SchedulerConfig
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.eagle_heads import make_head
from tests.support.in_process import Output
from tests.support.rank_threads import (
    NO_SPECULATION,
    Executor,
    ParallelEngine,
    ParallelWorker,
    RankThreads,
)
from tests.support.transformers_oracle import oracle
from tests.support.worker_driver import PlanBuilder, Row
from worker_service.cache_groups import CacheLifetime
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
CASES = [((2, 1), "suffix"), ((2, 2), "draft"), ((1, 2), "eagle")]
"""Ranks that share each layer, and stages; and the drafter."""
OTHERS = [
    ((1, 2), "ngram"),
    ((2, 1), "draft"),
    ((1, 2), "suffix"),
    ((1, 2), "draft"),
    ((2, 2), "ngram"),
    ((2, 1), "eagle"),
    ((2, 2), "eagle"),
]


def outputs(
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    runner: RunnerConfig,
    model: Path | None = None,
    num_gpu_blocks: int = 44,
    executor: type[Executor] = Executor,
) -> tuple[list[list[Output]], int]:
    """Of all requests, with so little memory that some are preempted; and the drafts kept. model:
    None for a Llama."""
    engine = ParallelEngine(
        model or checkpoint("llama"),
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=20,
        config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=96,
            enable_prefix_caching=False,
            preemption_mode=PreemptionMode.AUTO,
        ),
        runner=runner,
        executor=executor,
    )
    try:
        found = [engine.generate(PROMPTS, NUM_TOKENS, **sampling) for sampling in SAMPLING]
        assert isinstance(engine.worker, ParallelWorker)
        assert engine.core.snapshot().num_running == 0
        return found, engine.worker.num_kept
    finally:
        engine.group.close()


def _runner(speculative: str, family: str, folder: Path) -> RunnerConfig:
    model = None
    if speculative == "draft":
        model = str(checkpoint(family))
    if speculative == "eagle":
        model = str(make_head(folder, draft_vocab_size=VOCAB_SIZE))
    return RunnerConfig(speculative=speculative, speculative_model=model, num_speculative_tokens=5)


@pytest.mark.parametrize(
    ("layout", "speculative"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.long) for case in OTHERS)],
)
def test_ranks_keep_drafts_and_every_bit(
    layout: tuple[int, int], speculative: str, tmp_path: Path
) -> None:
    plain, num_kept = outputs(*layout, NO_SPECULATION)
    assert num_kept == 0
    drafting, num_kept = outputs(*layout, _runner(speculative, "llama", tmp_path))
    assert drafting == plain
    assert num_kept > LEAST_KEPT[speculative]


@pytest.mark.parametrize("family", [pytest.param("lfm2", marks=pytest.mark.long), "qwen3_5"])
def test_ranks_with_states_keep_drafts_and_every_bit(family: str, tmp_path: Path) -> None:
    """Where most drafts are wrong: the other rank restores states as well."""
    model = checkpoint(family)
    plain, _ = outputs(2, 1, NO_SPECULATION, model, num_gpu_blocks=240)
    drafting, num_kept = outputs(
        2, 1, _runner("suffix", family, tmp_path), model, num_gpu_blocks=240
    )
    assert drafting == plain
    assert num_kept > 5


@pytest.mark.parametrize(
    ("family", "layout", "speculative"),
    [
        ("mistral", (1, 2), "eagle"),
        pytest.param("mistral", (2, 1), "draft", marks=pytest.mark.long),
        pytest.param("qwen2_sliding", (1, 2), "draft", marks=pytest.mark.long),
        pytest.param("qwen2_sliding", (2, 2), "eagle", marks=pytest.mark.long),
    ],
)
def test_ranks_with_drafts_release_windows_and_change_no_token(
    family: str, layout: tuple[int, int], speculative: str, tmp_path: Path
) -> None:
    """In a pool that is too small for a sequence which keeps all blocks."""
    config = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=8, max_speculative_seqs=4, watermark=0.0
    )
    engine = ParallelEngine(
        checkpoint(family),
        tensor_parallel_size=layout[0],
        pipeline_parallel_size=layout[1],
        config=config,
        runner=_runner(speculative, family, tmp_path),
    )
    try:
        facts = [facts.cache_groups for facts in engine.group.facts]
        assert all(groups == facts[0] for groups in facts)
        lifetimes = [group.lifetime for group in facts[0]]
        assert lifetimes == [CacheLifetime.GROWING, CacheLifetime.WINDOW]
        num_tokens = len(PROMPTS[3]) + 60
        growing, window = facts[0]
        of_window = -(-(window.span + 7 + 5) // window.block_tokens) + 1
        engine.reset(
            num_gpu_blocks=-(-num_tokens // growing.block_tokens) + of_window + 1,
            config=config,
        )
        for _ in range(2):  # the second time with hits
            found = [output.token_ids for output in engine.generate(PROMPTS, 60)]
            assert {len(output) for output in found} == {60}
            assert found == [*map(oracle(checkpoint(family)).choices, PROMPTS, found)]
        assert isinstance(engine.worker, ParallelWorker)
        assert engine.worker.num_kept > (100 if speculative == "draft" else 0)
    finally:
        engine.group.close()


@pytest.mark.parametrize("num_without", [0, 1, 2])
def test_drafts_are_for_the_next_step_alone(num_without: int) -> None:
    """Those that a plan does not allow would be behind other tokens in a later one."""
    runner = RunnerConfig(speculative="ngram")
    ranks = RankThreads(checkpoint("llama"), tensor_parallel_size=2, runner=runner)
    ranks.join(64)
    plans = PlanBuilder()
    plans.add(1, PROMPTS[0])
    steps = [
        (Row(1, len(PROMPTS[0])), b"\x03"),
        *[(Row(1), b"\x00")] * num_without,
        (Row(1), b"\x03"),
    ]
    for row, lookahead in steps:
        plans.grow(1, 3)
        plan = plans.plan([row], lookahead=lookahead).SerializeToString()
        result, _ = (sent.result(60) for sent in ranks.send(plan))
    ranks.close()
    assert result.num_drafts == ([3] if num_without == 0 else None)
