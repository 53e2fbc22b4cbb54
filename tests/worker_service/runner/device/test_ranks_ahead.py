"""Ranks that share layers launch steps ahead, and tokens reach the others on their devices.

The devices are CPUs, which are done with work as soon as it is queued. The host of the rank that
samples learns tokens at once, and the other hosts as late as can be (`AheadExecutor`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pagewire.v1 import sampling_pb2
from pagewire_kernels.batch import StepBatch
from pagewire_kernels.interface import Computed
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core.step_plan import StepResult
from tests.support.beams import BeamCase
from tests.support.checkpoints import VOCAB_SIZE, checkpoint
from tests.support.in_process import InProcessEngine
from tests.support.rank_threads import AheadExecutor, Executor, ParallelEngine, RankThreads
from tests.support.worker_driver import GREEDY, PlanBuilder, Row, column, sampler_params
from tests.worker_service.runner.device.test_launching_ahead import PARAMS, TOO_MANY
from tests.worker_service.runner.device.test_step_costs import Queue
from worker_service.config import RunnerConfig
from worker_service.distributed.layout import Layout
from worker_service.errors import CaptureFailed, GroupBroken
from worker_service.models.interface import Model
from worker_service.runner.device.cuda_graphs import Replay

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = RunnerConfig(max_graph_batch_size=4, max_graph_tokens=32)
"""Sizes 1, 2 and 4 of decodes, and 32 tokens of mixed batches."""
TIGHT = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, enable_prefix_caching=True)
PROMPTS = [[1, 2, 3], [4] * 9, list(range(30)), [7]]
SOON_S = 120
POISON = 250


class Poisoned:
    """A model in which a token makes hidden states NaN, from then on."""

    def __init__(self, model: Model, layout: Layout) -> None:
        self._model = model
        self.num_batches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward_to_logits(self, batch: StepBatch) -> Computed:
        self.num_batches += 1
        computed = self._model.forward_to_logits(batch)  # type: ignore[attr-defined]
        is_poisoned = (batch.token_ids == POISON).unsqueeze(1)
        return Computed(computed.hidden.masked_fill(is_poisoned, torch.nan))


def group(**options: Any) -> RankThreads:
    """Ranks that have met."""
    size = options.pop("tensor_parallel_size", 2)
    ranks = RankThreads(
        checkpoint("llama"),
        tensor_parallel_size=size,
        runner=SMALL,
        executor=AheadExecutor,
        **options,
    )
    ranks.join(64)
    return ranks


@pytest.fixture
def two() -> Iterator[RankThreads]:
    """Two ranks that have met."""
    ranks = group()
    yield ranks
    ranks.close()


class Plans:
    """Plans that are launched on all ranks, before any result is collected."""

    def __init__(self, ranks: RankThreads) -> None:
        self.builder = PlanBuilder(epoch=ranks.epoch)
        self._ranks = ranks
        self._steps: list[list[Callable[[], StepResult]]] = []

    def launch(self, rows: list[Row], **fields: Any) -> None:
        plan = self.builder.plan(rows, **fields).SerializeToString()
        self._steps.append([pending.result(SOON_S) for pending in self._ranks.launch(plan)])

    def collect(self) -> list[StepResult]:
        """The sampling rank's results."""
        steps, self._steps = self._steps, []
        results = [[read() for read in step] for step in steps]
        assert not any(other.token_ids for _, *others in results for other in others)
        return [first for first, *_ in results]


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": 11, "logprobs": 1},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "bad words": {"bad_words": [{"token_ids": column([7, 3])}, {"token_ids": column([9])}]},
    "forked": {"temperature": 1.1, "seed": 5, "num_choices": 3, "logprobs": 2},
    "prompt log probabilities": {"temperature": 0.0, "prompt_logprobs": 2},
}


@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in CASES), ("sampled", 4)])
def test_ranks_sample_what_one_rank_samples(name: str, size: int) -> None:
    sampling = CASES[name]
    # So few blocks that sequences are preempted, forgotten and introduced again on the way.
    alone = InProcessEngine(checkpoint("llama"), num_gpu_blocks=22, config=TIGHT)
    expected = alone.generate(PROMPTS, 24, **sampling)
    ranks = ParallelEngine(
        checkpoint("llama"),
        tensor_parallel_size=size,
        num_gpu_blocks=22,
        config=TIGHT,
        runner=SMALL,
        executor=AheadExecutor,
    )
    try:
        outputs = ranks.generate(PROMPTS, 24, **sampling)
    finally:
        ranks.group.close()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    assert [len(o.prompt_logprobs) for o in outputs] == [len(o.prompt_logprobs) for o in expected]
    assert alone.core.snapshot().num_preemptions > 0


