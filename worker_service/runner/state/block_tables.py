"""The block tables of all sequences, in one cache group and in all, and the states in blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.cache_groups import CacheGroup
from worker_service.errors import InvalidPlan
from worker_service.plan import BlockTable, NewSequence
from worker_service.runner.state.state_positions import StatePositions

NO_BLOCK = -1
_NO_GROUP = -1


class BlockTables:
    """The tables of one cache group: columns by row of the sequence table.

    Invariants, for a row in use: its entries from `firsts` up to `ends` are blocks of the cache,
    the others NO_BLOCK. Entries that the group's lifetime has released stay, and are not read: the
    core may have given their blocks to other sequences.
    """

    def __init__(self, group: CacheGroup, max_model_len: int, num_rows: int) -> None:
        self.group = group
        self.has_tokens, self.block_tokens = group.has_tokens, group.block_tokens
        self.entry_tokens = group.block_tokens if group.has_tokens else max_model_len
        """Tokens that an entry has room for: in a group of states, any number."""
        width = group.table_width(max_model_len)
        self.blocks = np.full((num_rows, width), NO_BLOCK, np.int32)
        self.firsts = np.zeros(num_rows, np.int64)
        self.ends = np.zeros(num_rows, np.int64)

    def put(self, row_id: int, table: BlockTable) -> None:
        """Set a new sequence's table."""
        end = table.first_index + len(table.block_ids)
        self.blocks[row_id, table.first_index : end] = table.block_ids
        self.firsts[row_id], self.ends[row_id] = table.first_index, end

    def update(
        self, row_ids: Int64Array, indices: Int64Array, blocks: Int32Array, field: str
    ) -> None:
        """Set entries, or append them. Raises InvalidPlan if a table would get a gap."""
        limit = self.blocks.shape[1] - 1
        if indices.min() < 0 or indices.max() > limit:
            raise InvalidPlan(field, f"expected table indices from 0 to {limit}")
        if (indices < self.firsts[row_ids]).any():
            raise InvalidPlan(field, "an entry lies before its table's first index")
        self.blocks[row_ids, indices] = blocks
        np.maximum.at(self.ends, row_ids, indices + 1)
        before = self.blocks[row_ids, np.maximum(indices - 1, 0)]
        if ((before == NO_BLOCK) & (indices > self.firsts[row_ids])).any():
            raise InvalidPlan(field, "an entry lies more than one past its table's end")

    def remove(self, row_id: int) -> None:
        """Empty a sequence's table."""
        self.blocks[row_id, self.firsts[row_id] : self.ends[row_id]] = NO_BLOCK
        self.firsts[row_id] = self.ends[row_id] = 0

    def resize(self, num_rows: int) -> None:
        """Grow to `num_rows` rows."""
        self.blocks, self.firsts, self.ends = (
            grown(column, num_rows, fill)
            for column, fill in ((self.blocks, NO_BLOCK), (self.firsts, 0), (self.ends, 0))
        )

    def first_needed(self, position: int) -> int:
        """The first entry that tokens from this position on read or write."""
        if not self.has_tokens:
            return 0
        return self.group.first_visible(position) // self.block_tokens

    def holding(self, blocks: Int32Array, row_ids: Int64Array, positions: Int64Array) -> Int32Array:
        """Which of these blocks are in the tables of some sequences and not yet released.
        positions: the next one that each of them computes."""
        tables = self.blocks[row_ids]
        firsts = np.array([self.first_needed(position) for position in positions.tolist()])
        is_kept = np.arange(tables.shape[1]) >= firsts[:, None]
        return np.intersect1d(tables[is_kept & (tables != NO_BLOCK)], blocks)


Readers = Callable[[], tuple[Int64Array, Int64Array]]
"""Returns the rows that may yet read their blocks, and the position that each computes next."""


