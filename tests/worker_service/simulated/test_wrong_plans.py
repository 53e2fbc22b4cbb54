"""Each way to break the memory model or the row rules is caught, and the error names the field."""

from typing import Any

import pytest

from pagewire.v1 import context_pb2, plan_pb2
from tests.support.simulated import Bench
from tests.support.worker_driver import GREEDY, Row, block_table, column, sampler_params
from worker_service.errors import InvalidPlan

PROMPT = [5, 6, 7, 8, 9, 10]


def started() -> Bench:
    """Sequence 1 has its prompt's six tokens in blocks 0 and 1, and one token sampled."""
    bench = Bench()
    bench.plans.add(1, PROMPT)
    bench.step(Row(1, 6))
    return bench


def new(seq_id: int, tokens: list[int], blocks: list[int], **fields: Any) -> plan_pb2.NewSequence:
    fields = {"num_prompt_tokens": len(tokens), "sampling": GREEDY} | fields
    return plan_pb2.NewSequence(
        seq_id=seq_id, token_ids=column(tokens), tables=block_table(blocks), **fields
    )


def part(kind: Any = 1, digest: bytes = bytes(32), start: int = 0) -> context_pb2.ContextPart:
    return context_pb2.ContextPart(kind=kind, digest=digest, start=start)


def refused(bench: Bench, field: str, problem: str, *rows: Row, **fields: Any) -> None:
    """The plan of exactly these columns ends in InvalidPlan that says so."""
    plan = plan_pb2.StepPlan(
        epoch=1,
        step_id=1,
        seq_ids=column(row.seq_id for row in rows),
        num_tokens=column(row.num_tokens for row in rows),
        output=bytes(row.sample for row in rows),
        **fields,
    )
    with pytest.raises(InvalidPlan) as caught:
        bench.execute(plan)
    assert caught.value.field == field
    assert problem in caught.value.expected


def with_new(*sequences: plan_pb2.NewSequence) -> dict[str, Any]:
    return {"new_sequences": sequences}


def test_a_read_of_a_block_never_written() -> None:
    prefix = new(2, PROMPT, [7, 8], num_computed_tokens=4)
    problem = "reads position 0 from device block 7 offset 0, where nothing was written"
    refused(started(), "seq_ids", problem, Row(2, 2), **with_new(prefix))


@pytest.mark.parametrize(
    ("context", "position"),
    [([part()], 0), ([part(2)], 0), ([part(3, start=2)], 2), ([part(2, start=4)], None)],
)
def test_a_read_of_kv_of_another_context(
    context: list[context_pb2.ContextPart], position: int | None
) -> None:
    bench = started()
    bench.execute(bench.plans.plan([], forget_seq_ids=column([1])))
    sequence = new(2, PROMPT, [0, 8], num_computed_tokens=4, context=context)
    problem = f"reads position {position} from device block 0 offset {position}, where another"
    plan = plan_pb2.StepPlan(
        epoch=1, step_id=3, seq_ids=column([2]), num_tokens=column([2]), new_sequences=[sequence]
    )
    if position is None:
        bench.execute(plan)
        return
    with pytest.raises(InvalidPlan, match=problem):
        bench.execute(plan)


def test_a_read_of_a_slot_never_written_in_a_block_that_was() -> None:
    prefix = new(2, [*PROMPT, 0, 0, 1], [0, 1, 8], num_computed_tokens=8)
    problem = "reads position 6 from device block 1 offset 2, where nothing was written"
    refused(started(), "seq_ids", problem, Row(2, 1), **with_new(prefix))


def test_a_read_of_another_historys_kv() -> None:
    prefix = new(2, [5, 6, 70, 8, 9], [0, 8], num_computed_tokens=4)
    problem = "reads position 2 from device block 0 offset 2, where another history's KV is"
    refused(started(), "seq_ids", problem, Row(2, 1), **with_new(prefix))


