"""Stages work at the same time: on parts of a plan, and on the next one."""

import numpy as np
import pytest

from tests.support.checkpoints import checkpoint
from tests.support.rank_threads import RankThreads
from tests.support.worker_driver import PlanBuilder, Row, sampler_params
from worker_service import wire
from worker_service.parallel.micro_batches import micro_batches
from worker_service.plan import StepPlan
from worker_service.sequence_state import SequenceTable

SOON_S = 30


def table_and_plan() -> tuple[SequenceTable, StepPlan]:
    """Five sequences, the last of them a fork that samples from the first one's logits."""
    builder = PlanBuilder()
    for seq_id in (1, 2, 3, 4):
        builder.add(seq_id, [7] * seq_id)
    rows = [Row(seq_id, seq_id) for seq_id in (1, 2, 3, 4)]
    builder.plan(rows)
    builder.fork(5, 2, sampling=sampler_params(), choice_index=1)
    rows.append(Row(5, 0))
    plan = wire.decode_plan(builder.plan(rows), received_us=0)
    table = SequenceTable(vocab_size=300, max_model_len=64, block_size=4, num_gpu_blocks=64)
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
    table, plan = table_and_plan()
    parts = list(micro_batches(plan, table, num_parts))
    assert len(parts) == min(num_parts, 4)
    assert sorted(row for rows, _ in parts for row in rows.tolist()) == list(range(5))
    for rows, part in parts:
        assert rows.tolist() == sorted(rows.tolist())
        np.testing.assert_array_equal(part.seq_ids, plan.seq_ids[rows])
        np.testing.assert_array_equal(part.num_tokens, plan.num_tokens[rows])


@pytest.mark.parametrize("num_parts", [2, 3])
def test_a_fork_is_where_its_parents_logits_are(num_parts: int) -> None:
    table, plan = table_and_plan()
    (both,) = [p for _, p in micro_batches(plan, table, num_parts) if 5 in p.seq_ids.tolist()]
    assert 2 in both.seq_ids.tolist()


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
