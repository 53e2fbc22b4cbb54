"""Sequences that are swapped out to the host. A block that several of them share is moved once."""

from collections.abc import Iterable, Sequence

from scheduler_service.core.kv_cache.block_pool import Contents
from scheduler_service.core.kv_cache.block_table import SequenceTables
from scheduler_service.core.kv_cache.device_tables import DeviceTables
from scheduler_service.core.kv_cache.host_cache import HostCache
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence
from scheduler_service.core.kv_cache.released_blocks import ReleasedBlocks


class SwapSpace:
    """Block tables of swapped-out sequences, over the pool of host blocks."""

    def __init__(self, device: DeviceTables, host: HostCache, released: ReleasedBlocks) -> None:
        self._device, self._host, self._released = device, host, released
        self.pool = host.pool
        self.held: dict[int, SequenceTables] = {}
        """By sequence id."""

    def num_moves(self, sequences: Iterable[CacheableSequence]) -> int:
        """Number of moves to swap these sequences out and in again."""
        contents = self._contents_of(sequences).values()
        return sum(self._find(held) is None for held in contents) + len(contents)

    def can_swap_out(self, sequences: Iterable[CacheableSequence]) -> bool:
        """Whether the host has room for these sequences, if its cached blocks are evicted. False
        without cache groups: nothing of a sequence could be moved."""
        if not self._device.groups:
            return False
        found = map(self._find, self._contents_of(sequences).values())
        num_needed = sum(block is None or not self.pool.is_used(block) for block in found)
        return num_needed <= self.pool.num_free_blocks

    def swap_out(self, sequences: Sequence[CacheableSequence]) -> list[int]:
        """Move these sequences' blocks to the host, except those of which it has copies; returns
        the plan's `swap_out`.

        The device blocks are free at once: the worker reads them before it does anything else.
        """
        contents = self._contents_of(sequences)
        removed = {seq.seq_id: self._released.remove(seq) for seq in sequences}
        found = {block: self._find(held) for block, held in contents.items()}
        targets = {block: copy for block, copy in found.items() if copy is not None}
        self.pool.share([*targets.values()])
        moves: list[int] = []
        for block, held in contents.items():
            if block not in targets:
                targets[block] = target = self.pool.allocate_one()
                moves += (block, target)
                if held is not None and held.is_full:
                    self.pool.cached.add(target, held)
        for seq_id, tables in removed.items():
            self.held[seq_id] = tables.mapped(targets)
            self.pool.share(self.held[seq_id].blocks())
            self._released.release(tables)
        self._host.pin([*targets.values()])  # the first reference of each
        return moves

    def can_swap_in(self, sequences: Sequence[CacheableSequence]) -> bool:
        """Whether there is room on the device for these swapped-out sequences, and to grow unless
        nothing else is there: without it they would be swapped out again at once."""
        blocks = {block for seq in sequences for block in self.held[seq.seq_id].blocks()}
        is_empty = self._device.are_alone(())
        grow = 0 if is_empty else len(sequences) * self._device.demand.per_token
        return self._device.num_short(len(blocks), grow) <= 0

    def swap_in(self, sequences: Sequence[CacheableSequence]) -> list[int]:
        """Move these sequences to the device; returns the plan's `swap_in`. The host blocks are
        free once the plan is complete; those with keys stay cached."""
        pool = self._device.pool
        tables = {seq.seq_id: self.held.pop(seq.seq_id) for seq in sequences}
        for held in tables.values():
            self._host.pin(held.blocks())
        sources = list(dict.fromkeys(block for held in tables.values() for block in held.blocks()))
        targets = dict(zip(sources, pool.allocate(len(sources)), strict=True))
        for seq_id, held in tables.items():
            self._device.held[seq_id] = held.mapped(targets)
            pool.share(self._device.held[seq_id].blocks())
        pool.release(list(targets.values()))  # the first reference has no owner
        return [block for pair in targets.items() for block in pair]

    def free(self, seq: CacheableSequence) -> None:
        """Release a swapped-out sequence's memory."""
        self.pool.release(self.held.pop(seq.seq_id).blocks())

    def _contents_of(self, sequences: Iterable[CacheableSequence]) -> dict[int, Contents | None]:
        """The contents of these sequences' distinct blocks."""
        contents = self._device.pool.cached.contents
        tables = (self._device.held[seq.seq_id] for seq in sequences)
        return {block: contents[block] for held in tables for block in held.blocks()}

    def _find(self, contents: Contents | None) -> int | None:
        """A copy of a device block that is in a table; unless it is full, its owner has added to
        what others may find."""
        if contents is None or not contents.is_full:
            return None
        return self.pool.cached.find(contents.key, contents.group)
