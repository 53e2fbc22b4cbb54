"""Reference-counted pool of fixed-size KV blocks of one memory, device or host.

The pool hands out block ids; the memory behind them is the worker's. `CachedBlocks` maps the keys
of computed tokens to block ids; `map_blocks` lists the owners of all blocks for status pages.
"""

from array import array
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

BlockKey = bytes
"""Identifies all tokens up to the end of a unit of keys; see `prefix_keys.py`."""

KEY_BYTES = 16


class Tail(NamedTuple):
    """Tokens after a unit of keys that are fewer than a unit."""

    parent: BlockKey
    """The unit's key, or the root key."""
    num_tokens: int


@dataclass(slots=True, eq=False)
class Contents:
    """What was computed in a block: the tokens of units of keys, from the block's first token on.
    In a state: what is after all tokens of one unit."""

    group: int
    """The cache group."""
    units: tuple[BlockKey, ...]
    """The last one may be of a tail."""
    is_full: bool
    """Whether the units fill the block. If not, tokens after them may be in it."""
    tail: Tail | None = None
    """The state's, unless it is after a full unit."""

    @property
    def key(self) -> BlockKey:
        """The key at the end, which stands for all of them."""
        return self.units[-1]

    def has_any(self, units: Container[BlockKey]) -> bool:
        """Whether these tokens, or those just before them, are among these units: the keys of a
        sequence, from its first token on."""
        return self.units[0] in units or (self.tail is not None and self.tail.parent in units)


