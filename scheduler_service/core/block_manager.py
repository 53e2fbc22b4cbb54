"""Which blocks of one worker group's KV cache belong to which sequence."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from scheduler_service.core.block_pool import BlockPool
from scheduler_service.core.cached_blocks import BlockKey


class AllocStatus(Enum):
    """Whether blocks can be had."""

    OK = "ok"
    LATER = "later"
    """When others have freed theirs."""
    NEVER = "never"
    """Not even if all blocks were free."""


@dataclass(slots=True, kw_only=True)
class BlockUpdate:
    """A change of one entry of a block table."""

    index: int
    block: int
    copied_from: int | None
    """The shared block whose contents the new one takes over, if any."""


class BlockManager:
    """Block tables by sequence id, over one pool of device blocks.

    A freed block may be handed out at once, even while a step that uses it is in flight: the
    worker executes plans in order, so whoever gets the block writes it in a later step, or in the
    same one after nobody reads it any more. A block with a key is full and computed: nothing in
    flight writes to it.

    Invariant: a block's reference count is the number of tables it is in, and it is in a table at
    most once.
    """

    def __init__(self, *, num_gpu_blocks: int, block_size: int, watermark: float) -> None:
        self.block_size = block_size
        self.gpu_pool = BlockPool(num_gpu_blocks)
        self._watermark_blocks = int(watermark * num_gpu_blocks)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that are not in use, those with cached contents included."""
        return self.gpu_pool.num_free_blocks

    def holds(self, seq_id: int) -> bool:
        """Whether the sequence has a block table."""
        return seq_id in self._tables

    def seq_ids(self) -> set[int]:
        """The sequences that have block tables."""
        return set(self._tables)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def round_up(self, num_tokens: int) -> int:
        """Tokens that the blocks for so many tokens hold."""
        return self.num_blocks_for(num_tokens) * self.block_size

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of so many tokens fits when it is alone."""
        return self.num_blocks_for(num_tokens) <= self.gpu_pool.num_blocks

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks with these keys, up to the first key that none has."""
        find = self.gpu_pool.cached.find
        blocks = []
        for key in keys:
            block = find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def can_allocate(
        self, num_tokens: int, found: Sequence[int] = (), num_blocks_promised: int = 0
    ) -> AllocStatus:
        """Whether a sequence of so many tokens, the first of them in blocks that were found, can
        be admitted, beside what others were promised.

        Blocks up to the watermark are left to those that run; where none runs, all are given.
        """
        num_blocks = self.num_blocks_for(num_tokens)
        if num_blocks > self.gpu_pool.num_blocks:
            return AllocStatus.NEVER
        num_blocks -= sum(map(self.gpu_pool.is_used, found))  # the others are free ones
        idle = not self._tables and num_blocks_promised == 0
        kept = 0 if idle else self._watermark_blocks + num_blocks_promised
        enough = self.gpu_pool.num_free_blocks - num_blocks >= kept
        return AllocStatus.OK if enough else AllocStatus.LATER

    def allocate(self, seq_id: int, num_tokens: int, found: Sequence[int] = ()) -> list[int]:
        """Give a sequence blocks for so many tokens, first those that were found; its block
        table."""
        assert seq_id not in self._tables
        self.gpu_pool.share(found)  # before others take them
        num_blocks = self.num_blocks_for(num_tokens) - len(found)
        table = [*found, *self.gpu_pool.allocate(num_blocks)]
        self._tables[seq_id] = table
        return list(table)

    def can_append(self, seq_id: int, length: int) -> bool:
        """Whether the sequence can write its token number `length`."""
        return not self._needs_block(seq_id, length) or self.gpu_pool.num_free_blocks > 0

    def append(self, seq_id: int, length: int) -> BlockUpdate | None:
        """Make the sequence's token number `length` writable: a block more at the end of the
        table, or a copy of a shared last block; None if nothing was needed."""
        if not self._needs_block(seq_id, length):
            return None
        table = self._tables[seq_id]
        index = (length - 1) // self.block_size
        [block] = self.gpu_pool.allocate(1)
        if index == len(table):
            table.append(block)
            return BlockUpdate(index=index, block=block, copied_from=None)
        shared, table[index] = table[index], block
        self.gpu_pool.release([shared])
        return BlockUpdate(index=index, block=block, copied_from=shared)

    def fork(self, parent_id: int, child_id: int) -> list[int]:
        """Let a new sequence share all blocks of another; its block table."""
        assert child_id not in self._tables
        table = list(self._tables[parent_id])
        self.gpu_pool.share(table)
        self._tables[child_id] = table
        return list(table)

    def set_keys(self, seq_id: int, first: int, keys: Sequence[BlockKey]) -> None:
        """Have a sequence's blocks from entry `first` on, which are full and computed, found by
        these keys. Where another block has the same contents, that one goes on being found."""
        table = self._tables[seq_id]
        for index, key in enumerate(keys, first):
            self.gpu_pool.cached.add(table[index], key)

    def forget_keys(self, seq_id: int) -> None:
        """Have none of a sequence's blocks found any more."""
        for block in self._tables[seq_id]:
            self.gpu_pool.cached.discard(block)

    def free(self, seq_id: int) -> None:
        """Drop a sequence's hold on its blocks. Those with keys can be found until they are given
        to others, the longest unused first, and of one sequence's the last first."""
        self.gpu_pool.release(self._tables.pop(seq_id))

    def check(self) -> None:
        """Assert the invariant."""
        counts = Counter(block for table in self._tables.values() for block in table)
        self.gpu_pool.check(dict(counts))
        for seq_id, table in self._tables.items():
            assert len(table) == len(set(table)), f"a block is twice in {seq_id}'s table"

    def _needs_block(self, seq_id: int, length: int) -> bool:
        table = self._tables[seq_id]
        index = (length - 1) // self.block_size
        assert index <= len(table), "tokens are appended one by one"
        return index == len(table) or self.gpu_pool.is_shared(table[index])