def test_ranks_offer_the_candidates_that_one_rank_offers() -> None:
    cases = [BeamCase(prompt=[9, 8, 7, 6], width=3, n=2, max_tokens=8)]
    cases.append(BeamCase(prompt=list(range(11)), width=2, n=2, max_tokens=5))
    requests = [[case.request(10 * (i + 1)) for i, case in enumerate(cases)] for _ in range(2)]
    expected = InProcessEngine(checkpoint("llama"), config=TIGHT).run(requests[0])
    ranks = ParallelEngine(
        checkpoint("llama"),
        tensor_parallel_size=2,
        config=TIGHT,
        runner=SMALL,
        executor=AheadExecutor,
    )
    try:
        outputs = ranks.run(requests[1])
    finally:
        ranks.group.close()
    found, wanted = ({h: o.token_ids for h, o in x.items()} for x in (outputs, expected))
    assert found == wanted
    assert all(wanted.values())


def _life(plans: Plans, sampling: sampling_pb2.SamplerParams) -> list[StepResult]:
    """Prompts, decodes, mixed batches and a step that the host computes, all launched ahead."""
    builder = plans.builder
    builder.add(1, [1, 2, 3], sampling=sampling)
    builder.add(2, [4, 5])
    plans.launch([Row(1, 3), Row(2, 2)])
    for _ in range(3):
        plans.launch([Row(1), Row(2)])
    builder.add(3, [6] * 9, sampling=sampler_params(bad_words=TOO_MANY))
    plans.launch([Row(1), Row(2), Row(3, 4, sample=False)])
    for _ in range(2):
        plans.launch([Row(1), Row(2)])
    builder.add(4, [6] * 9)
    plans.launch([Row(2), Row(1), Row(4, 9)], forget_seq_ids=column([3]))
    for _ in range(3):
        plans.launch([Row(1), Row(4), Row(2)])
    return plans.collect()


@pytest.mark.parametrize("name", PARAMS)
def test_all_kinds_of_steps_follow_one_another(two: RankThreads, name: str) -> None:
    alone = RankThreads(checkpoint("llama"))
    alone.join(64)
    try:
        expected = _life(Plans(alone), PARAMS[name])
    finally:
        alone.close()
    found = _life(Plans(two), PARAMS[name])
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [result.errors for result in found] == [result.errors for result in expected]


@pytest.mark.parametrize(
    "sampling",
    [GREEDY, sampler_params(temperature=0.0, prompt_logprobs=1)],
    ids=["of its token", "of its prompt"],
)
def test_batches_have_the_same_shape_while_not_all_ranks_know_of_a_failure(sampling: Any) -> None:
    """Else the ranks' collectives would be of different sizes."""
    ranks = group(wrap=Poisoned)
    try:
        plans = Plans(ranks)
        builder = plans.builder
        builder.add(1, [1, 2, 3])
        builder.add(2, [POISON, 5, POISON], sampling=sampling)
        plans.launch([Row(1, 3), Row(2, 2, sample=False)])
        plans.launch([Row(1), Row(2)])
        for _ in range(3):
            plans.launch([Row(1), Row(2)])
        builder.add(3, [6] * 9, sampling=sampler_params(bad_words=TOO_MANY))
        plans.launch([Row(1), Row(2), Row(3, 4, sample=False)])  # computed by the hosts
        plans.launch([Row(1), Row(2)])
        results = plans.collect()
    finally:
        ranks.close()
    assert all(1 in result.errors for result in results[1:])
    assert all(0 not in result.errors for result in results)
    first, second = (rank.executor.loaded.model for rank in ranks.ranks)
    assert first.num_batches == second.num_batches > 0  # type: ignore[attr-defined]


class CountedGroups:
    """Counts what is asked of process groups."""

    def __init__(self, groups: Any) -> None:
        self.calls: Counter[str] = Counter()
        self._groups = groups

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._groups, name)


@pytest.mark.parametrize(
    ("name", "mixed"), [("greedy", False), ("penalties", True), ("bad words", False)]
)
def test_a_step_costs_each_rank_what_it_costs_one(two: RankThreads, name: str, mixed: bool) -> None:
    """Two replays, a copy in, a copy out, and no wait; what ranks exchange is in the replays."""
    plans = Plans(two)
    plans.builder.add(1, [1, 2, 3], sampling=PARAMS[name])
    plans.builder.add(2, [4, 5])
    plans.launch([Row(1, 3), Row(2, 2)])
    plans.launch([Row(1), Row(2)])
    rows = [Row(1), Row(2)]
    if mixed:
        plans.builder.add(3, [6] * 9)
        rows.append(Row(3, 9))
    plan = plans.builder.plan(rows).SerializeToString()

    def costs(rank: Any) -> tuple[Queue, Counter[str]]:
        queue, communicator = Queue(), rank.executor.loaded.communicator
        graphs = rank.executor.state.graphs
        for replays in (graphs._forwards, graphs._samplings, graphs._mixed):
            replays.update({size: _counted(queue, graph) for size, graph in replays.items()})
        groups = communicator.groups = CountedGroups(communicator.groups)
        with queue:
            rank.launch(plan)
        communicator.groups = groups._groups
        return queue, groups.calls

    found = [rank.run(lambda r=rank: costs(r)) for rank in two.ranks]
    num_layers = 2
    for future in found:
        queue, calls = future.result(SOON_S)
        assert (len(queue.copies_in), len(queue.copies_out), queue.waits) == (1, 1, [])
        assert [launch for launch in queue.launches if not launch.startswith("index_")] == [
            "replay"
        ] * 2
        # The embedding and each layer's two sums; logits to the rank that samples; its tokens.
        shared = {"sum": 1 + 2 * num_layers, "gather_columns": 1, "share_in_stage": 1}
        assert calls == {"check": 1, **shared}