def test_a_read_of_what_another_row_only_now_writes() -> None:
    bench = Bench()
    first, second = new(1, PROMPT, [0, 1]), new(2, PROMPT, [0, 2], num_computed_tokens=4)
    refused(
        bench, "seq_ids", "nothing was written", Row(1, 6), Row(2, 2), **with_new(first, second)
    )


def test_a_block_table_entry_changed_under_a_sequence() -> None:
    refused(
        started(),
        "seq_ids",
        "sequence 1 reads position 0 from device block 9",
        Row(1),
        block_updates=column([1, 0, 0, 9]),
    )


def test_a_write_to_a_block_given_to_two() -> None:
    problem = "sequence 2 writes to device block 1, which is shared with sequence 1"
    refused(started(), "seq_ids", problem, Row(2, 6), **with_new(new(2, PROMPT, [3, 1])))


def test_a_write_to_a_shared_last_block_without_a_copy() -> None:
    bench = started()
    fork = plan_pb2.NewSequence(
        seq_id=2, parent_seq_id=1, tables=block_table([0, 1]), sampling=GREEDY
    )
    problem = "sequence 1 writes to device block 1, which is shared with sequence 2"
    refused(bench, "seq_ids", problem, Row(1), Row(2), **with_new(fork))


def test_a_lost_copy() -> None:
    bench = started()
    fork = plan_pb2.NewSequence(
        seq_id=2, parent_seq_id=1, tables=block_table([0, 9]), sampling=GREEDY
    )
    problem = "sequence 2 reads position 4 from device block 9 offset 0, where nothing was written"
    refused(bench, "seq_ids", problem, Row(1), Row(2), **with_new(fork))


def test_a_copy_of_the_wrong_block() -> None:
    bench = started()
    fork = plan_pb2.NewSequence(
        seq_id=2, parent_seq_id=1, tables=block_table([0, 9]), sampling=GREEDY
    )
    problem = "sequence 2 reads position 4 from device block 9 offset 0, where another history"
    refused(bench, "seq_ids", problem, Row(1), Row(2), copy=column([0, 9]), **with_new(fork))


def test_use_of_a_block_that_was_freed_and_written_again() -> None:
    bench = started()
    bench.plans.next_block = 0
    bench.plans.add(2, [1, 2, 3, 4, 5])
    bench.step(Row(2, 5), forget_seq_ids=column([1]))
    back = new(1, [*PROMPT, 11], [0, 1], num_computed_tokens=6)
    refused(bench, "seq_ids", "where another history's KV is", Row(1, 1), **with_new(back))


@pytest.mark.parametrize(
    ("field", "pairs", "problem"),
    [
        ("swap_out", [7, 0], "source block 7 was never written"),
        ("swap_in", [7, 9], "source block 7 was never written"),
        ("copy", [7, 9], "source block 7 was never written"),
        ("swap_out", [0, 1, 1, 1], "target block 1 is named twice"),
        ("copy", [0, 9, 1, 9], "target block 9 is named twice"),
        ("copy", [0, 1], "device block 1 is in use by sequence 1"),
    ],
)
def test_a_move_that_cannot_be(field: str, pairs: list[int], problem: str) -> None:
    refused(started(), field, problem, **{field: column(pairs)})


def test_a_swap_out_of_a_block_that_its_holder_writes() -> None:
    problem = "row 0: sequence 1 writes to device block 1, which this step swaps out"
    refused(started(), "seq_ids", problem, Row(1), swap_out=column([1, 0]))


def test_a_row_that_uses_what_its_own_step_swaps_in() -> None:
    bench = started()
    bench.step(swap_out=column([0, 0, 1, 1]), forget_seq_ids=column([1]))
    back = new(1, [*PROMPT, 11], [8, 9], num_computed_tokens=6)
    problem = "row 0: sequence 1 uses device block 8, which this step swaps in"
    moves = column([0, 8])
    refused(bench, "seq_ids", problem, Row(1, 1), swap_in=moves, **with_new(back))


