"""Stages work at the same time: on parts of a plan, and on the next one."""

import threading
from collections.abc import Callable
from random import Random
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor

from pagewire_kernels.computed import Computed
from tests.support.checkpoints import checkpoint
from tests.support.rank_threads import RankThreads
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service import wire
from worker_service.models.interface import Model
from worker_service.parallel.layout import Layout
from worker_service.parallel.micro_batches import micro_batches
from worker_service.plan import StepPlan
from worker_service.sequence_state import SequenceTable

SOON_S = 30


def empty_table(num_parts: int) -> SequenceTable:
    return SequenceTable(
        vocab_size=300, max_model_len=64, block_size=4, num_gpu_blocks=64, num_parts=num_parts
    )


def table_and_plan(num_parts: int) -> tuple[SequenceTable, StepPlan]:
    """Five sequences, the last of them a fork that samples from the first one's logits."""
    builder = PlanBuilder()
    for seq_id in (1, 2, 3, 4):
        builder.add(seq_id, [7] * seq_id)
    rows = [Row(seq_id, seq_id) for seq_id in (1, 2, 3, 4)]
    builder.plan(rows)
    builder.fork(5, 2, sampling=sampler_params(), choice_index=1)
    rows.append(Row(5, 0))
    plan = wire.decode_plan(builder.plan(rows), received_us=0)
    table = empty_table(num_parts)
    known = PlanBuilder()
    for seq_id in (1, 2, 3, 4):
        known.add(seq_id, [7] * seq_id)
    for index, new in enumerate(wire.decode_plan(known.plan([]), received_us=0).new_sequences):
        table.add(new, f"new_sequences[{index}]")
    for new in plan.new_sequences:
        table.add(new, "new_sequences[0]")
    return table, plan


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_every_row_is_in_one_part_and_in_its_order(num_parts: int) -> None:
    table, plan = table_and_plan(num_parts)
    parts = list(micro_batches(plan, table))
    assert len(parts) == min(num_parts, 4)
    assert sorted(row for rows, _ in parts for row in rows.tolist()) == list(range(5))
    for rows, part in parts:
        assert rows.tolist() == sorted(rows.tolist())
        np.testing.assert_array_equal(part.seq_ids, plan.seq_ids[rows])
        np.testing.assert_array_equal(part.num_tokens, plan.num_tokens[rows])


@pytest.mark.parametrize("num_parts", [2, 3])
def test_a_fork_is_where_its_parents_logits_are(num_parts: int) -> None:
    table, plan = table_and_plan(num_parts)
    (both,) = [p for _, p in micro_batches(plan, table) if 5 in p.seq_ids.tolist()]
    assert 2 in both.seq_ids.tolist()


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
        table.add(new, "new_sequences[0]")
        (part,) = np.flatnonzero(part_sizes(table, [*known, seq_id]) - sizes)
        assert sizes[part] == sizes.min()
        known.append(seq_id)


def part_sizes(table: SequenceTable, seq_ids: list[int]) -> npt.NDArray[np.int64]:
    slots = table.slots(np.array(seq_ids, np.int32), "seq_ids")
    return np.bincount(table.parts(slots), minlength=table.num_parts)


class Observed:
    """A model that tells when it is about to compute."""

    def __init__(self, model: Model, on_forward: Callable[[], None]) -> None:
        self._model = model
        self._on_forward = on_forward

    def forward(self, *inputs: Any) -> Tensor:
        self._on_forward()
        return self._model.forward(*inputs)

    def forward_to_logits(self, *inputs: Any) -> Computed:
        return Computed(self.forward(*inputs[:-1]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


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

    def observed(model: Model, layout: Layout) -> Model:
        return cast(Model, Observed(model, lambda: on_forward(layout.stage)))

    ranks = RankThreads(checkpoint("llama"), pipeline_parallel_size=2, wrap=observed)
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


def test_a_stage_goes_on_while_the_next_has_not_begun() -> None:
    ranks = RankThreads(checkpoint("llama"), pipeline_parallel_size=2)
    try:
        ranks.join(64)
        first, second = ranks.ranks
        builder = PlanBuilder()
        builder.add(1, list(range(12)))
        chunks = [Row(1, 4, sample=False), Row(1, 4, sample=False), Row(1, 4)]
        plans = [builder.plan([chunk]).SerializeToString() for chunk in chunks]
        for plan in plans:
            first.run(lambda plan=plan: first.execute(plan)).result(SOON_S)
        results = [second.run(lambda plan=plan: second.execute(plan)) for plan in plans]
        assert [len(each.result(SOON_S).token_ids) for each in results] == [0, 0, 1]
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
