"""Which blocks of one worker group's KV caches belong to which sequence."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from scheduler_service.core.kv_cache.block_pool import BlockKey, BlockMap, BlockPool, map_blocks
from scheduler_service.core.kv_cache.host_cache import HostCache


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
    """Block tables by sequence id, over one pool of device blocks and one of host blocks.

    A freed block may be handed out at once, even while a step that uses it is in flight: the
    worker executes plans in order, so whoever gets the block writes it in a later step, or in the
    same one once it is no longer read. A block with a key is full and computed: nothing in
    flight writes to it.

    Swapping moves the tables of sequences that belong together: a block that they share is moved
    once. The pairs of blocks to move come back as the plan wants them.

    A block that is evicted goes to the host, if there is room, and can be found there; the plan in
    the making moves it before anything is written to it.

    Invariant: a block's reference count is the number of tables it is in, and it is in a table at
    most once. A sequence has a table on the device or on the host, or none.
    """

    def __init__(
        self, *, num_gpu_blocks: int, num_cpu_blocks: int, block_size: int, watermark: float
    ) -> None:
        self.block_size = block_size
        self.host = HostCache(num_cpu_blocks)
        self.gpu_pool = BlockPool(num_gpu_blocks, self.host.keep)
        self._watermark_blocks = int(watermark * num_gpu_blocks)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that are not in use, those with cached contents included."""
        return self.gpu_pool.num_free_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that no sequence needs."""
        return self.host.pool.num_free_blocks

    def holds(self, seq_id: int) -> bool:
        """Whether the sequence has a block table on the device."""
        return seq_id in self._tables

    def seq_ids(self) -> set[int]:
        """The sequences that have block tables on the device."""
        return set(self._tables)

    def table(self, seq_id: int) -> list[int]:
        """The sequence's blocks on the device, in order."""
        return list(self._tables[seq_id])

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def round_up(self, num_tokens: int) -> int:
        """`num_tokens`, rounded up to full blocks."""
        return self.num_blocks_for(num_tokens) * self.block_size

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens fits when it is alone."""
        return self.num_blocks_for(num_tokens) <= self.gpu_pool.num_blocks

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks with these keys, up to the first key that none has."""
        return _find_all(self.gpu_pool, keys)

    def find_on_host(self, keys: Iterable[BlockKey]) -> list[int]:
        """The same of host blocks."""
        return _find_all(self.host.pool, keys)

    def can_allocate(
        self, num_tokens: int, found: Sequence[int] = (), num_blocks_promised: int = 0
    ) -> AllocStatus:
        """Whether a sequence of `num_tokens` tokens, the first of them in the `found` blocks, can
        be admitted in addition to the blocks promised to others.

        Blocks up to the watermark are reserved for running sequences, if there are any.
        """
        num_new = self.num_blocks_for(num_tokens) - len(found)
        return self.can_provide(num_new, found, num_blocks_promised)

    def can_provide(
        self, num_new: int, found: Collection[int] = (), num_blocks_promised: int = 0
    ) -> AllocStatus:
        """Like `can_allocate`, for `num_new` blocks in addition to those that were found."""
        if num_new + len(found) > self.gpu_pool.num_blocks:
            return AllocStatus.NEVER
        enough = self.num_blocks_short(num_new, found, num_blocks_promised) <= 0
        return AllocStatus.OK if enough else AllocStatus.LATER

    def num_blocks_short(
        self, num_new: int, found: Collection[int] = (), num_blocks_promised: int = 0
    ) -> int:
        """How many blocks more must come free before these can be given; 0 or less if none."""
        num_free_found = len(found) - sum(map(self.gpu_pool.is_used, found))
        idle = not self._tables and num_blocks_promised == 0
        kept = 0 if idle else self._watermark_blocks + num_blocks_promised
        return num_new + num_free_found + kept - self.gpu_pool.num_free_blocks

    def allocate(self, seq_id: int, num_tokens: int, found: Sequence[int] = ()) -> list[int]:
        """Give a sequence blocks for `num_tokens` tokens, first those that were found; return its
        block table."""
        assert seq_id not in self._tables
        self.gpu_pool.share(found)  # before others take them
        num_blocks = self.num_blocks_for(num_tokens) - len(found)
        table = [*found, *self.gpu_pool.allocate(num_blocks)]
        self._tables[seq_id] = table
        return list(table)

    def fetch(
        self, seq_id: int, num_tokens: int, found: Sequence[int], stored: Sequence[int]
    ) -> list[int]:
        """The same where more of its tokens are in host blocks that were found: these are swapped
        in to the blocks that follow; (host block, device block) pairs."""
        self.host.fetch(stored)
        table = self.allocate(seq_id, num_tokens, found)
        targets = table[len(found) : len(found) + len(stored)]
        return [block for pair in zip(stored, targets, strict=True) for block in pair]

    def can_append(self, seq_id: int, length: int) -> bool:
        """Whether the sequence can write its token number `length`."""
        return not self._needs_block(seq_id, length) or self.gpu_pool.num_free_blocks > 0

    def can_append_all(self, lengths: Iterable[tuple[int, int]]) -> bool:
        """Whether several sequences, given as (id, length), can all write their last tokens."""
        num_blocks = 0
        sharers: Counter[int] = Counter()
        for seq_id, length in lengths:
            table = self._tables[seq_id]
            index = (length - 1) // self.block_size
            if index == len(table):
                num_blocks += 1
            else:
                sharers[table[index]] += 1
        for block, count in sharers.items():
            # Each but the last to ask copies the block, unless others have it, too.
            num_blocks += min(count, self.gpu_pool.num_references(block) - 1)
        return num_blocks <= self.gpu_pool.num_free_blocks

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
        """Register keys for a sequence's blocks from entry `first` on, which are full and computed.
        If another block has the same contents, its key keeps pointing to that block."""
        table = self._tables[seq_id]
        for index, key in enumerate(keys, first):
            self.gpu_pool.cached.add(table[index], key)

    def forget_keys(self, keys: Iterable[BlockKey]) -> None:
        """Forget these keys, on device and host: no block is found by them afterwards."""
        for pool in (self.gpu_pool, self.host.pool):
            for block in [pool.cached.find(key) for key in keys]:
                if block is not None:
                    pool.forget(block)

    def free(self, seq_id: int) -> None:
        """Drop a sequence's hold on its blocks. Those with keys can be found until they are given
        to others, the longest unused first, and of one sequence's the last first."""
        self.gpu_pool.release(self._tables.pop(seq_id))

    # Swapping.

    def num_moves(self, seq_ids: Sequence[int]) -> int:
        """Block moves that it takes to swap these sequences out and in again."""
        keys = self._keys_of(seq_ids)
        return self.host.num_missing(keys.values()) + len(keys)

    def num_own_blocks(self, seq_ids: Sequence[int]) -> int:
        """Distinct blocks that only these sequences use, which freeing them all would free."""
        counts = Counter(block for seq_id in seq_ids for block in self._tables[seq_id])
        return sum(self.gpu_pool.num_references(block) == n for block, n in counts.items())

    def can_swap_out(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Whether the host has room for all blocks of these sequences, at the expense of what is
        cached there."""
        keys = self._keys_of(seq_ids)
        if len(keys) > self.host.pool.num_blocks:
            return AllocStatus.NEVER
        enough = self.host.num_needed(keys.values()) <= self.host.pool.num_free_blocks
        return AllocStatus.OK if enough else AllocStatus.LATER

    def swap_out(self, seq_ids: Sequence[int]) -> list[int]:
        """Move these sequences' blocks to the host, except what it has: (device block, host block)
        pairs.

        The device blocks are free at once: the worker reads them before anything else happens.
        """
        keys = self._keys_of(seq_ids)
        tables = {seq_id: self._tables.pop(seq_id) for seq_id in seq_ids}
        targets = self.host.put(tables, keys)
        for table in tables.values():
            self.gpu_pool.release(table)
        return [block for pair in targets.items() for block in pair]

    def can_swap_in(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Whether these swapped-out sequences can come back together, with a block to grow into
        for each; where nobody else has any, without.

        Never NEVER: they have been on the device together.
        """
        num_blocks = self.host.num_blocks_of(seq_ids)
        kept = self._watermark_blocks + len(seq_ids) if self._tables else 0
        enough = self.gpu_pool.num_free_blocks - num_blocks >= kept
        return AllocStatus.OK if enough else AllocStatus.LATER

    def swap_in(self, seq_ids: Sequence[int]) -> list[int]:
        """Move these sequences' blocks to the device: (host block, device block) pairs.

        The host blocks are free once the plan is complete; those with keys stay cached.
        """
        tables = self.host.take(seq_ids)
        sources = list(dict.fromkeys(block for table in tables.values() for block in table))
        targets = dict(zip(sources, self.gpu_pool.allocate(len(sources)), strict=True))
        for seq_id, table in tables.items():
            self._tables[seq_id] = [targets[block] for block in table]
            self.gpu_pool.share(self._tables[seq_id])
        self.gpu_pool.release(list(targets.values()))  # the first reference has no owner
        return [block for pair in targets.items() for block in pair]

    def free_swapped(self, seq_id: int) -> None:
        """Drop a swapped-out sequence's hold on its blocks."""
        self.host.free(seq_id)

    def end_plan(self) -> list[int]:
        """The plan in the making is complete, but for these (device block, host block) pairs that
        it must swap out to keep what was evicted."""
        return self.host.end_plan()

    def device_map(self, owners: Iterable[tuple[int, int]]) -> BlockMap:
        """Whose the device's blocks are, by (sequence id, number of its request)."""
        return map_blocks(self.gpu_pool, self._tables, owners)

    def host_map(self, owners: Iterable[tuple[int, int]]) -> BlockMap:
        """The same of the host's blocks."""
        return map_blocks(self.host.pool, self.host.tables, owners)

    def host_table(self, seq_id: int) -> list[int]:
        """A swapped-out sequence's blocks on the host, in order."""
        return list(self.host.tables[seq_id])

    def check(self) -> None:
        """Assert the invariants, between plans."""
        self.host.check()
        assert not self._tables.keys() & self.host.tables.keys(), "a table is in both places"
        counts = Counter(block for table in self._tables.values() for block in table)
        self.gpu_pool.check(dict(counts))
        for seq_id, table in self._tables.items():
            assert len(table) == len(set(table)), f"a block is twice in {seq_id}'s table"

    def _needs_block(self, seq_id: int, length: int) -> bool:
        table = self._tables[seq_id]
        index = (length - 1) // self.block_size
        assert index <= len(table), "tokens are appended one by one"
        return index == len(table) or self.gpu_pool.is_shared(table[index])

    def _keys_of(self, seq_ids: Sequence[int]) -> dict[int, BlockKey | None]:
        """The keys of these sequences' distinct blocks."""
        key_of = self.gpu_pool.cached.key_of
        return {block: key_of(block) for seq_id in seq_ids for block in self._tables[seq_id]}


def _find_all(pool: BlockPool, keys: Iterable[BlockKey]) -> list[int]:
    """The blocks with these keys, up to the first key that none has."""
    find = pool.cached.find
    blocks = []
    for key in keys:
        block = find(key)
        if block is None:
            break
        blocks.append(block)
    return blocks
