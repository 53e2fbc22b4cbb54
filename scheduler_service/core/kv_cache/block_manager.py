"""Block tables: which blocks of a worker group's KV caches belong to which sequence."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_pool import BlockKey, BlockMap, BlockPool, map_blocks
from scheduler_service.core.kv_cache.host_cache import CopyAhead, HostCache


@dataclass(slots=True, kw_only=True)
class BlockUpdate:
    """A change of one entry of a block table."""

    index: int
    block: int
    copied_from: int | None
    """The shared block that is copied to the new one, if any."""
    group: int = 0


class BlockManager:
    """Block tables by sequence id, over one pool of device blocks and one of host blocks.

    A freed block may be handed out at once, even while a step that uses it is in flight: the
    worker executes plans in order, so the new owner writes to it in a later step, or in the same
    step after it is read. A block with a key is full and computed: nothing in flight writes to it.

    Swapping moves the tables of the sequences of one group: a block that they share is moved once.
    The pairs of blocks to move are returned in the plan's format.

    An evicted block is copied to the host, if there is room, and can be found there; the plan under
    construction copies it before anything is written to it, unless an earlier plan has copied it
    ahead.

    Invariant: a block's reference count is the number of tables that contain it, each at most once.
    A sequence has a table on the device or on the host, or none.
    """

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        watermark: float,
    ) -> None:
        self.block_size = block_size
        self.host = HostCache(num_cpu_blocks)
        self.gpu_pool = BlockPool(num_gpu_blocks, self.host.keep)
        self._copy_ahead = CopyAhead(self.gpu_pool, self.host)
        self._watermark_blocks = int(watermark * num_gpu_blocks)
        self._tables: dict[int, list[int]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Number of device blocks that are not in use, including those with cached contents."""
        return self.gpu_pool.num_free_blocks

    @property
    def num_free_host_blocks(self) -> int:
        """Number of host blocks that no sequence uses."""
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

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """The device blocks with these keys, up to the first key that is not found."""
        return _find_all(self.gpu_pool, keys)

    def find_on_host(self, keys: Iterable[BlockKey]) -> list[int]:
        """The host blocks with these keys, up to the first key that is not found."""
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
        """Like `can_allocate`, for `num_new` blocks in addition to the `found` ones."""
        if num_new + len(found) > self.gpu_pool.num_blocks:
            return AllocStatus.NEVER
        enough = self.num_blocks_short(num_new, found, num_blocks_promised) <= 0
        return AllocStatus.OK if enough else AllocStatus.LATER

    def num_blocks_short(
        self, num_new: int, found: Collection[int] = (), num_blocks_promised: int = 0
    ) -> int:
        """Number of blocks that must be freed before these can be provided; 0 or less if none."""
        num_free_found = len(found) - sum(map(self.gpu_pool.is_used, found))
        idle = not self._tables and num_blocks_promised == 0
        kept = 0 if idle else self._watermark_blocks + num_blocks_promised
        return num_new + num_free_found + kept - self.gpu_pool.num_free_blocks

    def allocate(self, seq_id: int, num_tokens: int, found: Sequence[int] = ()) -> list[int]:
        """Allocate blocks for a sequence of `num_tokens` tokens, of which the `found` ones hold the
        first; return its block table."""
        assert seq_id not in self._tables
        self.gpu_pool.share(found)  # before others take them
        num_blocks = self.num_blocks_for(num_tokens) - len(found)
        table = [*found, *self.gpu_pool.allocate(num_blocks)]
        self._tables[seq_id] = table
        return list(table)

    def fetch(
        self, seq_id: int, num_tokens: int, found: Sequence[int], stored: Sequence[int]
    ) -> list[int]:
        """Like `allocate`, if the host holds further tokens in the `stored` blocks, which are
        swapped in to the next device blocks; returns (host block, device block) pairs."""
        self.host.fetch(stored)
        table = self.allocate(seq_id, num_tokens, found)
        targets = table[len(found) : len(found) + len(stored)]
        return [block for pair in zip(stored, targets, strict=True) for block in pair]

    def can_append(self, seq_id: int, length: int, num_kept: int = 0) -> bool:
        """Whether the sequence can write its token number `length` and leave `num_kept` blocks free
        for others."""
        needs_block = self._needs_block(self._tables[seq_id], (length - 1) // self.block_size)
        return not needs_block or self.gpu_pool.num_free_blocks > num_kept

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
            # Each but the last to append copies the block, unless other sequences share it, too.
            num_blocks += min(count, self.gpu_pool.num_references(block) - 1)
        return num_blocks <= self.gpu_pool.num_free_blocks

    def append(self, seq_id: int, length: int) -> BlockUpdate | None:
        """Make the sequence's token number `length` writable, by a new block at the end of the
        table or a copy of a shared last block; None if neither is needed."""
        table = self._tables[seq_id]
        index = (length - 1) // self.block_size
        if index == len(table):
            table += self.gpu_pool.allocate(1)
            return BlockUpdate(index=index, block=table[index], copied_from=None)
        if not self.gpu_pool.is_shared(table[index]):
            return None
        [block] = self.gpu_pool.allocate(1)
        shared, table[index] = table[index], block
        self.gpu_pool.release([shared])
        return BlockUpdate(index=index, block=block, copied_from=shared)

    def trim(self, seq_id: int, num_tokens: int) -> bool:
        """Release the blocks after those of the sequence's first `num_tokens` tokens, which were
        for drafts; returns whether there were any."""
        table = self._tables[seq_id]
        num_blocks = self.num_blocks_for(num_tokens)
        self.gpu_pool.release(table[num_blocks:])
        has_more = len(table) > num_blocks
        del table[num_blocks:]
        return has_more

    def fork(self, parent_id: int, child_id: int) -> list[int]:
        """Make a new sequence share all blocks of another one; returns its block table."""
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
        """Remove these keys on device and host: no block is found by them afterwards."""
        for pool in (self.gpu_pool, self.host.pool):
            for block in [pool.cached.find(key) for key in keys]:
                if block is not None:
                    pool.forget(block)

    def free(self, seq_id: int) -> None:
        """Release a sequence's blocks. Blocks with keys can be found until they are reused, the
        least recently used first, and a sequence's last block before its first."""
        self.gpu_pool.release(self._tables.pop(seq_id))

    # Swapping.

    def num_moves(self, seq_ids: Sequence[int]) -> int:
        """Number of block moves to swap these sequences out and in again."""
        keys = self._keys_of(seq_ids)
        return self.host.num_missing(keys.values()) + len(keys)

    def num_own_blocks(self, seq_ids: Sequence[int]) -> int:
        """Number of distinct blocks that only these sequences use, and that freeing them frees."""
        counts = Counter(block for seq_id in seq_ids for block in self._tables[seq_id])
        return sum(self.gpu_pool.num_references(block) == n for block, n in counts.items())

    def can_swap_out(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Whether the host has room for all blocks of these sequences, if its cached blocks are
        evicted."""
        keys = self._keys_of(seq_ids)
        if len(keys) > self.host.pool.num_blocks:
            return AllocStatus.NEVER
        enough = self.host.num_needed(keys.values()) <= self.host.pool.num_free_blocks
        return AllocStatus.OK if enough else AllocStatus.LATER

    def swap_out(self, seq_ids: Sequence[int]) -> list[int]:
        """Move these sequences' blocks to the host, except those of which it has copies; returns
        (device block, host block) pairs.

        The device blocks are free at once: the worker reads them before it does anything else.
        """
        keys = self._keys_of(seq_ids)
        tables = {seq_id: self._tables.pop(seq_id) for seq_id in seq_ids}
        targets = self.host.put(tables, keys)
        for table in tables.values():
            self.gpu_pool.release(table)
        return [block for pair in targets.items() for block in pair]

    def can_swap_in(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Whether these swapped-out sequences can be swapped in together, each with one more block
        to grow into unless the device is empty.

        Returns OK or LATER, since they were on the device together before.
        """
        num_blocks = self.host.num_blocks_of(seq_ids)
        kept = self._watermark_blocks + len(seq_ids) if self._tables else 0
        enough = self.gpu_pool.num_free_blocks - num_blocks >= kept
        return AllocStatus.OK if enough else AllocStatus.LATER

    def swap_in(self, seq_ids: Sequence[int]) -> list[int]:
        """Move these sequences' blocks to the device; returns (host block, device block) pairs.

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
        """Release a swapped-out sequence's blocks."""
        self.host.free(seq_id)

    def end_plan(self, *, has_rows: bool) -> list[int]:
        """Complete the plan under construction; returns the (device block, host block) pairs that
        it must swap out in addition, to keep evicted blocks, and those that will be evicted next.
        """
        self._copy_ahead.end_plan(has_rows=has_rows)
        return self.host.end_plan()

    def maps(self, owners: Sequence[tuple[int, int]]) -> tuple[BlockMap, BlockMap]:
        """Owners of the device's and the host's blocks; `owners`: (sequence id, number of its
        request)."""
        host_map = map_blocks(self.host.pool, self.host.tables, owners)
        return map_blocks(self.gpu_pool, self._tables, owners), host_map

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

    def _needs_block(self, table: list[int], index: int) -> bool:
        """Whether a token for the table's entry `index` cannot be written to the block there."""
        assert index <= len(table), "tokens are appended one by one"
        return index == len(table) or self.gpu_pool.is_shared(table[index])

    def _keys_of(self, seq_ids: Sequence[int]) -> dict[int, BlockKey | None]:
        """The keys of these sequences' distinct blocks."""
        key_of = self.gpu_pool.cached.key_of
        return {block: key_of(block) for seq_id in seq_ids for block in self._tables[seq_id]}


def _find_all(pool: BlockPool, keys: Iterable[BlockKey]) -> list[int]:
    find = pool.cached.find
    blocks = []
    for key in keys:
        block = find(key)
        if block is None:
            break
        blocks.append(block)
    return blocks
