"""Reference-counted pool of fixed-size KV blocks on one device.

The pool hands out block ids; the memory behind them is the worker's.
"""

from collections.abc import Callable, Sequence

from scheduler_service.core.cached_blocks import BlockKey, CachedBlocks


class BlockPool:
    """Free list and reference counts of `num_blocks` blocks.

    Blocks with a key in `cached` stay there when they come free, and are handed out last.

    Invariant: a block is in the free list, or free in `cached`, exactly when its count is zero.
    """

    def __init__(
        self, num_blocks: int, on_evict: Callable[[int, BlockKey], None] | None = None
    ) -> None:
        """`on_evict` is told of each block that is handed out although it had this key."""
        self.num_blocks = num_blocks
        self.cached = CachedBlocks()
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._on_evict = on_evict

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated."""
        return len(self._free) + self.cached.num_free

    def is_used(self, block: int) -> bool:
        """Whether anybody has the block."""
        return self._ref_counts[block] > 0

    def num_references(self, block: int) -> int:
        """How many have the block."""
        return self._ref_counts[block]

    def reference_counts(self) -> list[int]:
        """How many have each block."""
        return list(self._ref_counts)

    def is_shared(self, block: int) -> bool:
        """Whether a write to `block` must copy it first (copy-on-write)."""
        return self._ref_counts[block] > 1

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks with one reference each; there must be as many free ones."""
        free, evict = self._free, self._evict
        blocks = [free.pop() if free else evict() for _ in range(num_blocks)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add one reference to each block; each is in use, or cached."""
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
        """Have a block found no more, if it has a key."""
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
        """Assert that exactly these blocks are in use, by so many references each."""
        counted = {block: count for block, count in enumerate(self._ref_counts) if count}
        assert counted == ref_counts, f"counted {counted}, referenced {ref_counts}"
        self.cached.check(ref_counts)
        assert len(self._free) == len(set(self._free)), "a block is free twice"
        empty = {block for block in range(self.num_blocks) if block not in self.cached}
        assert set(self._free) == empty - counted.keys()
