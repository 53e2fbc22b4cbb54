"""Tables of several cache groups: each is checked, and an error names its field."""

from collections.abc import Sequence

import numpy as np
import pytest

from tests.support.plans import block_table, new_sequence, step_plan
from worker_service.cache_groups import CacheGroup, CacheLifetime
from worker_service.errors import InvalidPlan
from worker_service.plan import RowErrorReason
from worker_service.runner.batch.inputs import lay_out, slot_mapping
from worker_service.runner.state.sequence_table import SequenceTable

GROWING = CacheGroup(block_tokens=4)
WINDOW = CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=8, span=10)
CHUNK = CacheGroup(lifetime=CacheLifetime.CHUNK, block_tokens=8, span=16)
NUM_BLOCKS = 40


def empty_table(*groups: CacheGroup) -> SequenceTable:
    return SequenceTable(vocab_size=100, max_model_len=64, groups=groups, num_gpu_blocks=NUM_BLOCKS)


def add(
    table: SequenceTable,
    seq_id: int,
    tables: Sequence[tuple[int, int, Sequence[int]]],
    *,
    num_tokens: int = 24,
    num_computed: int = 0,
) -> int:
    """Add a sequence. tables: (group, first index, blocks). Returns its row."""
    new = new_sequence(
        seq_id=seq_id,
        token_ids=range(num_tokens),
        num_computed_tokens=num_computed,
        tables=tuple(block_table(blocks, group, first) for group, first, blocks in tables),
    )
    table.apply(step_plan(new_sequences=(new,)))
    return table.rows[seq_id]


def update(table: SequenceTable, *updates: Sequence[int]) -> None:
    """updates: (sequence, group, index, block)."""
    table.apply(step_plan(block_updates=np.array(updates, np.int32).reshape(-1, 4)))


