"""States that several sequences share, and the copies of them that plans make.

States are written in place. Forks share one until the next row of each: all but the last get a
copy, for which blocks are reserved, in the plan after their parent's last prompt tokens. Sequences
that are admitted together with one that computes their first tokens get a copy where they branch
off.
"""

from collections.abc import Sequence

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.kv_cache.block_pool import BlockPool
from scheduler_service.core.kv_cache.block_table import BlockUpdate, Table


class SharedStates:
    """Copies states of one worker group's sequences, and reserves the blocks for that."""

    def __init__(self, groups: Sequence[CacheGroup], device: BlockPool) -> None:
        self.groups = [number for number, group in enumerate(groups) if group.is_state]
        self._device = device
        self._num_blocks = sum(group.num_blocks for group in groups)
        self._num_copies: dict[int, int] = {}
        """By first block of a state that sequences share: copies for which blocks are reserved."""
        self.written: set[int] = set()
        """First blocks of the states that the plan under construction writes by copying."""
        self._moves: list[int] = []
        """The `copy` of the plan under construction, but for what is in table updates."""

    def expect(self, tables: Sequence[Table], num_forks: int) -> None:
        """Keep what is reserved for the states of forks, which share a sequence's state now."""
        if num_forks and self.groups:
            self._num_copies[self._head(tables)] = num_forks

    def num_missing(self, tables: Sequence[Table]) -> int:
        """Blocks that are not reserved and that a sequence needs to write its state."""
        is_shared = self.groups and self._device.is_shared(self._head(tables))
        return 0 if not is_shared or self._num_copies.get(self._head(tables)) else self._num_blocks

    def unshare(self, tables: Sequence[Table]) -> list[BlockUpdate]:
        """Give a sequence a copy of its state if others share it; returns the changes."""
        if not self.groups or not self._device.is_shared(head := self._head(tables)):
            return []
        if self._num_copies.get(head):
            self._num_copies[head] -= 1
            self._device.num_reserved -= self._num_blocks
        updates: list[BlockUpdate] = []
        for number in self.groups:
            shared = tables[number].blocks
            tables[number].blocks = self._device.allocate(len(shared))
            pairs = enumerate(zip(tables[number].blocks, shared, strict=True))
            updates += [(number, index, block, source) for index, (block, source) in pairs]
            self.written.add(tables[number].blocks[0])
            self._device.release(shared)
        return updates

    def copy(self, tables: Sequence[Table], targets: Sequence[Table]) -> None:
        """Copy a sequence's state to another one's, in the plan under construction."""
        for number in self.groups:
            blocks = targets[number].blocks
            self.written.add(blocks[0])
            pairs = zip(tables[number].blocks, blocks, strict=True)
            self._moves += (block for pair in pairs for block in pair)

    def settle(self) -> None:
        """Give up what is reserved for copies of states that no longer have as many owners."""
        for head, count in list(self._num_copies.items()):
            num_needed = max(0, min(count, self._device.num_references(head) - 1))
            self._device.num_reserved -= (count - num_needed) * self._num_blocks
            self._num_copies[head] = num_needed
            if not num_needed:
                del self._num_copies[head]

    def end_plan(self) -> list[int]:
        """Complete the plan under construction; returns what is added to its `copy`."""
        moves, self._moves = self._moves, []
        self.written.clear()
        return moves

    @property
    def num_reserved(self) -> int:
        """Blocks that are reserved for copies."""
        return sum(self._num_copies.values()) * self._num_blocks

    def _head(self, tables: Sequence[Table]) -> int:
        return tables[self.groups[0]].blocks[0]
