"""Blocks that other worker groups read from this one, and those that this one reads from others.

Only what can be found in the prefix cache is exchanged, and only what nothing writes to any more.
Where it arrives it is found like what was computed there.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import lcm

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_pool import KEY_BYTES, BlockPool, Contents
from scheduler_service.core.kv_cache.device_tables import DeviceTables
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_hit import PrefixHit
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence


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

    def __init__(self, tables: DeviceTables, host: BlockPool, cache: PrefixCache) -> None:
        self._tables, self._cache = tables, cache
        self._groups = tables.groups
        self._device, self._host = tables.pool, host
        self._held: dict[bool, Counter[int]] = {False: Counter(), True: Counter()}
        """References by block; of the device, of the host."""

    def num_entries(self, num_tokens: int) -> int:
        """The most entries of the prefix cache that hold as many tokens."""
        return sum(-(-num_tokens // tokens) for tokens in self._tables.block_tokens.values())

    # What others read.

    def find(self, seq: CacheableSequence) -> tuple[int, list[CachedEntry]]:
        """What others may read of a waiting sequence's longest usable prefix, on device and host,
        and its number of tokens. It ends with blocks of every group where a sequence may write to
        a block in which it would end."""
        for multiple in (1, lcm(*self._tables.block_tokens.values())):
            hit = self._cache.find(seq, on_host=True, multiple=multiple)
            if (entries := self._entries(hit)) is not None:
                return hit.num_tokens, entries
        return 0, []

    def _entries(self, hit: PrefixHit) -> list[CachedEntry] | None:
        """The entries of a hit; None if a sequence may write to one of them. What steps in flight
        still write behind the contents of a block that no sequence uses is written before the plan
        that leases it is executed."""
        found: list[CachedEntry] = []
        for group, of_group in zip(self._groups, hit.groups, strict=True):
            blocks = tuple(of_group.blocks)
            parts = [blocks] if group.is_state and blocks else [(block,) for block in blocks]
            for part in parts:
                pool, indices = self._pool(part[0]), list(map(_index, part))
                contents = pool.cached.contents[indices[0]]
                if contents is None or (not contents.is_full and any(map(pool.is_used, indices))):
                    return None
                found.append(CachedEntry(part, contents))
        return found

    def _pool(self, block: int) -> BlockPool:
        return self._host if block < 0 else self._device

    def can_lease(self, entries: Iterable[CachedEntry]) -> bool:
        """Whether these entries can be kept, with what is reserved for sequences."""
        blocks = [block for block in _blocks(entries) if block >= 0]
        num_unused = sum(not self._device.is_used(block) for block in blocks)
        return num_unused <= self._device.num_available

    def lease(self, entries: Iterable[CachedEntry]) -> None:
        """Keep blocks, and what is in them, until the lease is ended."""
        for block in _blocks(entries):
            self._pool(block).share([_index(block)])
            self._held[block < 0][_index(block)] += 1

    # What is read from others.

    def without_found(self, entries: Iterable[CachedEntry]) -> list[CachedEntry]:
        """The entries that nothing here has."""
        found = self._device.cached.find
        return [
            entry for entry in entries if found(entry.contents.key, entry.contents.group) is None
        ]

    def can_receive(self, entries: Iterable[CachedEntry]) -> bool:
        """Whether others' entries can be copied here; nothing is preempted for them."""
        return self._tables.can_provide(sum(entry.size for entry in entries)) is AllocStatus.OK

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
        """Give up what was leased or allocated. What was added can be found until it is evicted."""
        for block in reversed(_blocks(entries)):
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