def test_a_swap_in_over_a_block_in_use() -> None:
    bench = started()
    bench.step(swap_out=column([0, 0]))
    problem = "device block 1 is in use by sequence 1"
    refused(bench, "swap_in", problem, swap_in=column([0, 1]))


def test_a_copy_over_a_block_just_swapped_in() -> None:
    bench = started()
    bench.step(swap_out=column([0, 0]))
    problem = "device block 9 is a target of swap_in, too"
    refused(bench, "copy", problem, swap_in=column([0, 9]), copy=column([1, 9]))


def test_a_copy_of_a_block_just_swapped_in() -> None:
    bench = started()
    bench.step(swap_out=column([0, 0]))
    problem = "device block 9 is a target of swap_in, too"
    refused(bench, "copy", problem, swap_in=column([0, 9]), copy=column([9, 10]))


def test_blocks_swapped_in_the_wrong_way_round() -> None:
    bench = started()
    bench.step(swap_out=column([0, 0, 1, 1]), forget_seq_ids=column([1]))
    bench.step(swap_in=column([1, 8, 0, 9]))
    back = new(1, [*PROMPT, 11], [8, 9], num_computed_tokens=6)
    problem = "reads position 0 from device block 8 offset 0, where another history's KV is"
    refused(bench, "seq_ids", problem, Row(1, 1), **with_new(back))


@pytest.mark.parametrize(
    ("field", "problem", "sequence"),
    [
        ("context", "expected none in a fork", new(2, [], [2], parent_seq_id=1, context=[part()])),
        ("context[0].kind", "ADAPTER or MEDIA, got 0", new(2, PROMPT, [2], context=[part(0)])),
        ("context[0].kind", "ADAPTER or MEDIA, got 9", new(2, PROMPT, [2], context=[part(9)])),
        ("context[1].digest", "expected 32 bytes, got 4",
            new(2, PROMPT, [2], context=[part(), part(digest=b"name")])),
        ("token_ids", "expected at most 64 in all, got 65", new(2, [1] * 65, [])),
        ("tables[0].block_ids", "a block is named twice", new(2, PROMPT, [4, 4])),
        ("tables[0].block_ids", "expected at most 16 blocks", new(2, PROMPT, list(range(2, 19)))),
        ("num_prompt_tokens", "expected 1 to 6", new(2, PROMPT, [2], num_prompt_tokens=0)),
        ("num_prompt_tokens", "expected 0 in a fork", new(2, [], [2], parent_seq_id=1,
                                                          num_prompt_tokens=1)),
        ("num_computed_tokens", "expected 0 in a fork", new(2, [], [2], parent_seq_id=1,
                                                            num_computed_tokens=1)),
        (
            "sampling.suppressed_token_ids",
            "expected token ids",
            new(2, PROMPT, [2], sampling=sampler_params(suppressed_token_ids=column([2000]))),
        ),
    ],
)  # fmt: skip
def test_a_new_sequence_that_cannot_be(
    field: str, problem: str, sequence: plan_pb2.NewSequence
) -> None:
    refused(started(), f"new_sequences[0].{field}", problem, **with_new(sequence))


@pytest.mark.parametrize(
    ("updates", "problem"),
    [
        ([1, 0, -1, 8], "entry -1 of sequence 1 does not follow"),
        ([1, 0, 2, 8, 1, 0, 2, 9], "entry 2 of sequence 1 is set twice"),
        ([1, 0, 2, 0], "entry 2 of sequence 1 gives it block 0 twice"),
    ],
)
def test_a_block_update_that_cannot_be(updates: list[int], problem: str) -> None:
    refused(started(), "block_updates", problem, block_updates=column(updates))


FORK = plan_pb2.NewSequence(seq_id=2, parent_seq_id=1, tables=block_table([0, 1]), sampling=GREEDY)