class SequenceBlocks:
    """The tables of all cache groups.

    Invariant: a block is in the tables of one group, except for entries that a group has released.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        max_model_len: int,
        num_rows: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
    ) -> None:
        self.tables = [BlockTables(group, max_model_len, num_rows) for group in groups]
        self._max_model_len, self._num_gpu_blocks = max_model_len, num_gpu_blocks
        self._of_states = [i for i, tables in enumerate(self.tables) if not tables.has_tokens]
        self.states: StatePositions | None = None
        """None without groups of states."""
        if self._of_states:
            self.states = StatePositions(num_gpu_blocks, num_cpu_blocks)
        self._group_of = np.full(num_gpu_blocks, _NO_GROUP, np.int8)
        """The group in whose tables each block was last put."""

    def add(
        self, row_id: int, new: NewSequence, num_computed: int, readers: Readers, field: str
    ) -> int:
        """Set a new sequence's tables. Returns the tokens for which it has blocks. Raises
        InvalidPlan. num_computed: tokens of it that are computed, its parent's for a fork."""
        self._check_new(new.tables, num_computed, field)
        room = min(len(new.token_ids), self._room(new.tables))
        if new.parent_seq_id is None and num_computed > room:
            expected = f"expected at most {room}, as many as tokens and blocks hold"
            raise InvalidPlan(f"{field}.num_computed_tokens", f"{expected}, got {num_computed}")
        for index, table in enumerate(new.tables):
            self._claim(table.block_ids, table.group, readers, f"{field}.tables[{index}].block_ids")
            self.tables[table.group].put(row_id, table)
        return int(self._capacities(np.array([row_id]))[0])

    def update(
        self, row_ids: Int64Array, updates: Int32Array, readers: Readers, field: str
    ) -> Int64Array:
        """Set or append entries in the tables of some rows. updates: [n, 4] as in the plan. Returns
        the tokens for which these rows have blocks. Raises InvalidPlan."""
        groups, indices, blocks = updates[:, 1], updates[:, 2].astype(np.int64), updates[:, 3]
        self._check_blocks(blocks, field)
        if groups.min() < 0 or groups.max() >= len(self.tables):
            got = f"got {groups.min()} to {groups.max()}"
            raise InvalidPlan(field, f"{self._expected_groups}, {got}")
        for group, tables in enumerate(self.tables):
            chosen = slice(None) if len(self.tables) == 1 else groups == group
            if len(blocks[chosen]):
                self._claim(blocks[chosen], group, readers, field)
                tables.update(row_ids[chosen], indices[chosen], blocks[chosen], field)
        return self._capacities(row_ids)

    def _claim(self, blocks: Int32Array, group: int, readers: Readers, field: str) -> None:
        """Record that these blocks are in tables of a group. Raises InvalidPlan if one is in a
        table of another group, which has not released it."""
        if len(self.tables) == 1:
            return
        before = self._group_of[blocks]
        self._group_of[blocks] = group
        is_moved = (before != group) & (before != _NO_GROUP)
        for other in set(before[is_moved].tolist()):
            held = self.tables[other].holding(blocks[before == other], *readers())
            if len(held):
                problem = f"block {held[0]} is in a table of group {other}"
                raise InvalidPlan(field, f"{problem}, got group {group}")

    def remove(self, row_id: int) -> None:
        """Empty a sequence's tables."""
        for tables in self.tables:
            tables.remove(row_id)

    def resize(self, num_rows: int) -> None:
        """Grow to `num_rows` rows."""
        for tables in self.tables:
            tables.resize(num_rows)

    def _capacities(self, row_ids: Int64Array) -> Int64Array:
        """Tokens for which sequences have blocks in all groups, within the model's length."""
        capacities = np.full(len(row_ids), self._max_model_len)
        for tables in self.tables:
            np.minimum(capacities, tables.ends[row_ids] * tables.entry_tokens, out=capacities)
        return capacities

    def _room(self, tables: Sequence[BlockTable]) -> int:
        """Tokens that a new sequence's tables, at most one of each group, have blocks for."""
        ends = [0] * len(self.tables)
        for table in tables:
            ends[table.group] = table.first_index + len(table.block_ids)
        limits = zip(self.tables, ends, strict=True)
        return min((tables.entry_tokens * end for tables, end in limits), default=0)

    def kept(self, row_id: int, end: int) -> tuple[BlockTable, ...]:
        """The tables of what the caches hold of a sequence's first `end` tokens."""
        found = []
        for number, of_group in enumerate(self.tables):
            first = max(int(of_group.firsts[row_id]), of_group.first_needed(end))
            blocks = of_group.blocks[row_id, first : of_group.ends[row_id]].copy()
            if of_group.has_tokens or (self.states and self.states.are_at(blocks, end)):
                found.append(BlockTable(group=number, first_index=first, block_ids=blocks))
        return tuple(found)

    def record_states(self, row_ids: Int64Array, positions: Int64Array) -> None:
        """Record the positions of the states of some sequences."""
        assert self.states is not None, "there is a group of states"
        for group in self._of_states:
            self.states.set(self.tables[group].blocks[row_ids], positions)

    def _check_new(self, tables: Sequence[BlockTable], num_computed: int, field: str) -> None:
        """Raise InvalidPlan unless these can be the tables of a new sequence."""
        seen = set[int]()
        for index, table in enumerate(tables):
            path = f"{field}.tables[{index}]"
            if table.group >= len(self.tables):
                raise InvalidPlan(f"{path}.group", f"{self._expected_groups}, got {table.group}")
            if table.group in seen:
                raise InvalidPlan(f"{path}.group", f"group {table.group} has two tables")
            seen.add(table.group)
            first, needed = table.first_index, self.tables[table.group].first_needed(num_computed)
            if first > needed:
                raise InvalidPlan(f"{path}.first_index", f"expected at most {needed}, got {first}")
            self._check_blocks(table.block_ids, f"{path}.block_ids")
            limit, end = self.tables[table.group].blocks.shape[1], len(table.block_ids)
            if table.first_index + end > limit:
                got = f"got {end} from index {table.first_index}"
                raise InvalidPlan(f"{path}.block_ids", f"expected at most {limit} blocks, {got}")
        if self.states is not None:
            self._check_states(self.states, tables, num_computed, field)

    def _check_states(
        self,
        states: StatePositions,
        tables: Sequence[BlockTable],
        num_computed: int,
        field: str,
    ) -> None:
        """A state has all its blocks from the beginning, and is the one after the tokens that are
        computed."""
        given = {table.group: table.block_ids for table in tables}
        for index in self._of_states:
            num_blocks = self.tables[index].group.num_blocks
            blocks = given.get(index, np.empty(0, np.int32))
            if len(blocks) != num_blocks:
                expected = f"expected {num_blocks} blocks in group {index}"
                raise InvalidPlan(f"{field}.tables", f"{expected}, got {len(blocks)}")
            states.check(blocks, num_computed, f"{field}.num_computed_tokens")

    def check_saves(self, saved: Int32Array, field: str) -> None:
        """Raise InvalidPlan unless the blocks in which a plan saves states can be those of states.
        saved: [n, 4] as in the plan."""
        if wrong := set(saved[:, 1].tolist()) - set(self._of_states):
            raise InvalidPlan(field, f"expected groups of states, got {min(wrong)}")
        self._check_blocks(saved[:, 3], field)
        if len(np.unique(saved[:, 3])) != len(saved):
            raise InvalidPlan(field, "a block is named twice")

    def record_saves(self, saved: Int32Array, field: str) -> None:
        """Record the positions of the states that a plan saves. Raises InvalidPlan unless each has
        all its blocks."""
        assert self.states is not None, "there is a group of states"
        for group in self._of_states:
            of_group, count = saved[saved[:, 1] == group], self.tables[group].group.num_blocks
            states = of_group[: len(of_group) // count * count].reshape(-1, count, 4)
            is_mixed = (states[:, :, :3] != states[:, :1, :3]).any()
            num_states = len(np.unique(states[:, 0, :3], axis=0))
            if is_mixed or num_states * count != len(of_group):
                raise InvalidPlan(field, f"expected {count} blocks of each state in group {group}")
            self.states.set(states[:, :, 3], states[:, 0, 2].astype(np.int64))

    def _check_blocks(self, blocks: Int32Array, field: str) -> None:
        """Raise InvalidPlan unless all are blocks of the device cache."""
        if len(blocks) and (blocks.min() < 0 or blocks.max() >= self._num_gpu_blocks):
            expected = f"expected blocks from 0 to {self._num_gpu_blocks - 1}"
            raise InvalidPlan(field, f"{expected}, got {blocks.min()} to {blocks.max()}")

    @property
    def _expected_groups(self) -> str:
        return f"expected cache groups from 0 to {len(self.tables) - 1}"


def grown(column: Any, num_rows: int, fill: int) -> Any:
    """A copy of a column with more rows."""
    more = np.full((num_rows - len(column), *column.shape[1:]), fill, column.dtype)
    return np.concatenate([column, more])
