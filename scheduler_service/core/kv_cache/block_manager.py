"""Block tables: which blocks of a worker group's KV caches belong to which sequence."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler_service.core.config import CacheGroup
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_pool import (
    BlockKey,
    BlockMap,
    BlockPool,
    Contents,
    map_blocks,
)
from scheduler_service.core.kv_cache.block_table import Retained, SequenceTables, Table
from scheduler_service.core.kv_cache.host_cache import CopyAhead, HostCache
from scheduler_service.core.kv_cache.prefix_hit import GroupHit, PrefixHit

Retain = Callable[[int, int, Contents | None], Contents | None]
"""What to keep cached of a sequence's released block, by its group, its index, and what is cached
of it already; None: nothing."""


@dataclass(slots=True)
class BlockUpdate:
    """A change of one entry of a block table."""

    group: int
    index: int
    block: int
    copied_from: int | None
    """The shared block that is copied to the new one, if any."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What a plan moves to admit a sequence; pairs of blocks, in the plan's format."""

    swap_in: list[int]
    copy: list[int]


class BlockManager:
    """Block tables by sequence id and cache group, over one pool of device blocks and one of host
    blocks.

    A group of windows or chunks has blocks of the tokens only that rows to come may read. It
    allocates those of a prompt chunk by chunk, out of what is reserved when the sequence is
    admitted.

    A freed block may be handed out at once, even while a step that uses it is in flight: the
    worker executes plans in order, so the new owner writes to it in a later step, or in the same
    step after it is read. What has a key is computed: nothing in flight writes there.

    Swapping moves the tables of the sequences of one group: a block that they share is moved once.
    The pairs of blocks to move are returned in the plan's format.

    An evicted block is copied to the host, if there is room, and can be found there; the plan under
    construction copies it before anything is written to it, unless an earlier plan has copied it
    ahead.

    Invariant: a block's reference count is the number of tables that contain it, each at most once,
    plus one while the plan under construction copies it to a sequence that has found a part of it.
    A sequence has tables on the device or on the host, or none. What is reserved is free.
    """

    def __init__(
        self,
        *,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        groups: Sequence[CacheGroup],
        watermark: float,
        max_chunk: int = 0,
        key_tokens: int = 1,
    ) -> None:
        """`max_chunk`: most tokens of a prompt in a step, 0: all; `key_tokens`: tokens of a unit of
        keys, which divides the tokens of every group's blocks."""
        self.groups = tuple(groups)
        self.host = HostCache(num_cpu_blocks)
        self.gpu_pool = BlockPool(num_gpu_blocks, self.host.keep)
        self.slides = any(group.span for group in groups)
        """Whether any group releases blocks before its sequence ends."""
        self._block_tokens = [group.block_tokens for group in groups]
        self._units_per_block = [group.block_tokens // key_tokens for group in groups]
        self._spans = [number for number, group in enumerate(groups) if group.span]
        self._max_chunk = max_chunk
        self._key_tokens = key_tokens
        self._copy_ahead = CopyAhead(self.gpu_pool, self.host)
        self._watermark_blocks = int(watermark * num_gpu_blocks)
        if len(groups) > 1:  # a sequence may need one of each to write a token
            self._watermark_blocks = max(self._watermark_blocks, len(groups))
        self._tables: dict[int, SequenceTables] = {}
        self.num_reserved = 0
        """Free device blocks that are reserved for prompts."""
        self._pinned: list[int] = []
        """References that end with the plan: blocks that it copies to those that found them."""

    # Capacity.

    @property
    def num_free_blocks(self) -> int:
        """Number of device blocks that are not in use, including those with cached contents."""
        return self.gpu_pool.num_free_blocks

    @property
    def num_available(self) -> int:
        """Number of free device blocks that are not reserved for prompts."""
        return self.gpu_pool.num_free_blocks - self.num_reserved

    @property
    def num_free_host_blocks(self) -> int:
        """Number of host blocks that no sequence uses."""
        return self.host.pool.num_free_blocks

    def holds(self, seq_id: int) -> bool:
        """Whether the sequence has block tables on the device."""
        return seq_id in self._tables

    def seq_ids(self) -> set[int]:
        """The sequences that have block tables on the device."""
        return set(self._tables)

    def tables(self, seq_id: int) -> list[Table]:
        """The sequence's tables on the device, by group."""
        return self._tables[seq_id].tables

    def num_blocks_for(self, num_tokens: int) -> int:
        """Most blocks that a sequence of `num_tokens` tokens has at a time."""
        return sum(group.max_blocks(num_tokens, self._max_chunk) for group in self.groups)

    def num_blocks_for_all(self, num_tokens: int, count: int) -> int:
        """Blocks promised to `count` sequences with `num_tokens` tokens in all, and to grow."""
        mean = -(-num_tokens // max(1, count))
        numbers = (
            min(group.max_blocks(num_tokens, 0), count * group.max_blocks(mean, self._max_chunk))
            for group in self.groups
        )
        return sum(numbers) + count * len(self.groups)

    def num_needed(
        self,
        num_tokens: int,
        hit: PrefixHit,
        num_upfront: int = 0,
        is_shared: Callable[[int], bool] | None = None,
    ) -> list[int]:
        """By group: most blocks that a sequence of `num_tokens` tokens has at a time, without found
        ones that others use. `num_upfront`: tokens for which all blocks are allocated at once."""
        is_shared = is_shared or self.gpu_pool.is_used
        numbers = []
        for group, found in zip(self.groups, hit.groups, strict=True):
            full = found.blocks[:-1] if found.ends_inside else found.blocks
            shared = [block >= 0 and is_shared(block) for block in full]
            end = -(-num_tokens // group.block_tokens)
            if not group.span:
                numbers.append(end - sum(shared))
                continue
            first = found.first + (shared.index(False) if False in shared else len(shared))
            number = min(group.max_blocks(num_tokens, self._max_chunk), end - first)
            numbers.append(max(number, -(-num_upfront // group.block_tokens) - first))
        return numbers

    def can_allocate(
        self, num_tokens: int, hit: PrefixHit, num_blocks_promised: int = 0
    ) -> AllocStatus:
        """Whether a sequence of `num_tokens` tokens, the first of them found, can be admitted in
        addition to the blocks promised to others.

        Blocks up to the watermark are reserved for running sequences, if there are any.
        """
        if self.num_blocks_for(num_tokens) > self.gpu_pool.num_blocks:
            return AllocStatus.NEVER
        return self.can_provide(sum(self.num_needed(num_tokens, hit)), num_blocks_promised)

    def can_provide(self, num_new: int, num_blocks_promised: int = 0) -> AllocStatus:
        """Like `can_allocate`, for `num_new` blocks; those that were found and are free count."""
        if num_new > self.gpu_pool.num_blocks:
            return AllocStatus.NEVER
        enough = self.num_blocks_short(num_new, num_blocks_promised) <= 0
        return AllocStatus.OK if enough else AllocStatus.LATER

    def num_blocks_short(self, num_new: int, num_blocks_promised: int = 0) -> int:
        """Number of blocks that must be freed before these can be provided; 0 or less if none."""
        idle = not self._tables and num_blocks_promised == 0
        kept = 0 if idle else self._watermark_blocks + num_blocks_promised
        return num_new + kept - self.num_available

    # Prompts.

    def allocate(self, seq_id: int, num_tokens: int, hit: PrefixHit, num_upfront: int = 0) -> Moves:
        """Allocate blocks for a sequence of `num_tokens` tokens, the first of which were found;
        those of windows and chunks are only reserved, but for the first `num_upfront` tokens. What
        was found on the host is swapped in."""
        assert seq_id not in self._tables
        pool = self.gpu_pool
        numbers = self.num_needed(num_tokens, hit, num_upfront)
        num_spare = self.num_available - sum(numbers)
        used = set(filter(pool.is_used, hit.shared))
        self.host.fetch(hit.host_blocks)
        pool.share(hit.shared)  # before others are evicted
        taken = self._pin(hit.copied, num_spare)
        held = SequenceTables([], is_prompt=True)
        moves = Moves([], [])
        for group, found, number in zip(self.groups, hit.groups, numbers, strict=True):
            table = Table(found.first, self._begin(found, taken, moves))
            held.tables.append(table)
            end = -(-(num_upfront if group.span else num_tokens) // group.block_tokens)
            table.blocks += pool.allocate(max(0, end - table.end))
            if group.span:
                num_held = sum(block not in used for block in table.blocks)
                held.num_reserved += max(0, number - num_held)
        self._tables[seq_id] = held
        self.num_reserved += held.num_reserved
        return moves

    def _pin(self, copied: Sequence[int], num_spare: int) -> set[int]:
        """Keep what the plan under construction copies. If memory is short, blocks that nobody uses
        are not copied: returns those that lose their contents to the sequence that found them."""
        taken = set()
        for block in copied:
            num_spare -= not self.gpu_pool.is_used(block)
            self.gpu_pool.share([block])
            if num_spare < 0 and not self.gpu_pool.is_shared(block):
                self.gpu_pool.cached.discard(block)
                taken.add(block)
            else:
                self._pinned.append(block)
        return taken

    def _begin(self, found: GroupHit, taken: Collection[int], moves: Moves) -> list[int]:
        """The first blocks of a table: found ones, or new ones to which they are moved."""
        blocks = [*found.blocks]
        for offset, block in enumerate(found.blocks):
            is_part = found.ends_inside and offset == len(blocks) - 1
            if block >= 0 and (not is_part or block in taken):
                continue
            [blocks[offset]] = self.gpu_pool.allocate(1)
            if block >= 0:
                moves.copy.extend((block, blocks[offset]))
            else:
                moves.swap_in.extend((~block, blocks[offset]))
        return blocks

    def extend(self, seq_id: int, end: int) -> list[BlockUpdate] | None:
        """Allocate blocks for the tokens of a prompt up to `end`, out of what is reserved for it;
        returns the changes of its tables. None if memory is short, because blocks that the
        sequence has released are used by others, which found them."""
        held = self._tables[seq_id]
        missing = [
            max(0, -(-end // group.block_tokens) - table.end)
            for group, table in zip(self.groups, held.tables, strict=True)
        ]
        num_reserved = min(sum(missing), held.num_reserved)
        if sum(missing) - num_reserved > self.num_available:
            return None
        held.num_reserved -= num_reserved
        self.num_reserved -= num_reserved
        return [
            self._grow(number, table)
            for number, table in enumerate(held.tables)
            for _ in range(missing[number])
        ]

    def end_prompt(self, seq_id: int) -> None:
        """Give up what is reserved for a sequence: the rest of its prompt is planned."""
        held = self._tables[seq_id]
        self.num_reserved -= held.num_reserved
        held.num_reserved, held.is_prompt = 0, False

    def _grow(self, number: int, table: Table) -> BlockUpdate:
        """Add a block at the end of a table."""
        block = self.gpu_pool.allocate_one()
        table.blocks.append(block)
        return BlockUpdate(number, table.end - 1, block, None)

    # Windows and chunks.

    def slide(self, seq_id: int, position: int, retain: Retain) -> None:
        """Release the blocks that no row at `position` or after it reads. Those that `retain` keeps
        stay cached as long as the sequence's other blocks."""
        held = self._tables[seq_id]
        for number in self._spans:
            table, tokens = held.tables[number], self._block_tokens[number]
            first = self.groups[number].first_needed(position) // tokens
            if first <= table.first:
                continue
            for index, block in enumerate(table.blocks[: first - table.first], table.first):
                contents = retain(number, index, self.gpu_pool.cached.contents_of(block))
                self._let_go(held, block, (index + 1) * tokens, contents)
            del table.blocks[: first - table.first]
            table.first = first

    def _let_go(
        self, held: SequenceTables, block: int, end: int, contents: Contents | None
    ) -> None:
        """Release a block of a sequence that continues."""
        if contents is not None:
            is_cached = self.gpu_pool.cached.contents_of(block) is contents
            cached = self.gpu_pool.cached.hold(block, contents)
            retained = Retained(end, block, contents, cached)
            held.retained.append(retained)
            if not is_cached:
                held.unconfirmed.append(retained)
        num_freed = self.gpu_pool.release([block], is_expendable=contents is None)
        if held.is_prompt:
            held.num_reserved += num_freed
            self.num_reserved += num_freed

    # Running sequences.

    def can_append(self, seq_id: int, length: int, num_kept: int = 0) -> bool:
        """Whether the sequence can write its token number `length` and leave free what `num_kept`
        others may need for a token."""
        pairs = zip(self.groups, self._tables[seq_id].tables, strict=True)
        num_needed = sum(
            table.needs_block((length - 1) // group.block_tokens, self.gpu_pool)
            for group, table in pairs
        )
        return not num_needed or self.num_available >= num_needed + num_kept * len(self.groups)

    def can_append_all(self, lengths: Iterable[tuple[int, int]]) -> bool:
        """Whether several sequences, given as (id, length), can all write their last tokens."""
        num_blocks = 0
        sharers: Counter[int] = Counter()
        for seq_id, length in lengths:
            for group, table in zip(self.groups, self._tables[seq_id].tables, strict=True):
                offset = (length - 1) // group.block_tokens - table.first
                if offset == len(table.blocks):
                    num_blocks += 1
                else:
                    sharers[table.blocks[offset]] += 1
        for block, count in sharers.items():
            # Each but the last to append copies the block, unless other sequences share it, too.
            num_blocks += min(count, self.gpu_pool.num_references(block) - 1)
        return num_blocks <= self.num_available

    def append(self, seq_id: int, length: int) -> list[BlockUpdate]:
        """Make the sequence's token number `length` writable, by new blocks at the ends of its
        tables, or copies of shared last blocks."""
        updates = []
        for number, table in enumerate(self._tables[seq_id].tables):
            index = (length - 1) // self._block_tokens[number]
            offset, shared = index - table.first, None
            if offset == len(table.blocks):
                block = self.gpu_pool.allocate_one()
                table.blocks.append(block)
            elif self.gpu_pool.is_shared(table.blocks[offset]):
                block = self.gpu_pool.allocate_one()
                shared, table.blocks[offset] = table.blocks[offset], block
                self.gpu_pool.release([shared])
            else:
                continue
            updates.append(BlockUpdate(number, index, block, shared))
        return updates

    def trim(self, seq_id: int, num_tokens: int) -> bool:
        """Release the blocks after those of the sequence's first `num_tokens` tokens, which were
        for drafts; returns whether there were any."""
        has_more = False
        for group, table in zip(self.groups, self._tables[seq_id].tables, strict=True):
            num_blocks = -(-num_tokens // group.block_tokens) - table.first
            has_more |= len(table.blocks) > num_blocks
            self.gpu_pool.release(table.blocks[num_blocks:])
            del table.blocks[num_blocks:]
        return has_more

    def fork(self, parent_id: int, child_id: int) -> None:
        """Make a new sequence share all blocks of another one."""
        assert child_id not in self._tables
        tables = [Table(t.first, list(t.blocks)) for t in self._tables[parent_id].tables]
        self._tables[child_id] = SequenceTables(tables)
        self.gpu_pool.share(self._tables[child_id].blocks())

    def hit_of(self, num_tokens: int) -> PrefixHit:
        """As large as `hit_in`, for an estimate."""
        groups = []
        for group in self.groups:
            first = group.first_needed(num_tokens) // group.block_tokens
            groups.append(GroupHit(first, [0] * (num_tokens // group.block_tokens - first)))
        return PrefixHit(num_tokens, groups)

    def hit_in(self, seq_id: int, num_tokens: int) -> PrefixHit:
        """The first tokens of a sequence, which fill blocks in every group, to share them with
        another one. They may still have to be computed."""
        groups = []
        for group, table in zip(self.groups, self._tables[seq_id].tables, strict=True):
            first = group.first_needed(num_tokens) // group.block_tokens
            end = num_tokens // group.block_tokens
            groups.append(GroupHit(first, table.blocks[first - table.first : end - table.first]))
        return PrefixHit(num_tokens, groups)

    def set_keys(
        self, seq_id: int, keys: Sequence[BlockKey], first: int = 0, end: int | None = None
    ) -> None:
        """Let a sequence's units from number `first` to `end`, which are computed, be found by
        their `keys`. If another block has the same contents, they still lead to that one."""
        held = self._tables[seq_id]
        end = len(keys) if end is None else end
        add = self.gpu_pool.cached.add
        for number, table in enumerate(held.tables):
            num_units = self._units_per_block[number]
            start = max(first // num_units, table.first)
            num_blocks = max(0, -(-end // num_units) - start)  # others have been released
            blocks = table.blocks[start - table.first :][:num_blocks]
            for index, block in enumerate(blocks, start):
                unit = index * num_units
                units = tuple(keys[unit : min(end, unit + num_units)])
                add(block, Contents(number, units, len(units) == num_units))
        if held.unconfirmed:
            self._confirm(held, end * self._key_tokens)

    def _confirm(self, held: SequenceTables, num_tokens: int) -> None:
        """Let released blocks be found whose contents were in flight."""
        rest = []
        for retained in held.unconfirmed:
            if retained.end <= num_tokens:
                self.gpu_pool.cached.confirm(retained.block, retained.cached, retained.contents)
            else:
                rest.append(retained)
        held.unconfirmed = rest

    def forget_keys(self, keys: Collection[BlockKey]) -> None:
        """Forget, on device and host, what blocks hold that begin with any of these units."""
        for pool in (self.gpu_pool, self.host.pool):
            for block in pool.cached.blocks_with(keys):
                pool.forget(block)

    def free(self, seq_id: int) -> None:
        """Release a sequence's blocks. Those with keys can be found until they are reused, the
        least recently used first, and a sequence's last block before its first."""
        self._drop_reservation(seq_id)
        self._release(self._tables.pop(seq_id))

    def _drop_reservation(self, seq_id: int) -> None:
        """Prepare a sequence's end on the device."""
        self.end_prompt(seq_id)
        held = self._tables[seq_id]
        for retained in held.unconfirmed:
            if self.gpu_pool.cached.contents_of(retained.block) is retained.contents:
                self.gpu_pool.forget(retained.block)

    def _release(self, held: SequenceTables) -> None:
        """Release all blocks by the ends of their tokens, and renew the retained ones."""
        if len(self.groups) == 1 and not held.retained:
            self.gpu_pool.release(held.blocks())
            return
        placed: list[tuple[int, int, Contents | None]]
        placed = [(r.end, r.block, r.contents) for r in held.retained]
        for group, table in zip(self.groups, held.tables, strict=True):
            for index, block in enumerate(table.blocks, table.first + 1):
                placed.append((index * group.block_tokens, block, None))
        for _, block, contents in sorted(placed, key=lambda entry: entry[:2], reverse=True):
            found = self.gpu_pool.cached.contents_of(block)
            if contents is None:
                self.gpu_pool.release([block])
            elif found is not None and found.units[0] == contents.units[0]:
                self.gpu_pool.cached.touch(block)

    # Swapping.

    def num_moves(self, seq_ids: Sequence[int]) -> int:
        """Number of block moves to swap these sequences out and in again."""
        contents = self._contents_of(seq_ids)
        return self.host.num_missing(contents.values()) + len(contents)

    def num_own_blocks(self, seq_ids: Sequence[int], group: int | None = None) -> int:
        """Number of distinct blocks that only these sequences use, and that freeing them frees;
        those of one group, or all."""
        tables = [self._tables[seq_id] for seq_id in seq_ids]
        counts = Counter(
            block
            for held in tables
            for block in (held.blocks() if group is None else held.tables[group].blocks)
        )
        return sum(self.gpu_pool.num_references(block) == n for block, n in counts.items())

    def can_swap_out(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Whether the host has room for all blocks of these sequences, if its cached blocks are
        evicted."""
        contents = self._contents_of(seq_ids)
        if len(contents) > self.host.pool.num_blocks:
            return AllocStatus.NEVER
        enough = self.host.num_needed(contents.values()) <= self.host.pool.num_free_blocks
        return AllocStatus.OK if enough else AllocStatus.LATER

    def swap_out(self, seq_ids: Sequence[int]) -> list[int]:
        """Move these sequences' blocks to the host, except those of which it has copies; returns
        (device block, host block) pairs.

        The device blocks are free at once: the worker reads them before it does anything else.
        """
        contents = self._contents_of(seq_ids)
        for seq_id in seq_ids:
            self._drop_reservation(seq_id)
        tables = {seq_id: self._tables.pop(seq_id) for seq_id in seq_ids}
        targets = self.host.put(tables, contents)
        for held in tables.values():
            self._release(held)
        return [block for pair in targets.items() for block in pair]

    def can_swap_in(self, seq_ids: Sequence[int]) -> AllocStatus:
        """Whether these swapped-out sequences can be swapped in together, each with room to grow
        unless the device is empty.

        Returns OK or LATER, since they were on the device together before.
        """
        num_blocks = self.host.num_blocks_of(seq_ids)
        grow = len(seq_ids) * len(self.groups)
        kept = self._watermark_blocks + grow if self._tables else 0
        enough = self.num_available - num_blocks >= kept
        return AllocStatus.OK if enough else AllocStatus.LATER

    def swap_in(self, seq_ids: Sequence[int]) -> list[int]:
        """Move these sequences' blocks to the device; returns (host block, device block) pairs.

        The host blocks are free once the plan is complete; those with keys stay cached.
        """
        tables = self.host.take(seq_ids)
        sources = list(dict.fromkeys(block for held in tables.values() for block in held.blocks()))
        targets = dict(zip(sources, self.gpu_pool.allocate(len(sources)), strict=True))
        for seq_id, held in tables.items():
            self._tables[seq_id] = held.mapped(targets)
            self.gpu_pool.share(self._tables[seq_id].blocks())
        self.gpu_pool.release(list(targets.values()))  # the first reference has no owner
        return [block for pair in targets.items() for block in pair]

    def free_swapped(self, seq_id: int) -> None:
        """Release a swapped-out sequence's blocks."""
        self.host.free(seq_id)

    def end_plan(self, *, has_rows: bool) -> list[int]:
        """Complete the plan under construction; returns the (device block, host block) pairs that
        it must swap out in addition, to keep evicted blocks, and those that will be evicted next.
        """
        self.gpu_pool.release(self._pinned)
        self._pinned = []
        self._copy_ahead.end_plan(has_rows=has_rows)
        return self.host.end_plan()

    def maps(self, owners: Sequence[tuple[int, int]]) -> tuple[BlockMap, BlockMap]:
        """Owners of the device's and the host's blocks; `owners`: (sequence id, number of its
        request)."""
        device_map = map_blocks(self.gpu_pool, _flat(self._tables), owners)
        return device_map, map_blocks(self.host.pool, _flat(self.host.tables), owners)

    def host_table(self, seq_id: int) -> list[int]:
        """A swapped-out sequence's blocks on the host, in order."""
        return list(self.host.tables[seq_id].blocks())

    def check(self) -> None:
        """Assert the invariants, between plans."""
        self.host.check()
        assert not self._pinned
        assert not self._tables.keys() & self.host.tables.keys(), "a table is in both places"
        counts = Counter(block for held in self._tables.values() for block in held.blocks())
        self.gpu_pool.check(dict(counts))
        for seq_id, held in self._tables.items():
            blocks = held.blocks()
            assert len(blocks) == len(set(blocks)), f"a block is twice in {seq_id}'s tables"
        assert self.num_reserved == sum(held.num_reserved for held in self._tables.values())
        assert 0 <= self.num_reserved <= self.gpu_pool.num_free_blocks

    def _contents_of(self, seq_ids: Sequence[int]) -> dict[int, Contents | None]:
        """The contents of these sequences' distinct blocks."""
        contents_of = self.gpu_pool.cached.contents_of
        return {b: contents_of(b) for seq_id in seq_ids for b in self._tables[seq_id].blocks()}


def _flat(tables: Mapping[int, SequenceTables]) -> dict[int, list[int]]:
    return {seq_id: held.blocks() for seq_id, held in tables.items()}