@pytest.mark.parametrize(
    ("field", "problem", "rows", "fields"),
    [
        ("num_tokens", "only a new fork", [Row(1), Row(2, 0, sample=False)], with_new(FORK)),
        ("num_tokens", "which computes nothing", [Row(2, 0)], with_new(FORK)),
        ("seq_ids", "before its parent's", [Row(2, 0), Row(1)], with_new(FORK)),
        (
            "num_tokens",
            "does not compute up to its last token",
            [Row(3, 5, sample=False), Row(2, 0)],
            with_new(
                new(3, PROMPT, [5, 6]),
                plan_pb2.NewSequence(
                    seq_id=2, parent_seq_id=3, tables=block_table([5, 6]), sampling=GREEDY
                ),
            ),
        ),
        (
            "num_tokens",
            "sequence 2 lacks blocks",
            [Row(3, 6), Row(2, 0)],
            with_new(
                new(3, PROMPT, [5, 6]),
                plan_pb2.NewSequence(
                    seq_id=2, parent_seq_id=3, tables=block_table([5]), sampling=GREEDY
                ),
            ),
        ),
        (
            "lookahead",
            "row 0 has drafts, and a fork that samples from its logits",
            [Row(3, 6), Row(2, 0)],
            {"lookahead": bytes([1, 0])}
            | with_new(
                new(3, PROMPT, [5, 6]),
                plan_pb2.NewSequence(
                    seq_id=2, parent_seq_id=3, tables=block_table([5, 6]), sampling=GREEDY
                ),
            ),
        ),
        (
            "new_sequences",
            "in the order of their rows",
            [Row(3, 6), Row(2, 6)],
            with_new(new(2, PROMPT, [5, 6]), new(3, PROMPT, [7, 8])),
        ),
    ],
)
def test_rows_that_break_the_rules(
    field: str, problem: str, rows: list[Row], fields: dict[str, Any]
) -> None:
    refused(started(), field, problem, *rows, **fields)


def test_a_row_of_more_tokens_than_there_are() -> None:
    problem = "computes 2147483653 tokens of 7"
    refused(started(), "num_tokens", problem, Row(1, 2**31 - 1, sample=False))


def test_a_row_beyond_the_models_length() -> None:
    bench = Bench()
    bench.plans.add(1, [3] * 64)
    bench.step(Row(1, 64))
    refused(bench, "num_tokens", "sequence 1 goes beyond the model's length", Row(1))


def test_a_fork_without_tokens_that_has_other_blocks_than_its_parent() -> None:
    parent = new(3, PROMPT, [5, 6])
    fork = plan_pb2.NewSequence(
        seq_id=4, parent_seq_id=3, tables=block_table([5, 9]), sampling=GREEDY
    )
    problem = "sequence 4 reads position 4 from device block 9 offset 0, where nothing was written"
    refused(Bench(), "seq_ids", problem, Row(3, 6), Row(4, 0), **with_new(parent, fork))


def in_groups(
    seq_id: int, tokens: list[int], *tables: list[int], **fields: Any
) -> plan_pb2.NewSequence:
    """A new sequence with a table of every group."""
    sequence = new(seq_id, tokens, [], **fields)
    del sequence.tables[:]
    for group, blocks in enumerate(tables):
        sequence.tables.add(group=group, block_ids=column(blocks))
    return sequence


MEDIA = context_pb2.ContextPart(kind=3, digest=bytes(32), length=6)
OTHER_MEDIA = context_pb2.ContextPart(kind=3, digest=b"\1" * 32, length=6)


def with_source() -> Bench:
    """Sequence 1 has a source of six tokens in blocks 2 and 3, which its first row wrote."""
    bench = Bench(cache_groups="growing:4,fixed:4")
    first = in_groups(1, PROMPT, [0, 1], [2, 3], context=[MEDIA])
    plan = plan_pb2.StepPlan(
        epoch=1, step_id=1, seq_ids=column([1]), num_tokens=column([6]), new_sequences=[first]
    )
    bench.execute(plan)
    return bench


