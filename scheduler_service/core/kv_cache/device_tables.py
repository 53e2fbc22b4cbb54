"""What the sequences on one worker group's device have: block tables, and what is reserved."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from scheduler_service.core.config import WorkerGroupCapacity
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_demand import BlockDemand
from scheduler_service.core.kv_cache.block_pool import BlockPool, Contents
from scheduler_service.core.kv_cache.block_table import BlockUpdate, SequenceTables
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence, key_tokens
from scheduler_service.core.kv_cache.shared_states import SharedStates
from scheduler_service.core.step_plan import BlockTable


class DeviceTables:
    """Block tables by sequence and cache group over one pool, and their growth token by token.

    A running sequence has tables from its admission on. A group of windows or chunks has blocks of
    the tokens only that rows to come may read. It allocates those of a prompt chunk by chunk, out
    of what is reserved when the sequence is admitted.
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
        self.pool = BlockPool(capacity.num_gpu_blocks, on_evict)
        self.demand = BlockDemand(groups, capacity.max_chunk_tokens)
        self.states = SharedStates(groups, self.pool)
        self.has_states = bool(self.states.groups)
        """Whether the model keeps states, which a row changes for good."""
        self.spans = [number for number, group in enumerate(groups) if group.span]
        """The groups of windows and chunks."""
        self.has_spans = bool(self.spans)
        self.block_tokens = {n: g.block_tokens for n, g in enumerate(groups) if g.has_tokens}
        """By group that holds tokens."""
        reach = {*self.block_tokens.values()}
        if self.has_states:  # which are saved at such positions
            reach.add(key_tokens(reach))
        self._smallest, *self._other_tokens = sorted(reach) or [1]
        self._watermark_blocks = int(watermark * capacity.num_gpu_blocks)
        if len(groups) > 1:  # a sequence may need one of each to write a token
            self._watermark_blocks = max(self._watermark_blocks, len(groups))
        self.held: dict[int, SequenceTables] = {}
        """By sequence id."""

    # Room.

    @property
    def num_free_tokens(self) -> int:
        """Tokens of one sequence that would fit on the device; what is only cached there counts as
        free."""
        if not self.groups:
            return self.num_tokens
        return max(0, self.pool.num_available) * self.num_tokens // self.pool.num_blocks

    def round_up(self, num_tokens: int) -> int:
        """The length up to which a sequence can grow in what holds its `num_tokens` tokens."""
        end = -(-num_tokens // self._smallest) * self._smallest
        for tokens in self._other_tokens:
            end = min(end, -(-num_tokens // tokens) * tokens)
        return end

    def memory_freed(self, sequences: Iterable[CacheableSequence], group: int | None = None) -> int:
        """The memory that comes free with these sequences, for `can_admit`: blocks that only they
        use, those of one group or all."""
        tables = [held for seq in sequences if (held := self.held.get(seq.seq_id))]
        counts = Counter(
            block
            for held in tables
            for block in (held.blocks() if group is None else held.tables[group].blocks)
        )
        return sum(self.pool.num_references(block) == n for block, n in counts.items())

    def are_alone(self, sequences: Iterable[CacheableSequence]) -> bool:
        """Whether all memory in use is that of these sequences: none is another one's, leased, or
        kept for copies of another group's."""
        return self.memory_freed(sequences) + self.pool.num_free_blocks == self.pool.num_blocks

    def num_short(self, num_new: int, num_promised: int) -> int:
        """Number of blocks that must be freed before these can be provided in addition to those
        promised to others; 0 or less if none. Blocks up to the watermark are kept for running
        sequences, if there are any."""
        idle = not self.held and num_promised == 0
        kept = 0 if idle else self._watermark_blocks + num_promised
        return num_new + kept - self.pool.num_available

    def can_provide(self, num_new: int, num_promised: int = 0) -> AllocStatus:
        """Whether there are as many blocks, in addition to those promised to others."""
        if num_new > self.pool.num_blocks:
            return AllocStatus.NEVER
        enough = self.num_short(num_new, num_promised) <= 0
        return AllocStatus.OK if enough else AllocStatus.LATER

    # Running sequences.

    def holds(self, seq: CacheableSequence) -> bool:
        """Whether the sequence has memory on the device."""
        return seq.seq_id in self.held

    def of(self, seq: CacheableSequence) -> list[BlockTable]:
        """The sequence's block tables on the device, for the plan."""
        return [
            BlockTable(group=group, first_index=table.first, block_ids=list(table.blocks))
            for group, table in enumerate(self.held[seq.seq_id].tables)
        ]

    def can_reserve(self, seq: CacheableSequence, length: int, num_others: int = 0) -> bool:
        """Whether the sequence's token number `length` can be made writable, so that `num_others`
        sequences can grow nevertheless."""
        num_kept = self.pool.num_reserved + num_others * self.demand.per_token
        if self.pool.has_free_blocks(self.demand.per_row + num_kept):
            return True
        tables = self.held[seq.seq_id].tables
        num_needed = self.states.num_missing(tables) + sum(
            tables[number].needs_block((length - 1) // tokens, self.pool)
            for number, tokens in self.block_tokens.items()
        )
        return not num_needed or self.pool.has_free_blocks(num_needed + num_kept)

    def reserve(self, seq: CacheableSequence, length: int) -> list[BlockUpdate]:
        """Make the sequence's token number `length` writable, by new blocks at the ends of its
        tables, or copies of shared last blocks and states; returns the changes of its tables."""
        updates: list[BlockUpdate] = []
        tables = self.held[seq.seq_id].tables
        for number, tokens in self.block_tokens.items():
            table, index = tables[number], (length - 1) // tokens
            blocks, offset = table.blocks, index - table.first
            if offset == len(blocks):
                block = self.pool.allocate_one()
                blocks.append(block)
                updates.append((number, index, block, None))
            elif self.pool.is_shared(shared := blocks[offset]):
                blocks[offset] = block = self.pool.allocate_one()
                self.pool.release([shared])
                updates.append((number, index, block, shared))
        return updates + self.states.unshare(tables) if self.has_states else updates

    def can_reserve_all(self, sequences: Iterable[CacheableSequence]) -> bool:
        """Whether all these sequences can write their last tokens."""
        num_blocks = 0
        sharers: Counter[int] = Counter()
        for seq in sequences:
            tables = self.held[seq.seq_id].tables
            for number in self.states.groups:
                sharers.update(tables[number].blocks)
            for number, tokens in self.block_tokens.items():
                table = tables[number]
                offset = (seq.growth.length - 1) // tokens - table.first
                if offset == len(table.blocks):
                    num_blocks += 1
                else:
                    sharers[table.blocks[offset]] += 1
        for block, count in sharers.items():
            # Each but the last to reserve copies the block, unless other sequences share it, too.
            num_blocks += min(count, self.pool.num_references(block) - 1)
        return num_blocks <= self.pool.num_available

    def trim(self, seq: CacheableSequence, num_tokens: int) -> bool:
        """Release what was reserved after the sequence's first `num_tokens` tokens, for drafts;
        returns whether there was any."""
        has_more = False
        for number, tokens in self.block_tokens.items():
            table = self.held[seq.seq_id].tables[number]
            num_blocks = -(-num_tokens // tokens) - table.first
            has_more |= len(table.blocks) > num_blocks
            self.pool.release(table.blocks[num_blocks:])
            del table.blocks[num_blocks:]
        return has_more

    def fork(self, parent: CacheableSequence, child: CacheableSequence) -> None:
        """Make a new sequence share the memory of another one; the first to write copies."""
        assert child.seq_id not in self.held
        held = self.held[child.seq_id] = self.held[parent.seq_id].fork()
        self.pool.share(held.blocks())

    # Prompts.

    def begin(self, seq: CacheableSequence, held: SequenceTables) -> None:
        """Record the tables of a sequence that is admitted, and reserve the rest of its memory."""
        assert seq.seq_id not in self.held
        self.held[seq.seq_id] = held
        self.pool.num_reserved += held.num_reserved + held.num_forks * self.demand.per_fork

    def chunk_end(self, seq: CacheableSequence, start: int, end: int) -> int:
        """Where the chunk of a prompt must end that begins at `start` and may have tokens up to
        `end`: others that were admitted with it get its state and windows where they branch off."""
        return min([end, *(at for at, _ in self.held[seq.seq_id].branches if at > start)])

    def share_spans(self, held: SequenceTables, position: int) -> None:
        """Let others that branch off at a position have what windows and chunks have there. The
        tokens before it are computed or planned, and those after it have no memory yet."""
        for at, seq_id in held.branches:
            if at != position or seq_id not in self.held:
                continue
            for number in self.spans:
                source, table = held.tables[number], self.held[seq_id].tables[number]
                if not table.blocks:  # else they have it, and there was no memory for the rest
                    table.first, table.blocks = source.first, list(source.blocks)
                    self.pool.share(table.blocks)

    def extend(self, held: SequenceTables, end: int) -> list[BlockUpdate] | None:
        """Allocate blocks for a prompt's tokens up to `end`, out of what is reserved; None if
        memory is short."""
        missing = {
            number: max(0, -(-end // tokens) - held.tables[number].end)
            for number, tokens in self.block_tokens.items()
        }
        num_missing = sum(missing.values())
        num_reserved = min(num_missing, held.num_reserved)
        if num_missing - num_reserved > self.pool.num_available:
            return None
        held.num_reserved -= num_reserved
        self.pool.num_reserved -= num_reserved
        return [
            (number, table.append(self.pool.allocate_one()), table.blocks[-1], None)
            for number, table in enumerate(held.tables)
            for _ in range(missing.get(number, 0))
        ]

    def end_prompt(self, seq: CacheableSequence) -> None:
        """Give up what is reserved for a sequence, except for the states of its forks: the rest of
        its prompt is planned."""
        held = self.held[seq.seq_id]
        self.pool.num_reserved -= held.num_reserved
        held.num_reserved, held.is_prompt = 0, False
        self.states.expect(held.tables, held.num_forks)
        held.num_forks = 0

    def remove(self, seq: CacheableSequence) -> SequenceTables:
        """Remove and return a sequence's tables, with the references of their blocks."""
        held = self.held.pop(seq.seq_id)
        self.pool.num_reserved -= held.num_reserved + held.num_forks * self.demand.per_fork
        return held

    def check(self, leased: Counter[int]) -> None:
        """Assert the invariants, between plans; `leased`: further references by block."""
        counts = Counter(block for held in self.held.values() for block in held.blocks()) + leased
        self.pool.check(dict(counts))
        for seq_id, held in self.held.items():
            blocks = held.blocks()
            assert len(blocks) == len(set(blocks)), f"a block is twice in {seq_id}'s tables"
        num_reserved = sum(
            held.num_reserved + held.num_forks * self.demand.per_fork for held in self.held.values()
        )
        assert self.pool.num_reserved == num_reserved + self.states.num_reserved
