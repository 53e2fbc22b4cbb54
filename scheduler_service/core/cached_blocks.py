"""Which blocks hold which tokens, and which of them are free."""

from collections import OrderedDict
from collections.abc import Iterable

BlockKey = bytes
"""Stands for the tokens of a block and all before them; see `prefix_cache.py`."""


class CachedBlocks:
    """Blocks whose contents have a key, whether in use or free.

    Free ones wait in the order in which they came free, to be found again or else to be evicted,
    the longest unused first.

    Invariant: keys and blocks belong to each other one to one, and every free block has a key.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, int] = {}
        self._keys: dict[int, BlockKey] = {}
        self._free: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    @property
    def num_free(self) -> int:
        """Blocks that are not in use."""
        return len(self._free)

    def free_blocks(self) -> Iterable[int]:
        """Those that are not in use, the longest unused first."""
        return self._free.keys()

    def key_of(self, block: int) -> BlockKey | None:
        """The key of a block that has one."""
        return self._keys.get(block)

    def find(self, key: BlockKey) -> int | None:
        """The block with this key."""
        return self._blocks.get(key)

    def add(self, block: int, key: BlockKey) -> None:
        """Give a block in use its key, unless another block has the same contents already."""
        if key not in self._blocks:
            assert block not in self._keys, f"block {block} holds something else"
            self._blocks[key] = block
            self._keys[block] = key

    def discard(self, block: int) -> None:
        """Find a block in use no more, if it has a key."""
        key = self._keys.pop(block, None)
        if key is not None:
            del self._blocks[key]

    def free(self, block: int) -> None:
        """A block with a key is not in use any more."""
        self._free[block] = None

    def use(self, block: int) -> None:
        """A free block was found and is in use again."""
        del self._free[block]

    def touch(self, block: int) -> None:
        """Of a block with a key, let the other free ones go first."""
        if block in self._free:
            self._free.move_to_end(block)

    def evict(self) -> tuple[int, BlockKey]:
        """The free block that was not used for the longest time, and the key that it had."""
        assert self._free, "no block is free"
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        self.discard(block)
        return block, key

    def check(self, ref_counts: dict[int, int]) -> None:
        """Assert the invariant; `ref_counts` are those of the blocks in use."""
        assert {block: key for key, block in self._blocks.items()} == self._keys
        assert len(self._blocks) == len(self._keys)
        assert set(self._free) == self._keys.keys() - ref_counts.keys()
