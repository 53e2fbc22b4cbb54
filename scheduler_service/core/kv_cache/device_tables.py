"""What the sequences on one worker group's device have: block tables, and what is reserved."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_demand import BlockDemand
from scheduler_service.core.kv_cache.block_pool import BlockPool, Contents
from scheduler_service.core.kv_cache.block_table import BlockUpdate, SequenceTables, Table
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence, key_tokens
from scheduler_service.core.step_plan import BlockTable


class DeviceTables:
    """Block tables by sequence and cache group over one pool, and their growth token by token.

    States are written in place. Forks share one until the next row of each: all but the last get a
    copy, for which blocks are reserved, in the plan after their parent's last prompt tokens.

    What is reserved is free.
    """

    def __init__(
        self,
        capacity: WorkerGroupCapacity,
        watermark: float,
        on_evict: Callable[[Sequence[int], Contents], None],
    ) -> None:
        """`watermark`: share of the blocks that is kept for running sequences; `on_evict`: see
        `BlockPool`."""
        groups = capacity.cache_groups
        self.groups = groups
        self.num_tokens = capacity.num_cache_tokens
        """Tokens of the longest sequence that fits in an empty cache."""
        self.device = BlockPool(capacity.num_gpu_blocks, on_evict)
        self._demand = BlockDemand(groups, capacity.max_chunk_tokens)
        self._state_groups = [number for number, group in enumerate(groups) if group.is_state]
        self.has_states = bool(self._state_groups)
        """Whether the model keeps states, which a row changes for good."""
        self._block_tokens = {n: g.block_tokens for n, g in enumerate(groups) if g.has_tokens}
        """By group that holds tokens."""
        reach = {*self._block_tokens.values()}
        if self._state_groups:  # which are saved at such positions
            reach.add(key_tokens(reach))
        self._smallest, *self._other_tokens = sorted(reach) or [1]
        self._watermark_blocks = int(watermark * capacity.num_gpu_blocks)
        if len(groups) > 1:  # a sequence may need one of each to write a token
            self._watermark_blocks = max(self._watermark_blocks, len(groups))
        self._tables: dict[int, SequenceTables] = {}
        """By sequence id."""
        self._num_reserved = 0
        """Free device blocks that are reserved for prompts and for the states of forks."""
        self._state_copies: dict[int, int] = {}
        """By first block of a state that sequences share: copies for which blocks are reserved."""
        self._copied_states: set[int] = set()
        """First blocks of the states that the plan under construction writes by copying."""

    # Room.

    @property
    def _num_available(self) -> int:
        """Number of free device blocks that are not reserved."""
        return self.device.num_free_blocks - self._num_reserved

    @property
    def num_free_tokens(self) -> int:
        """Tokens of one sequence that would fit on the device; what is only cached there counts as
        free."""
        if not self.groups:
            return self.num_tokens
        return max(0, self._num_available) * self.num_tokens // self.device.num_blocks

    @property
    def free_memory(self) -> int:
        """Memory on the device that no sequence holds or is promised, in the unit of
        `memory_of`."""
        return self._num_available

    def memory_of(self, num_tokens: int, num_source_tokens: int = 0) -> int:
        """Memory that a sequence of as many tokens takes on the device."""
        return self._demand.of(num_tokens, num_source_tokens)

    def round_up(self, num_tokens: int) -> int:
        """The length up to which a sequence can grow in what holds its `num_tokens` tokens."""
        end = -(-num_tokens // self._smallest) * self._smallest
        for tokens in self._other_tokens:
            end = min(end, -(-num_tokens // tokens) * tokens)
        return end

    def memory_freed(self, sequences: Iterable[CacheableSequence], group: int | None = None) -> int:
        """The memory that comes free with these sequences, for `can_admit`: blocks that only they
        use, those of one group or all."""
        tables = [held for seq in sequences if (held := self._tables.get(seq.seq_id))]
        counts = Counter(
            block
            for held in tables
            for block in (held.blocks() if group is None else held.tables[group].blocks)
        )
        return sum(self.device.num_references(block) == n for block, n in counts.items())

    def _num_short(self, num_new: int, num_promised: int = 0) -> int:
        """Number of blocks that must be freed before these can be provided in addition to those
        promised to others; 0 or less if none. Blocks up to the watermark are kept for running
        sequences, if there are any."""
        idle = not self._tables and num_promised == 0
        kept = 0 if idle else self._watermark_blocks + num_promised
        return num_new + kept - self._num_available

    def _can_provide(self, num_new: int, num_promised: int = 0) -> AllocStatus:
        if num_new > self.device.num_blocks:
            return AllocStatus.NEVER
        enough = self._num_short(num_new, num_promised) <= 0
        return AllocStatus.OK if enough else AllocStatus.LATER

    # Running sequences.

    def holds(self, seq: CacheableSequence) -> bool:
        """Whether the sequence has memory on the device."""
        return seq.seq_id in self._tables

    def tables(self, seq: CacheableSequence) -> list[BlockTable]:
        """The sequence's block tables on the device, for the plan."""
        return [
            BlockTable(group=group, first_index=table.first, block_ids=list(table.blocks))
            for group, table in enumerate(self._tables[seq.seq_id].tables)
        ]

    def device_blocks(self, seq: CacheableSequence) -> list[int]:
        """A sequence's blocks on the device, in order."""
        return list(self._tables[seq.seq_id].blocks())

    def can_reserve(self, seq: CacheableSequence, length: int, num_others: int = 0) -> bool:
        """Whether the sequence's token number `length` can be made writable, so that `num_others`
        sequences can grow nevertheless."""
        num_kept = self._num_reserved + num_others * self._demand.per_token
        if self.device.has_free_blocks(self._demand.per_row + num_kept):
            return True
        tables = self._tables[seq.seq_id].tables
        num_needed = sum(
            tables[number].needs_block((length - 1) // tokens, self.device)
            for number, tokens in self._block_tokens.items()
        )
        if self._state_groups and self._shares_state(tables):
            head = tables[self._state_groups[0]].blocks[0]
            num_needed += self._demand.per_fork * (not self._state_copies.get(head))
        return not num_needed or self.device.has_free_blocks(num_needed + num_kept)

    def reserve(self, seq: CacheableSequence, length: int) -> list[BlockUpdate]:
        """Make the sequence's token number `length` writable, by new blocks at the ends of its
        tables, or copies of shared last blocks and states; returns the changes of its tables."""
        updates: list[BlockUpdate] = []
        tables = self._tables[seq.seq_id].tables
        for number, tokens in self._block_tokens.items():
            table, index = tables[number], (length - 1) // tokens
            offset, shared = index - table.first, None
            if offset == len(table.blocks):
                block = self.device.allocate_one()
                table.blocks.append(block)
            elif self.device.is_shared(table.blocks[offset]):
                block = self.device.allocate_one()
                shared, table.blocks[offset] = table.blocks[offset], block
                self.device.release([shared])
            else:
                continue
            updates.append((number, index, block, shared))
        if self._state_groups and self._shares_state(tables):
            updates += self._unshare_state(tables)
        return updates

    def can_reserve_all(self, sequences: Iterable[CacheableSequence]) -> bool:
        """Whether all these sequences can write their last tokens."""
        num_blocks = 0
        sharers: Counter[int] = Counter()
        for seq in sequences:
            tables = self._tables[seq.seq_id].tables
            for number in self._state_groups:
                sharers.update(tables[number].blocks)
            for number, tokens in self._block_tokens.items():
                table = tables[number]
                offset = (seq.length - 1) // tokens - table.first
                if offset == len(table.blocks):
                    num_blocks += 1
                else:
                    sharers[table.blocks[offset]] += 1
        for block, count in sharers.items():
            # Each but the last to reserve copies the block, unless other sequences share it, too.
            num_blocks += min(count, self.device.num_references(block) - 1)
        return num_blocks <= self._num_available

    def trim(self, seq: CacheableSequence, num_tokens: int) -> bool:
        """Release what was reserved after the sequence's first `num_tokens` tokens, for drafts;
        returns whether there was any."""
        has_more = False
        for number, tokens in self._block_tokens.items():
            table = self._tables[seq.seq_id].tables[number]
            num_blocks = -(-num_tokens // tokens) - table.first
            has_more |= len(table.blocks) > num_blocks
            self.device.release(table.blocks[num_blocks:])
            del table.blocks[num_blocks:]
        return has_more

    def fork(self, parent: CacheableSequence, child: CacheableSequence) -> None:
        """Make a new sequence share the memory of another one; the first to write copies."""
        assert child.seq_id not in self._tables
        held = self._tables[child.seq_id] = self._tables[parent.seq_id].fork()
        self.device.share(held.blocks())

    # Prompts.

    def _extend(self, held: SequenceTables, end: int) -> list[BlockUpdate] | None:
        """Allocate blocks for a prompt's tokens up to `end`, out of what is reserved."""
        missing = {
            number: max(0, -(-end // tokens) - held.tables[number].end)
            for number, tokens in self._block_tokens.items()
        }
        num_missing = sum(missing.values())
        num_reserved = min(num_missing, held.num_reserved)
        if num_missing - num_reserved > self._num_available:
            return None
        held.num_reserved -= num_reserved
        self._num_reserved -= num_reserved
        return [
            (number, table.append(self.device.allocate_one()), table.blocks[-1], None)
            for number, table in enumerate(held.tables)
            for _ in range(missing.get(number, 0))
        ]

    def end_prompt(self, seq: CacheableSequence) -> None:
        """Give up what is reserved for a sequence, except for the states of its forks: the rest of
        its prompt is planned."""
        held = self._tables[seq.seq_id]
        self._num_reserved -= held.num_reserved
        held.num_reserved, held.is_prompt = 0, False
        if held.num_forks and self.has_states:
            self._state_copies[held.tables[self._state_groups[0]].blocks[0]] = held.num_forks
        held.num_forks = 0

    # States that sequences share.

    def _shares_state(self, tables: Sequence[Table]) -> bool:
        return self.device.is_shared(tables[self._state_groups[0]].blocks[0])

    def _unshare_state(self, tables: Sequence[Table]) -> list[BlockUpdate]:
        """Give a sequence a copy of the state that it shares."""
        head = tables[self._state_groups[0]].blocks[0]
        if self._state_copies.get(head):
            self._state_copies[head] -= 1
            self._num_reserved -= self._demand.per_fork
        updates: list[BlockUpdate] = []
        for number in self._state_groups:
            shared = tables[number].blocks
            tables[number].blocks = self.device.allocate(len(shared))
            pairs = enumerate(zip(tables[number].blocks, shared, strict=True))
            updates += [(number, index, block, source) for index, (block, source) in pairs]
            self._copied_states.add(tables[number].blocks[0])
            self.device.release(shared)
        return updates

    def _settle_state_copies(self) -> None:
        """Give up what is reserved for copies of states that no longer have as many owners."""
        for head, count in list(self._state_copies.items()):
            num_needed = max(0, min(count, self.device.num_references(head) - 1))
            self._num_reserved -= (count - num_needed) * self._demand.per_fork
            self._state_copies[head] = num_needed
            if not num_needed:
                del self._state_copies[head]