def _counted(queue: Queue, replay: Replay) -> Replay:
    def run() -> None:
        with queue.one("replay"):
            replay()

    return run


def test_a_step_with_any_number_of_changes_is_replayed() -> None:
    """What ranks send differs in size, but they launch the same graphs."""
    biases = [{"token_id": token, "bias": float(token == 9)} for token in range(VOCAB_SIZE)]
    many = sampler_params(temperature=1.0, seed=3, logit_bias=biases)
    found = []
    for executor in (Executor, AheadExecutor):
        ranks = RankThreads(checkpoint("llama"), runner=SMALL, executor=executor)
        ranks.join(64)
        queue, plans = Queue(), Plans(ranks)
        if executor is AheadExecutor:
            graphs = ranks.ranks[0].executor.state.graphs  # type: ignore[attr-defined]
            for replays in (graphs._forwards, graphs._samplings, graphs._mixed):
                replays.update({size: _counted(queue, graph) for size, graph in replays.items()})
        try:
            for seq_id in range(1, 46):  # 28 bytes of each bias
                plans.builder.add(seq_id, [1, 2, seq_id], sampling=many)
            plans.launch([Row(seq_id, 3) for seq_id in range(1, 5)])
            for _ in range(3):
                plans.launch([Row(seq_id) for seq_id in range(1, 5)])
            results = plans.collect()
        finally:
            ranks.close()
        found.append([result.token_ids for result in results])
    assert queue.launches.count("replay") == 8
    assert found[0] == found[1]


def test_graphs_are_of_one_epoch(two: RankThreads) -> None:
    """They refer to its communicator, which is not freed before they are."""
    executors = [rank.executor for rank in two.ranks]
    assert [executor.num_recorded for executor in executors] == [7, 7]  # type: ignore[attr-defined]
    states = [executor.state for executor in executors]  # type: ignore[attr-defined]
    assert all(state.graphs is not None for state in states)
    for rank in two.ranks:
        assert rank.runner is not None
        rank.run(rank.runner.reset).result(SOON_S)
    assert not any(state.graphs for state in states)
    two.join(64)
    assert [executor.num_recorded for executor in executors] == [14, 14]  # type: ignore[attr-defined]
    plans = Plans(two)
    plans.builder.add(1, [1, 2, 3])
    plans.launch([Row(1, 3)])
    assert len(plans.collect()[0].token_ids) == 1


def test_what_was_launched_before_ranks_part_may_be_collected(two: RankThreads) -> None:
    plans = Plans(two)
    plans.builder.add(1, [1, 2, 3])
    plans.launch([Row(1, 3)])
    plans.launch([Row(1)])
    for rank in two.ranks:
        assert rank.runner is not None
        rank.run(rank.runner.reset).result(SOON_S)
    assert [len(result.token_ids) for result in plans.collect()] == [1, 1]


def test_what_was_launched_before_ranks_were_interrupted_is_invalid(two: RankThreads) -> None:
    plans = Plans(two)
    plans.builder.add(1, [1, 2, 3])
    plans.launch([Row(1, 3)])
    two.ranks[0].executor.interrupt(1)
    with pytest.raises(GroupBroken, match="interrupted"):
        plans.collect()
    with pytest.raises(GroupBroken, match="interrupted"):
        plans.launch([Row(1)])


def test_ranks_that_would_launch_different_collectives_do_not_meet() -> None:
    ranks = RankThreads(
        checkpoint("llama"), tensor_parallel_size=2, runner=SMALL, executor=AheadExecutor
    )
    ranks.ranks[1].executor._runner = RunnerConfig(max_graph_batch_size=2, max_graph_tokens=32)
    joining = [rank.run(lambda r=rank: r.join(64, 0, 1)) for rank in ranks.ranks]
    for future in joining:
        with pytest.raises(GroupBroken, match=r"same flags: .* max_graph_batch_size=2 "):
            future.result(SOON_S)
    ranks.close()


class Unwilling(AheadExecutor):
    """Cannot record, or is interrupted meanwhile."""

    interrupts = False

    def record(self, work: Callable[[], None]) -> Replay:
        if self.interrupts:
            self.interrupt(1)
        raise RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(("interrupts", "error"), [(False, CaptureFailed), (True, GroupBroken)])
def test_a_capture_that_another_rank_has_ended_is_not_the_models_fault(
    interrupts: bool, error: type[Exception]
) -> None:
    ranks = RankThreads(
        checkpoint("llama"), tensor_parallel_size=2, runner=SMALL, executor=Unwilling
    )
    for rank in ranks.ranks:
        rank.executor.interrupts = interrupts  # type: ignore[attr-defined]
    joining = [rank.run(lambda r=rank: r.join(64, 0, 1)) for rank in ranks.ranks]
    for future in joining:
        with pytest.raises(error):
            future.result(SOON_S)
    ranks.close()
