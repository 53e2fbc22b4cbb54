"""Reference-counted pool of fixed-size KV blocks of one memory, device or host.

The pool hands out block ids; the memory behind them is the worker's. `CachedBlocks` maps the keys
of full blocks to block ids; `map_blocks` lists the owners of all blocks for status pages.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

BlockKey = bytes
"""Identifies the tokens of a block and all tokens before them; see `prefix_cache.py`."""


class CachedBlocks:
    """Blocks whose contents have a key, whether in use or free.

    Free ones are kept in the order in which they were freed, until they are found again or evicted;
    the least recently used is evicted first. The first of them may be saved: they have been copied
    elsewhere, ahead of their eviction.

    Invariant: keys and blocks correspond one to one, and every free block has a key. Saved blocks
    are free, and less recently used than all other free blocks.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._saved: OrderedDict[int, None] = OrderedDict()
        self._free: OrderedDict[int, None] = OrderedDict()
        """Free blocks that are not saved."""

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    @property
    def num_free(self) -> int:
        """Blocks that are not in use."""
        return len(self._saved) + len(self._free)

    @property
    def num_saved(self) -> int:
        """Free blocks that have been copied elsewhere."""
        return len(self._saved)

    def free_blocks(self) -> Iterable[int]:
        """Blocks that are not in use, the least recently used first."""
        return chain(self._saved, self._free)

    def key_of(self, block: int) -> BlockKey | None:
        """The key of a block; None if it has none."""
        return self._keys.get(block)

    def find(self, key: BlockKey) -> int | None:
        """The block with this key; None if there is none."""
        return self._blocks.get(key)

    def add(self, block: int, key: BlockKey) -> None:
        """Give a block in use its key, unless another block has the same contents already."""
        if key not in self._blocks:
            assert block not in self._keys, f"block {block} holds something else"
            self._blocks[key] = block
            self._keys[block] = key

    def discard(self, block: int) -> None:
        """Remove the key of a block in use, if it has one."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]

    def free(self, block: int) -> None:
        """Record that a block with a key is no longer in use."""
        self._free[block] = None

    def use(self, block: int) -> None:
        """Record that a free block was found and is in use again."""
        del (self._saved if block in self._saved else self._free)[block]

    def touch(self, block: int) -> None:
        """Make a block the most recently used one, if it has a key and is free."""
        if block in self._saved or block in self._free:
            self.use(block)
            self.free(block)

    def save(self, most: int) -> list[tuple[int, BlockKey]]:
        """Make up to `most` more of the least recently used free blocks saved; returns them with
        their keys, for the caller to copy."""
        blocks = []
        for _ in range(min(most, len(self._free))):
            block, _ = self._free.popitem(last=False)
            self._saved[block] = None
            blocks.append((block, self._keys[block]))
        return blocks

    def evict(self) -> tuple[int, BlockKey]:
        """Remove and return the least recently used free block, and its key."""
        assert self.num_free, "no block is free"
        block, _ = (self._saved or self._free).popitem(last=False)
        key = self._keys[block]
        self.discard(block)
        return block, key

    def check(self, ref_counts: dict[int, int]) -> None:
        """Assert the invariant; `ref_counts`: of the blocks in use."""
        assert {block: key for key, block in self._blocks.items()} == self._keys
        assert len(self._blocks) == len(self._keys)
        free = set(self.free_blocks())
        assert free == self._keys.keys() - ref_counts.keys()
        assert len(free) == self.num_free, "a block is saved and not saved"


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks.

    Blocks with a key stay in `cached` when they are freed, and are allocated last.

    Invariant: a block is in the free list, or free in `cached`, exactly when its count is zero.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int, BlockKey], None] | None = None
    ) -> None:
        """`on_evict` is called with each block that is allocated although it has a key."""
        self.num_blocks = num_blocks
        self.cached = CachedBlocks()
        self.num_allocated = 0
        """Blocks allocated so far."""
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be allocated."""
        return len(self._free) + self.cached.num_free

    @property
    def num_ready_blocks(self) -> int:
        """Number of free blocks that have no contents, or saved ones."""
        return len(self._free) + self.cached.num_saved

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

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; each must be in use or cached."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert block in self.cached, f"block {block} is free"
                self.cached.use(block)
            self._ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each block; the last frees it.

        Blocks are freed tail first, so that a shared prefix is reused last.
        """
        for block in reversed(blocks):
            assert self._ref_counts[block] > 0, f"block {block} freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if block in self.cached:
                    self.cached.free(block)
                else:
                    self._free.append(block)

    def forget(self, block: int) -> None:
        """Remove the key of a block, if it has one."""
        if block in self.cached and self._ref_counts[block] == 0:
            self.cached.use(block)
            self._free.append(block)
        self.cached.discard(block)

    def _evict(self) -> int:
        block, key = self.cached.evict()
        if self._on_evict is not None:
            self._on_evict(block, key)
        return block

    def check(self, ref_counts: dict[int, int]) -> None:
        """Assert that exactly these blocks are in use, with these reference counts."""
        counted = {block: count for block, count in enumerate(self._ref_counts) if count}
        assert counted == ref_counts, f"counted {counted}, referenced {ref_counts}"
        self.cached.check(ref_counts)
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        empty = {block for block in range(self.num_blocks) if block not in self.cached}
        assert set(self._free) == empty - counted.keys()


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


def map_blocks(
    pool: BlockPool, tables: Mapping[int, Sequence[int]], owners: Iterable[tuple[int, int]]
) -> BlockMap:
    """The map of a pool with these block tables by sequence id.

    `owners`: (sequence id, number of its request); the last owner of a shared block is shown.
    """
    column = array("i", [EMPTY]) * pool.num_blocks
    for block in pool.cached.free_blocks():
        column[block] = CACHED
    for seq_id, number in owners:
        for block in tables.get(seq_id, ()):
            column[block] = number
    return BlockMap(column, pool.reference_counts())
