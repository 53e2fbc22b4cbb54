"""The block tables of all sequences in one cache group."""

from typing import Any

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.cache_groups import CacheGroup
from worker_service.errors import InvalidPlan
from worker_service.plan import BlockTable

NO_BLOCK = -1


class BlockTables:
    """Columns by row of the sequence table.

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


def grown(column: Any, num_rows: int, fill: int) -> Any:
    """A copy of a column with more rows."""
    more = np.full((num_rows - len(column), *column.shape[1:]), fill, column.dtype)
    return np.concatenate([column, more])
