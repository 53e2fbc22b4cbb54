"""Stages work at the same time: on parts of a plan, and on the next one."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.interface import Computed
from tests.support.checkpoints import checkpoint
from tests.support.plans import step_plan
from tests.support.rank_threads import RankThreads
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service.array_types import Int64Array
from worker_service.cache_groups import CacheGroup
from worker_service.distributed.layout import Layout
from worker_service.errors import InvalidPlan
from worker_service.models.interface import Model
from worker_service.plan import StepPlan
from worker_service.runner.batch.micro_batches import MIN_TOKENS, micro_batches
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.service import wire

SOON_S = 60
GROUPS = [CacheGroup(block_tokens=4)]


def empty_table(num_parts: int) -> SequenceTable:
    return SequenceTable(
        vocab_size=300, max_model_len=1000, groups=GROUPS, num_gpu_blocks=64, num_parts=num_parts
    )


def divided(plan: StepPlan, table: SequenceTable) -> Iterator[tuple[Int64Array, StepPlan]]:
    return micro_batches(plan, table.rows.of(plan.seq_ids, "seq_ids"), table)


def plan_of(num_parts: int, rows: list[Row]) -> tuple[SequenceTable, StepPlan]:
    """Rows of new sequences, which have as many tokens as the rows compute, or more where they do
    not sample."""
    builder = PlanBuilder()
    for row in rows:
        builder.add(row.seq_id, [7] * (row.num_tokens + (not row.sample)))
    plan = wire.decode_plan(builder.plan(rows), received_us=0)
    table = empty_table(num_parts)
    for new in plan.new_sequences:
        table.apply(step_plan(new_sequences=(new,)))
    return table, plan


def decodes(num: int) -> list[Row]:
    return [Row(seq_id) for seq_id in range(1, num + 1)]


def part_tokens(plan: StepPlan, table: SequenceTable) -> list[int]:
    return [int(part.num_tokens.sum()) for _, part in divided(plan, table)]


def test_parts_of_random_plans_are_even_and_pieces_add_up() -> None:
    random = Random(3)
    for _ in range(300):
        num_parts = random.randint(2, 5)
        rows = decodes(random.randint(0, 40))
        for seq_id in range(100, 100 + random.randint(1, 6)):
            sizes = random.choice(((2, 12), (17, 60), (100, 900)))
            rows.append(Row(seq_id, random.randint(*sizes), sample=random.random() < 0.5))
        random.shuffle(rows)
        table, plan = plan_of(num_parts, rows)
        pieces: dict[int, list[tuple[int, bool]]] = {row: [] for row in range(len(rows))}
        for indices, part in divided(plan, table):
            columns = (indices.tolist(), part.num_tokens.tolist(), part.samples.tolist())
            for row, num_tokens, samples in zip(*columns, strict=True):
                pieces[row].append((num_tokens, samples))
        for row, planned in zip(pieces.values(), rows, strict=True):
            assert sum(num_tokens for num_tokens, _ in row) == planned.num_tokens
            assert all(num_tokens > 0 for num_tokens, _ in row)
            assert [samples for _, samples in row] == [False] * (len(row) - 1) + [planned.sample]
        long = [row.num_tokens for row in rows if row.num_tokens > MIN_TOKENS]
        short = sum(row.num_tokens for row in rows) - sum(long)
        tolerance = 1 + MIN_TOKENS * (1 + len(long)) + short  # short ones are where they are
        tokens = sum(long) + short
        assert max(part_tokens(plan, table)) <= tokens / num_parts + tolerance


@pytest.mark.parametrize("num_parts", [2, 3])
def test_decodes_stay_in_their_parts_whatever_is_beside_them(num_parts: int) -> None:
    table, alone = plan_of(num_parts, decodes(12))
    builder = PlanBuilder()
    builder.add(99, [7] * 200)
    both = wire.decode_plan(builder.plan([Row(99, 200)]), received_us=0)
    for new in both.new_sequences:
        table.apply(step_plan(new_sequences=(new,)))
    mixed = replace(
        alone,
        seq_ids=np.append(alone.seq_ids, both.seq_ids),
        num_tokens=np.append(alone.num_tokens, both.num_tokens),
        output=np.append(alone.output, both.output),
        lookahead=np.append(alone.lookahead, both.lookahead),
    )
    before = [part.seq_ids.tolist() for _, part in divided(alone, table)]
    after = [part.seq_ids[part.seq_ids != 99].tolist() for _, part in divided(mixed, table)]
    assert after == before


def test_a_fork_samples_where_the_last_piece_of_its_parent_does() -> None:
    table, _ = plan_of(2, [])
    builder = PlanBuilder()
    builder.add(1, [7] * 100)
    parent = wire.decode_plan(builder.plan([]), received_us=0).new_sequences
    table.apply(step_plan(new_sequences=parent))
    builder.fork(2, 1, sampling=sampler_params(), choice_index=1)
    plan = wire.decode_plan(builder.plan([Row(1, 100), Row(2, 0)]), received_us=0)
    table.apply(step_plan(new_sequences=plan.new_sequences))
    first, last = (part for _, part in divided(plan, table))
    assert (first.seq_ids.tolist(), first.samples.tolist()) == ([1], [False])
    assert (last.seq_ids.tolist(), last.samples.tolist()) == ([1, 2], [True, True])


def test_two_rows_of_a_sequence_are_refused_though_they_may_be_in_different_parts() -> None:
    table, plan = plan_of(2, [Row(1, 100)])
    twice = replace(
        plan,
        seq_ids=np.repeat(plan.seq_ids, 2),
        num_tokens=np.repeat(plan.num_tokens, 2),
        output=np.repeat(plan.output, 2),
        lookahead=np.repeat(plan.lookahead, 2),
    )
    with pytest.raises(InvalidPlan, match="two rows"):
        list(divided(twice, table))


@pytest.mark.parametrize("num_parts", [2, 3])
def test_a_new_sequence_joins_the_smallest_part(num_parts: int) -> None:
    table, random = empty_table(num_parts), Random(num_parts)
    known: list[int] = []
    for seq_id in range(1, 400):
        for leaving in random.sample(known, k=random.choice((0, 0, len(known) // 2))):
            known.remove(leaving)
            table.forget(np.array([leaving], np.int32))
        sizes = part_sizes(table, known)
        builder = PlanBuilder()
        builder.add(seq_id, [7])
        (new,) = wire.decode_plan(builder.plan([]), received_us=0).new_sequences
        table.apply(step_plan(new_sequences=(new,)))
        (part,) = np.flatnonzero(part_sizes(table, [*known, seq_id]) - sizes)
        assert sizes[part] == sizes.min()
        known.append(seq_id)


def part_sizes(table: SequenceTable, seq_ids: list[int]) -> npt.NDArray[np.int64]:
    row_ids = table.rows.of(np.array(seq_ids, np.int32), "seq_ids")
    return np.bincount(table.rows.parts(row_ids), minlength=table.rows.num_parts)


class Observed:
    """A model that calls `on_forward` before it computes."""

    def __init__(self, model: Model, on_forward: Callable[[], None]) -> None:
        self._model = model
        self._on_forward = on_forward

    def forward(self, batch: StepBatch) -> Tensor:
        self._on_forward()
        return self._model.forward(batch)

    def forward_to_logits(self, batch: StepBatch) -> Computed:
        return Computed(self.forward(batch))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def observing(on_forward: Callable[[int], None]) -> Callable[[Model, Layout], Model]:
    """Make each stage's model report its stage number before it computes."""

    def observed(model: Model, layout: Layout) -> Model:
        return cast(Model, Observed(model, lambda: on_forward(layout.stage)))

    return observed


