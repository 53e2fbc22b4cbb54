"""Blocks that other worker groups read from this one, and those that this one reads from others.

Only what can be found in the prefix cache is exchanged, and only what nothing writes to any more.
Where it arrives it is found like what was computed there.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.kv_cache.block_pool import KEY_BYTES, BlockPool, Contents
from scheduler_service.core.kv_cache.prefix_hit import PrefixHit


@dataclass(frozen=True, slots=True, eq=False)
class CachedEntry:
    """Blocks that are found together."""

    blocks: tuple[int, ...]
    """~b for block b on the host."""
    contents: Contents

    @property
    def size(self) -> int:
        """Number of its blocks."""
        return len(self.blocks)

    @property
    def keys(self) -> bytes:
        """The identity of each block's contents."""
        number = len(self.blocks)
        if number == 1:
            return self.contents.key
        return b"".join(_part_key(self.contents.key, index) for index in range(number))


def _part_key(key: bytes, index: int) -> bytes:
    """A key for one block of an entry: the blocks of a state differ."""
    part = int.from_bytes(key, "little") ^ (index + 1)
    return part.to_bytes(KEY_BYTES, "little")


class CacheExchange:
    """Leased blocks, and blocks to which others are copied, of one worker group.

    Invariant: each of them has a reference for each lease or copy.
    """

    def __init__(self, groups: Sequence[CacheGroup], device: BlockPool, host: BlockPool) -> None:
        self._groups = groups
        self._device, self._host = device, host
        self._held: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        """References by block; of the device, of the host."""

    # What others read.

    def entries(self, hit: PrefixHit) -> list[CachedEntry]:
        """The entries of a hit, if nothing will write to them; of a model with one group those
        before the first to which something may."""
        found: list[CachedEntry] = []
        for group, of_group in zip(self._groups, hit.groups, strict=True):
            blocks = tuple(of_group.blocks)
            parts = [blocks] if group.is_state and blocks else [(block,) for block in blocks]
            for part in parts:
                contents = self._contents_of(part[0])
                if contents is None or not (contents.is_full or self._is_unused(part)):
                    return found if len(self._groups) == 1 else []
                found.append(CachedEntry(part, contents))
        return found

    def _contents_of(self, block: int) -> Contents | None:
        return self._pool(block).cached.contents_of(_index(block))

    def _is_unused(self, blocks: Iterable[int]) -> bool:
        return not any(self._pool(block).is_used(_index(block)) for block in blocks)

    def _pool(self, block: int) -> BlockPool:
        return self._host if block < 0 else self._device

    def lease(self, entries: Iterable[CachedEntry]) -> None:
        """Keep blocks, and what is in them, until the lease is ended."""
        for block in _blocks(entries):
            self._pool(block).share([_index(block)])
            self._held[block < 0][_index(block)] += 1

    def end_lease(self, entries: Iterable[CachedEntry]) -> None:
        """Give up what `lease` has kept."""
        self._release(_blocks(entries))

    # What is read from others.

    def without_found(self, entries: Iterable[CachedEntry]) -> list[CachedEntry]:
        """The entries that nothing here has."""
        found = self._device.cached.find
        return [
            entry for entry in entries if found(entry.contents.key, entry.contents.group) is None
        ]

    def allocate(self, entries: Iterable[CachedEntry]) -> list[CachedEntry]:
        """Allocate device blocks for copies of others' entries; as many must be free."""
        copies = []
        for entry in entries:
            blocks = self._device.allocate(entry.size)
            self._held[False].update(blocks)
            copies.append(CachedEntry(tuple(blocks), entry.contents))
        return copies

    def add(self, entries: Iterable[CachedEntry]) -> None:
        """Let what has arrived in allocated blocks be found."""
        for entry in entries:
            contents = entry.contents
            copied = Contents(contents.group, contents.units, contents.is_full, contents.tail)
            self._device.cached.add(entry.blocks[0], copied, entry.blocks)

    def release(self, entries: Iterable[CachedEntry]) -> None:
        """Give up allocated blocks. What was added can be found until it is evicted."""
        self._release(_blocks(entries))

    def _release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            held = self._held[block < 0]
            held[_index(block)] -= 1
            if not held[_index(block)]:
                del held[_index(block)]
            self._pool(block).release([_index(block)])

    def references(self, *, on_host: bool) -> Counter[int]:
        """Number of references by block."""
        return self._held[on_host]


def _index(block: int) -> int:
    return ~block if block < 0 else block


def _blocks(entries: Iterable[CachedEntry]) -> list[int]:
    return [block for entry in entries for block in entry.blocks]