class CachedBlocks:
    """Blocks whose contents have keys, whether in use or free.

    They are found by the key at their end, and by the key of their first unit. Contents that are
    not confirmed yet are not found, but keep their block like others.

    Free ones are kept until they are found again or evicted: first those that are `expendable`,
    then the least recently used, in the order in which they were freed. The first of these may be
    saved: they have been copied elsewhere, ahead of their eviction.

    A state is an entry of several blocks, which are evicted and saved together.

    Invariant: a key of a group leads to one block, whose contents have it, and every free block has
    contents. Saved blocks are free, and less recently used than all others that are not expendable.
    """

    def __init__(self, num_blocks: int) -> None:
        self._index: defaultdict[int, dict[BlockKey, int]] = defaultdict(dict)
        """By group: the block that a key leads to."""
        self.num_entries: Counter[int] = Counter()
        """By group: entries with contents, those that are not confirmed included."""
        self.contents: list[Contents | None] = [None] * num_blocks
        """By block; None if they have no key."""
        self._entries: dict[int, tuple[int, ...]] = {}
        """By block: all blocks of its entry, the first one leads to them; absent if it is the only
        one."""
        self._tails: defaultdict[tuple[int, BlockKey], Counter[int]] = defaultdict(Counter)
        """By group and key of the unit before them: lengths of the tails of states."""
        self._expendable: OrderedDict[int, None] = OrderedDict()
        self._saved: OrderedDict[int, None] = OrderedDict()
        self._free: OrderedDict[int, None] = OrderedDict()
        """Other free blocks."""
        self.changed: dict[int, None] | None = None
        """First blocks of entries that have begun or ceased to be found since `pop_changed`; None
        if nobody asks."""

    def __contains__(self, block: int) -> bool:
        return self.contents[block] is not None

    @property
    def num_blocks(self) -> int:
        """Blocks with contents, in use or free."""
        return sum(contents is not None for contents in self.contents)

    @property
    def num_free(self) -> int:
        """Blocks that are not in use."""
        return len(self._expendable) + len(self._saved) + len(self._free)

    @property
    def num_ready(self) -> int:
        """Free blocks that can be evicted without a copy."""
        return len(self._expendable) + len(self._saved)

    def free_blocks(self) -> Iterable[int]:
        """Blocks that are not in use, the first to be evicted first."""
        return chain(self._expendable, self._saved, self._free)

    def find(self, key: BlockKey, group: int = 0) -> int | None:
        """A block of the group that this key leads to; None if there is none."""
        return self._index[group].get(key)

    def found(self, group: int) -> set[int]:
        """All blocks of the group that are found."""
        return set(self._index[group].values())

    def has_any(self, group: int) -> bool:
        """Whether any block of the group is found."""
        return bool(self._index[group])

    def tails(self, group: int, parent: BlockKey) -> list[int]:
        """Lengths of the tails after a unit at which a state may be found."""
        return list(self._tails.get((group, parent), ()))

    def entry(self, block: int) -> tuple[int, ...]:
        """All blocks of a block's entry."""
        return self._entries.get(block, (block,))

    def is_confirmed(self, block: int) -> bool:
        """Whether a block with contents is found by the key at their end."""
        contents = self.contents[block]
        assert contents is not None
        return self._index[contents.group].get(contents.key) == self.entry(block)[0]

    def add(self, block: int, contents: Contents, entry: Sequence[int] = ()) -> None:
        """Let a block be found by its contents, which may be more than before, unless another
        block has them already. `entry`: all its blocks, if there are several."""
        index = self._index[contents.group]
        key = contents.units[-1]
        if key not in index:
            self._set(block, contents, entry)
            index[key] = block
            index.setdefault(contents.units[0], block)
            if self.changed is not None:
                self.changed[block] = None
            if contents.tail is not None:
                self._tails[contents.group, contents.tail.parent][contents.tail.num_tokens] += 1

    def _set(self, block: int, contents: Contents, entry: Sequence[int]) -> None:
        if self.contents[block] is not None:
            entry = entry or self.entry(block)
            self.discard(block)
        self.num_entries[contents.group] += 1
        self.contents[block] = contents
        if len(entry) > 1:
            for member in entry:
                self.contents[member] = contents
            self._entries |= dict.fromkeys(entry, tuple(entry))

    def hold(self, block: int, contents: Contents, entry: Sequence[int] = ()) -> Contents:
        """Give a block in use contents that are still being computed, unless it has some; returns
        those. It stays cached when it is freed, but is not found before they are confirmed."""
        held = self.contents[block]
        if held is None:
            self._set(block, contents, entry)
        return held or contents

    def confirm(self, block: int, held: Contents, contents: Contents) -> None:
        """Let a block be found by its contents if it is still the one with what was `held`."""
        if self.contents[block] is held:
            self.add(block, contents)

    def discard(self, block: int) -> tuple[int, ...]:
        """Remove the contents of an entry in use, if it has any; returns its blocks."""
        entry = self.entry(block)
        contents = self.contents[block]
        if contents is None:
            return entry
        self.num_entries[contents.group] -= 1
        index, block = self._index[contents.group], entry[0]
        if self.changed is not None:
            self.changed[block] = None
        if contents.tail is not None and index.get(contents.key) == block:
            lengths = self._tails[contents.group, contents.tail.parent]
            lengths[contents.tail.num_tokens] -= 1
            if not +lengths:
                del self._tails[contents.group, contents.tail.parent]
        for key in (contents.units[0], contents.key):
            if index.get(key) == block:
                del index[key]
        for member in entry:
            self.contents[member] = None
            self._entries.pop(member, None)
        return entry

    def free(self, block: int, *, is_expendable: bool = False) -> None:
        """Record that a block with contents is no longer in use."""
        (self._expendable if is_expendable else self._free)[block] = None

    def use(self, block: int) -> None:
        """Record that a free block was found and is in use again."""
        queues = (self._expendable, self._saved, self._free)
        del next(queue for queue in queues if block in queue)[block]

    def is_free(self, block: int) -> bool:
        """Whether a block has contents and is not in use."""
        return block in self._free or block in self._saved or block in self._expendable

    def touch(self, block: int) -> None:
        """Make an entry the most recently used one, if it has contents and is free."""
        if self.is_free(block):
            for member in reversed(self.entry(block)):
                self.use(member)
                self.free(member)

    def save(self, most: int) -> list[tuple[tuple[int, ...], Contents]]:
        """Make up to `most` more of the least recently used free blocks saved, and the rest of the
        last one's entry; returns the entries that can be found, for the caller to copy."""
        entries = []
        while most > 0 and self._free:
            entry = self.entry(next(iter(self._free)))
            most -= len(entry)
            for block in entry:
                del self._free[block]
                self._saved[block] = None
            contents = self.contents[entry[0]]
            if contents is not None and self.is_confirmed(entry[0]):
                entries.append((entry, contents))
        return entries

    def evict(self) -> tuple[tuple[int, ...], Contents | None]:
        """Remove and return the blocks of the first free entry, with its contents if they are worth
        a copy."""
        assert self.num_free, "no block is free"
        queue = self._expendable or self._saved or self._free
        entry = self.entry(next(iter(queue)))
        is_kept = queue is not self._expendable and self.is_confirmed(entry[0])
        contents = self.contents[entry[0]] if is_kept else None
        for block in entry:
            del queue[block]
        self.discard(entry[0])
        return entry, contents

    def pop_changed(self) -> list[tuple[tuple[int, ...], Contents | None]]:
        """The blocks and contents of the entries that are found since the last call, and the first
        blocks, without contents, of those that are found no more."""
        changed, self.changed = self.changed or {}, {}
        entries: list[tuple[tuple[int, ...], Contents | None]] = []
        for block in changed:
            is_found = self.contents[block] is not None and self.is_confirmed(block)
            if is_found and (entry := self.entry(block))[0] == block:
                entries.append((entry, self.contents[block]))
            else:
                entries.append(((block,), None))
        return entries

    def blocks_with(self, units: Container[BlockKey]) -> list[int]:
        """All blocks with any of these units."""
        return [
            block
            for block, held in enumerate(self.contents)
            if held is not None and held.has_any(units)
        ]

    def check(self, ref_counts: dict[int, int]) -> None:
        """Assert the invariant; `ref_counts`: of the blocks in use."""
        for group, index in self._index.items():
            for key, block in index.items():
                contents = self.contents[block]
                assert contents is not None
                assert contents.group == group
                assert self.entry(block)[0] == block
                assert key in (contents.units[0], contents.key)
        free = set(self.free_blocks())
        kept = {block for block, contents in enumerate(self.contents) if contents is not None}
        heads = {self.entry(block)[0] for block in kept}
        groups = (held.group for head in heads if (held := self.contents[head]) is not None)
        assert +self.num_entries == Counter(groups)
        assert free == kept - ref_counts.keys()
        assert len(free) == self.num_free, "a block is in two queues"


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks.

    Blocks with contents stay in `cached` when they are freed, and are allocated last.

    Invariant: a block is in the free list, or free in `cached`, exactly when its count is zero.
    What is reserved is free.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[Sequence[int], Contents], None] | None = None
    ) -> None:
        """`on_evict` is called with the blocks of each entry that is lost although it could be
        found, unless it is expendable."""
        self.num_blocks = num_blocks
        self.cached = CachedBlocks(num_blocks)
        self.num_allocated = 0
        """Blocks allocated so far."""
        self.num_reserved = 0
        """Free blocks that are kept for prompts and for the states of forks."""
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free) + self.cached.num_free

    @property
    def num_available(self) -> int:
        """Number of free blocks that are not reserved."""
        return len(self._free) + self.cached.num_free - self.num_reserved

    def has_free_blocks(self, number: int) -> bool:
        """Whether as many blocks can be allocated."""
        return len(self._free) >= number or self.num_free_blocks >= number

    @property
    def num_ready_blocks(self) -> int:
        """Number of free blocks that can be allocated without a copy."""
        return len(self._free) + self.cached.num_ready

    def is_used(self, block: int) -> bool:
        """Whether the block has references."""
        return self._ref_counts[block] > 0

    def num_references(self, block: int) -> int:
        """Number of references to the block."""
        return self._ref_counts[block]

    def reference_counts(self) -> bytes:
        """The number of references to each block, at most 255."""
        try:
            return bytes(self._ref_counts)
        except ValueError:
            return bytes([min(count, 255) for count in self._ref_counts])

    def is_shared(self, block: int) -> bool:
        """Whether a write to `block` must copy it first (copy-on-write)."""
        return self._ref_counts[block] > 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks, with one reference each; as many must be free."""
        self.num_allocated += num_blocks
        free, evict = self._free, self._evict
        blocks = [free.pop() if free else evict() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def allocate_one(self) -> int:
        """Allocate a block, with one reference; one must be free."""
        self.num_allocated += 1
        block = self._free.pop() if self._free else self._evict()
        self._ref_counts[block] = 1
        return block

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; each must be in use or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert block in self.cached, f"block {block} is free"
                self.cached.use(block)
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int], *, is_expendable: bool = False) -> int:
        """Drop one reference to each block; the last frees it. Returns the number of blocks freed.

        Blocks are freed tail first, so that a shared prefix is reused last.
        """
        num_freed, ref_counts, contents = 0, self._ref_counts, self.cached.contents
        for block in reversed(blocks):
            ref_counts[block] = count = ref_counts[block] - 1
            assert count >= 0, f"block {block} freed twice"
            if count == 0:
                num_freed += 1
                if contents[block] is None:
                    self._free.append(block)
                else:
                    self.cached.free(block, is_expendable=is_expendable)
        return num_freed

    def adopt(self, entries: Iterable[tuple[Sequence[int], Contents]]) -> list[int]:
        """Let blocks that nobody has used be found by their contents, the first to be evicted
        first; returns the first blocks of entries that another one equals."""
        adopted: set[int] = set()
        refused = []
        for blocks, contents in entries:
            self.cached.add(blocks[0], contents, blocks)
            if blocks[0] not in self.cached:
                refused.append(blocks[0])
                continue
            for block in blocks:
                self.cached.free(block)
            adopted.update(blocks)
        self._free = [block for block in self._free if block not in adopted]
        return refused

    def forget(self, block: int) -> None:
        """Remove the contents of a block, and those of the rest of its entry, if it has any."""
        if block in self.cached:
            for member in self.cached.entry(block):
                if self._ref_counts[member] == 0:
                    self.cached.use(member)
                    self._free.append(member)
            self.cached.discard(block)

    def evict(self, block: int, *, is_kept: bool) -> None:
        """Free the entry of a block that is not in use, as if its memory were needed; `is_kept`:
        whether it is worth a copy."""
        contents = self.cached.contents[block]
        if is_kept and self._on_evict and contents is not None and self.cached.is_confirmed(block):
            self._on_evict(self.cached.entry(block), contents)
        self.forget(block)

    def forget_contents(self, block: int, contents: Contents) -> None:
        """Remove the contents of a block if it still has these, not equal ones."""
        if self.cached.contents[block] is contents:
            self.forget(block)

    def _evict(self) -> int:
        """Free an entry; returns the first of its blocks."""
        entry, contents = self.cached.evict()
        if self._on_evict is not None and contents is not None:
            self._on_evict(entry, contents)
        self._free += entry[:0:-1]
        return entry[0]

    def check(self, ref_counts: dict[int, int]) -> None:
        """Assert that exactly these blocks are in use, with these reference counts."""
        counted = {block: count for block, count in enumerate(self._ref_counts) if count}
        assert counted == ref_counts, f"counted {counted}, referenced {ref_counts}"
        self.cached.check(ref_counts)
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        empty = {block for block in range(self.num_blocks) if block not in self.cached}
        assert set(self._free) == empty - counted.keys()
        assert 0 <= self.num_reserved <= self.num_free_blocks


EMPTY = 0
CACHED = -1
"""Free, with contents that can be found again."""


@dataclass(slots=True)
class BlockMap:
    """Columns by block."""

    owners: "array[int]"
    """The number of the request that uses it, or EMPTY or CACHED; int32."""
    num_references: bytes
    """Number of block tables that contain it, at most 255."""


class HasBlocks(Protocol):
    """The block tables of a sequence."""

    def blocks(self) -> list[int]:
        """All its blocks."""


def map_blocks(
    pool: BlockPool, tables: Mapping[int, HasBlocks], owners: Iterable[tuple[int, int]]
) -> BlockMap:
    """The map of a pool with these block tables by sequence id.

    `owners`: (sequence id, number of its request); the last owner of a shared block is shown.
    """
    column = array("i", [EMPTY]) * pool.num_blocks
    for block in pool.cached.free_blocks():
        column[block] = CACHED
    for seq_id, number in owners:
        for block in tables[seq_id].blocks() if seq_id in tables else ():
            column[block] = number
    return BlockMap(column, pool.reference_counts())