def test_the_first_stage_computes_the_next_step_while_the_last_is_at_this_one() -> None:
    """The last stage computes this step's second part only once the next step has begun."""
    next_begun = threading.Event()
    num_forwards = [0, 0]

    def on_forward(stage: int) -> None:
        num_forwards[stage] += 1
        if stage == 0 and num_forwards[0] == 3:  # two parts of a step, and the next
            next_begun.set()
        if stage == 1 and num_forwards[1] == 2:
            assert next_begun.wait(SOON_S), "the first stage waits for the whole step"

    ranks = RankThreads(checkpoint("llama"), pipeline_parallel_size=2, wrap=observing(on_forward))
    try:
        ranks.join(64)
        builder = PlanBuilder()
        builder.add(1, [1, 2, 3])
        builder.add(2, [4, 5])
        steps = [[Row(1, 3), Row(2, 2)], [Row(1, 1), Row(2, 1)]]
        plans = [builder.plan(rows).SerializeToString() for rows in steps]
        results = [ranks.send(plan) for plan in plans]
        assert [len(last.result(2 * SOON_S).token_ids) for _, last in results] == [2, 2]
        assert num_forwards == [4, 4]
    finally:
        ranks.close()


def test_a_stage_waits_for_the_token_that_its_next_row_computes() -> None:
    ranks = RankThreads(checkpoint("llama"), pipeline_parallel_size=2)
    try:
        ranks.join(64)
        first, second = ranks.ranks
        builder = PlanBuilder()
        builder.add(1, [1, 2, 3])
        plans = [builder.plan([Row(1, n)]).SerializeToString() for n in (3, 1)]
        prompt = first.run(lambda: first.execute(plans[0]))
        decode = first.run(lambda: first.execute(plans[1]))
        prompt.result(SOON_S)
        with pytest.raises(TimeoutError):
            decode.result(timeout=0.3)
        second.run(lambda: second.execute(plans[0])).result(SOON_S)
        decode.result(SOON_S)
        assert len(second.run(lambda: second.execute(plans[1])).result(SOON_S).token_ids) == 1
    finally:
        ranks.close()