@pytest.mark.parametrize(
    ("problem", "num_computed", "tables", "media"),
    [
        ("writes to device block 2, which is shared with sequence 1", 0, ([8, 9], [2, 3]), MEDIA),
        ("reads token 4 of its source from device block 9 offset 0", 4, ([0, 8], [2, 9]), MEDIA),
        (
            "reads token 0 of its source from device block 2 offset 0, where another",
            *(4, ([8, 9], [2, 3]), OTHER_MEDIA),
        ),
    ],
)
def test_a_source_that_is_written_twice_or_is_not_there(
    problem: str, num_computed: int, tables: tuple[list[int], ...], media: context_pb2.ContextPart
) -> None:
    bench = with_source()
    if media is OTHER_MEDIA:  # its own KV, but another's source
        prefix = in_groups(3, PROMPT, [8, 9], [10, 11], context=[media])
        plan = plan_pb2.StepPlan(
            epoch=1, step_id=2, seq_ids=column([3]), num_tokens=column([6]), new_sequences=[prefix]
        )
        bench.execute(plan)
        bench.execute(plan_pb2.StepPlan(epoch=1, step_id=3, forget_seq_ids=column([3])))
    second = in_groups(2, PROMPT, *tables, context=[media], num_computed_tokens=num_computed)
    refused(bench, "seq_ids", problem, Row(2, 6 - num_computed), **with_new(second))


FETCH = plan_pb2.BlockFetch(
    fetch_id=1,
    addresses=["a:1"],
    source_epoch=1,
    lease_id=1,
    token=bytes(16),
    blocks=column([0, 9]),
    keys=bytes(16),
    timeout_ms=1,
)


def test_a_state_after_other_tokens_than_those_computed() -> None:
    bench = Bench(cache_groups="growing:4,state:1")
    first = in_groups(1, PROMPT, [0, 1], [2])
    plan = plan_pb2.StepPlan(
        epoch=1, step_id=1, seq_ids=column([1]), num_tokens=column([6]), new_sequences=[first]
    )
    bench.execute(plan)
    second = in_groups(2, PROMPT, [0, 8], [9], num_computed_tokens=5)
    problem = "expected a state after 5 tokens in device block 9 offset 0, where another history's"
    field = "new_sequences[0].num_computed_tokens"
    refused(bench, field, problem, copy=column([2, 9]), **with_new(second))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, None),
        ({"swap_in": column([3, 9])}, "device block 9 is in swap_in, too"),
        ({"copy": column([0, 9])}, "device block 9 is in copy, too"),
        ({"copy": column([9, 10])}, "device block 9 is in copy, too"),
        ({"fetches": [FETCH]}, "device block 9 is in fetches[0].blocks, too"),
    ],
)
def test_a_state_that_is_saved_where_the_step_moves_a_block(
    fields: dict[str, Any], problem: str | None
) -> None:
    bench = Bench(cache_groups="growing:4,state:1")
    first = in_groups(1, PROMPT, [0, 1], [2])
    rows = {"seq_ids": column([1]), "num_tokens": column([5]), "output": bytes(1)}
    plan = plan_pb2.StepPlan(epoch=1, step_id=1, new_sequences=[first], **rows)
    bench.execute(plan)
    bench.execute(plan_pb2.StepPlan(epoch=1, step_id=2, copy=column([0, 9])))
    bench.execute(plan_pb2.StepPlan(epoch=1, step_id=3, swap_out=column([0, 3])))
    save = column([1, 1, 6, 9])
    if problem is not None:
        refused(bench, "saved_states", problem, Row(1, 1), saved_states=save, **fields)
        return
    plan = plan_pb2.StepPlan(
        epoch=1, step_id=4, seq_ids=column([1]), num_tokens=column([1]), saved_states=save
    )
    bench.execute(plan)
    assert bench.runner.memory.content(9) == bench.runner.memory.content(2)
