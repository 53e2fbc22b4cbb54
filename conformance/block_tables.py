"""The blocks of one epoch's sequences, as a core would allocate them."""

from collections.abc import Iterable
from typing import TypeAlias

from conformance.assertions import fail
from conformance.cache_groups import (
    NO_BLOCK,
    block_tokens,
    first_visible,
    has_tokens,
    main_group,
    num_blocks,
)
from conformance.sequence import Row, Sequence
from pagewire.v1 import model_pb2

Update: TypeAlias = tuple[int, int, int, int]
"""Sequence, cache group, index in its table, and block."""


class BlockTables:
    """Allocates each block once, in ascending order; those that nobody sees any more are reused by
    groups other than the main one."""

    def __init__(self, groups: list[model_pb2.CacheGroup], num_blocks: int) -> None:
        self.groups = groups
        self.main_group = main_group(groups)
        self._num_blocks = num_blocks
        self._next_block = 0
        self._released: list[int] = []
        """Blocks that no token to come sees, for other sequences and groups."""
        self._shared: set[int] = set()
        """Blocks that are never released, since forks have them, too."""
        self._state_copies: list[tuple[int, int]] = []
        """Copies that the next plan has to make: of states which the last one has reached."""

    def take(self, count: int) -> list[int]:
        """Allocate unused device blocks."""
        first = self._next_block
        self._next_block += count
        block_tokens(self.groups)
        if self._next_block > self._num_blocks:
            fail(f"the kit needs more than the {self._num_blocks} device blocks profiled")
        return list(range(first, self._next_block))

    def share(self, blocks: Iterable[int]) -> None:
        """Never release these blocks."""
        self._shared.update(blocks)

    def pop_state_copies(self) -> list[tuple[int, int]]:
        """The copies of states that the next plan has to make, once."""
        copies, self._state_copies = self._state_copies, []
        return copies

    def part(self, fork: Sequence) -> tuple[list[tuple[int, int]], list[Update]]:
        """Give a fork a last block of its own in each group, and states; returns the copies and
        changes of its tables that this takes."""
        copies, updates = [], []
        for group, table in fork.tables.items():
            first = len(table) - 1
            if self.groups[group].lifetime == model_pb2.CACHE_LIFETIME_FIXED:
                continue
            if not has_tokens(self.groups[group]):
                is_parents = fork.parent and table == fork.parent.other_tables[group]
                first = 0 if is_parents else len(table)
            for index in range(first, len(table)):
                (target,) = self.take(1)
                copies.append((table[index], target))
                updates.append((fork.seq_id, group, index, target))
                table[index] = target
        return copies, updates

    def grow(self, rows: Iterable[Row]) -> list[Update]:
        """Allocate blocks for each row; returns the entries added to tables."""
        updates: list[Update] = []
        for row in rows:
            sequence = row.sequence
            if row.num_tokens == 0 and sequence.parent is not None:
                self._share(sequence, sequence.parent)
                continue
            num_drafts = sequence.num_pending_drafts + row.lookahead
            end = sequence.num_computed_tokens + row.num_tokens + num_drafts
            for index, group in enumerate(self.groups):
                table = sequence.blocks
                if index != self.main_group:
                    table = sequence.other_tables.setdefault(index, [])
                    self._release(group, table, sequence.num_computed_tokens)
                size = num_blocks(group, end, sequence.context)
                for block in self._take(size - len(table), index):
                    updates.append((sequence.seq_id, index, len(table), block))
                    table.append(block)
        return updates

    def _take(self, count: int, group: int) -> list[int]:
        """Blocks for a table; those of other groups than the main one reuse what was released."""
        blocks: list[int] = []
        while group != self.main_group and self._released and len(blocks) < count:
            blocks.append(self._released.pop())
        return blocks + self.take(max(count - len(blocks), 0))

    def _release(self, group: model_pb2.CacheGroup, table: list[int], position: int) -> None:
        """Release the blocks that the token at `position` and those after it do not see."""
        if not has_tokens(group):
            return
        for index in range(min(first_visible(group, position) // group.block_tokens, len(table))):
            if table[index] != NO_BLOCK and table[index] not in self._shared:
                self._released.append(table[index])
            table[index] = NO_BLOCK

    def _share(self, fork: Sequence, parent: Sequence) -> None:
        """Give a fork its parent's blocks, and states of its own: the next plan copies those."""
        fork.blocks = list(parent.blocks)
        for index, table in parent.other_tables.items():
            if self.groups[index].lifetime != model_pb2.CACHE_LIFETIME_STATE:
                fork.other_tables[index] = list(table)
                self._shared.update(table)
            else:
                own = fork.other_tables[index] = self.take(len(table))
                self._state_copies.extend(zip(table, own, strict=True))