@pytest.mark.parametrize(
    ("tables", "field", "problem"),
    [
        ([(2, 0, [1])], r"tables\[0\]\.group", "from 0 to 1, got 2"),
        (
            [(0, 0, [1]), (0, 0, [2])],
            r"tables\[1\]\.group",
            "group 0 has two tables",
        ),
        (
            [(1, 0, [NUM_BLOCKS])],
            r"tables\[0\]\.block_ids",
            "blocks from 0 to 39",
        ),
        (
            [(1, 0, range(9))],
            r"tables\[0\]\.block_ids",
            "at most 8 blocks, got 9 from index 0",
        ),
        ([(1, 1, [1])], r"tables\[0\]\.first_index", "at most 0, got 1"),
        (
            [(0, 0, [1]), (1, 0, [1])],
            r"tables\[1\]\.block_ids",
            "in a table of group 0",
        ),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_its_field(
    tables: Sequence[tuple[int, int, Sequence[int]]], field: str, problem: str
) -> None:
    with pytest.raises(InvalidPlan, match=f"{field}.*{problem}"):
        add(empty_table(GROWING, WINDOW), 1, tables)


@pytest.mark.parametrize(
    ("updates", "problem"),
    [
        ([(1, 2, 0, 9)], "cache groups from 0 to 1, got 2 to 2"),
        ([(1, -1, 0, 9)], "cache groups from 0 to 1, got -1 to -1"),
        ([(1, 0, 6, 9)], "more than one past its table's end"),
        ([(1, 1, 0, 9)], "before its table's first index"),
        ([(1, 1, 8, 9)], "table indices from 0 to 7"),
        ([(1, 0, 2, 3)], "block 3 is in a table of group 1, got group 0"),
        ([(1, 0, 2, 9), (1, 1, 2, 9)], "block 9 is in a table of group 0, got group 1"),
    ],
)
def test_an_update_that_cannot_be_is_refused(updates: list[tuple[int, ...]], problem: str) -> None:
    table = empty_table(GROWING, WINDOW)
    add(table, 1, [(0, 0, [1, 2, 20, 21, 22]), (1, 1, [3, 4])], num_computed=17)
    with pytest.raises(InvalidPlan, match=f"block_updates.*{problem}"):
        update(table, *updates)


def test_a_table_grows_from_its_first_index() -> None:
    table = empty_table(GROWING, WINDOW)
    row = add(
        table, 1, [(0, 0, [1, 2, 3, 4, 5, 6, 7]), (1, 2, [8, 9])], num_tokens=30, num_computed=25
    )
    update(table, (1, 1, 2, 15), (1, 1, 3, 16), (1, 0, 7, 17), (1, 1, 2, 18))
    assert table.tables[1].blocks[row].tolist() == [-1, -1, 18, 16, -1, -1, -1, -1]
    assert table.tables[0].blocks[row, 5:9].tolist() == [6, 7, 17, -1]
    update(table, (1, 0, 8, 19))
    assert table.capacity[row] == 32, "of the group with the fewest tokens"
    table.forget(np.array([1], np.int32))
    assert (table.tables[1].blocks == -1).all()


def test_a_block_that_a_window_has_released_may_join_another_group() -> None:
    table = empty_table(GROWING, WINDOW)
    row = add(table, 1, [(0, 0, [1, 2, 3, 4, 5]), (1, 0, [10, 11, 12])])
    table.num_computed_tokens[row] = 16  # sees positions 7 and later
    with pytest.raises(InvalidPlan, match="block 10 is in a table of group 1"):
        update(table, (1, 0, 5, 10))
    table = empty_table(GROWING, WINDOW)
    row = add(table, 1, [(0, 0, [1, 2, 3, 4, 5]), (1, 0, [10, 11, 12])])
    table.num_computed_tokens[row] = 17  # sees positions 8 and later
    update(table, (1, 0, 5, 10))
    with pytest.raises(InvalidPlan, match="block 10 is in a table of group 0"):
        update(table, (1, 1, 3, 10))


def test_blocks_that_a_failed_sequence_would_read_may_join_another_group() -> None:
    """The core plans its next tokens, and with them its window's, until it knows of the failure."""
    table = empty_table(GROWING, WINDOW)
    add(table, 1, [(0, 0, range(6)), (1, 0, [10, 11, 12])], num_computed=23)
    with pytest.raises(InvalidPlan, match="block 11 is in a table of group 1"):
        update(table, (1, 0, 6, 11))
    table = empty_table(GROWING, WINDOW)
    row_id = add(table, 1, [(0, 0, range(6)), (1, 0, [10, 11, 12])], num_computed=23)
    table.failures[row_id] = RowErrorReason.NON_FINITE_LOGITS
    update(table, (1, 0, 6, 11))


def test_blocks_of_a_forgotten_sequence_may_join_another_group() -> None:
    table = empty_table(GROWING, WINDOW)
    add(table, 1, [(0, 0, [1]), (1, 0, [2])])
    table.forget(np.array([1], np.int32))
    add(table, 2, [(0, 0, [2]), (1, 0, [1])])


@pytest.mark.parametrize(
    ("group", "first", "num_computed"),
    [(GROWING, 0, 0), (WINDOW, 0, 0), (WINDOW, 2, 25), (CHUNK, 2, 16), (CHUNK, 4, 32)],
)
def test_a_table_begins_with_what_the_next_token_reads(
    group: CacheGroup, first: int, num_computed: int
) -> None:
    blocks = list(range(first, 8))
    add(empty_table(group), 1, [(0, first, blocks)], num_tokens=40, num_computed=num_computed)
    for more in (1, 2):
        with pytest.raises(InvalidPlan, match=rf"tables\[0\]\.first_index.*at most {first}"):
            add(
                empty_table(group),
                1,
                [(0, first + more, blocks[more:])],
                num_tokens=40,
                num_computed=num_computed,
            )


def test_slots_are_those_of_each_groups_blocks() -> None:
    table = empty_table(GROWING, WINDOW)
    row = add(table, 1, [(0, 0, [1, 2, 3, 4, 5]), (1, 1, [10, 11])], num_computed=17)
    inputs = lay_out(np.array([row]), np.array([17]), np.array([3], np.int32), table)
    growing, window = (slot_mapping(inputs, tables).tolist() for tables in table.tables)
    assert growing == [5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3]
    assert window == [11 * 8 + 1, 11 * 8 + 2, 11 * 8 + 3]
