"""The KV cache of one worker group, as the rest of the core sees it: in tokens and sequences.

Memory is allocated in blocks, which only this folder and the plan's columns name. Lists of ints
that a method returns are in the plan's format: pairs of blocks, unless stated otherwise.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import lcm

from scheduler_service.core.config import KeptBlocks, SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_pool import BlockKey, BlockMap, Contents, map_blocks
from scheduler_service.core.kv_cache.block_table import BlockUpdate, Moves, SequenceTables, Table
from scheduler_service.core.kv_cache.device_tables import DeviceTables
from scheduler_service.core.kv_cache.exchange import CachedEntry, CacheExchange
from scheduler_service.core.kv_cache.host_cache import CopyAhead, HostCache
from scheduler_service.core.kv_cache.kept_sequences import adopt_sequences
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_hit import GroupHit, JointStart, PrefixHit, S, no_hit
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence, key_tokens
from scheduler_service.core.kv_cache.records import CacheRecords
from scheduler_service.core.kv_cache.released_blocks import ReleasedBlocks
from scheduler_service.core.kv_cache.saved_states import SavedStates
from scheduler_service.core.kv_cache.usage import CacheGroupUsage
from scheduler_service.core.step_plan import StepPlan

OFFERED_TOKENS = 64
"""Decoded tokens that are offered to the prefix cache together. The last ones are offered when
their sequence ends or is preempted, and so are those in windows and chunks: what slides out of them
before is no loss, as it is evicted first."""


class KVCacheManager(DeviceTables):
    """Which tokens of which sequences are in the memory of one worker group, and the room there:
    block tables by sequence and cache group, over one pool of device blocks and one of host blocks.

    A running sequence has tables on the device from its admission on, and a swapped-out one on the
    host. What others may find of its tokens is offered to the prefix cache.

    A group of windows or chunks has blocks of the tokens only that rows to come may read. It
    allocates those of a prompt chunk by chunk, out of what is reserved when the sequence is
    admitted.

    What others may find of states are copies (`saved_states.py`).

    A freed block may be handed out at once, even while a step that uses it is in flight: the
    worker executes plans in order, so the new owner writes to it in a later step, or in the same
    step after it is read. What has a key is computed: nothing in flight writes there.

    An evicted block is copied to the host, if there is room, and can be found there; the plan under
    construction copies it before anything is written to it, unless an earlier plan has copied it
    ahead.

    Invariant: a block's reference count is the number of tables that contain it, each at most once,
    plus one while the plan under construction copies it to a sequence that has found a part of it,
    plus those of `exchange`.
    A sequence has tables on the device or on the host, or none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: WorkerGroupCapacity,
        kept: KeptBlocks | None = None,
    ) -> None:
        """`kept`: what the workers have recorded of earlier caches; None if they record nothing."""
        groups = capacity.cache_groups
        self.tokens_per_unit = key_tokens(g.block_tokens for g in groups if g.has_tokens)
        """Tokens that are found together."""
        self.host = HostCache(capacity.num_cpu_blocks)
        super().__init__(capacity, config.watermark, self.host.keep)
        self._copy_ahead = CopyAhead(self.device, self.host)
        prefixes = self._prefixes = PrefixCache(
            groups,
            self.device.cached,
            self.host.pool.cached,
            unit=self.tokens_per_unit,
            enabled=config.enable_prefix_caching,
            seed=config.key_seed,
        )
        self._states = SavedStates(groups, self.device, prefixes)
        self._released = ReleasedBlocks(groups, self.device, prefixes)
        self.exchange = CacheExchange(groups, self.device, self.host.pool)
        self._growing = [number for number, group in enumerate(groups) if group.is_growing]
        self._spans = [number for number, group in enumerate(groups) if group.span]
        self._num_queried = 0
        """Tokens of the sequences admitted so far, if the prefix cache was searched for them."""
        self._num_found = [0] * len(groups)
        """By group: the first of these tokens that it had."""
        self._copies: list[int] = []
        """What the plan under construction copies between states."""
        self._num_plans = 0
        """The number of the last plan that was completed."""
        self._pinned: list[int] = []
        """References that end with the plan: blocks that it copies to those that found them."""
        self._records = None if kept is None else self._adopt(kept, config)

    def _adopt(self, kept: KeptBlocks, config: SchedulerConfig) -> CacheRecords:
        records = CacheRecords(
            kept,
            self.groups,
            self.device,
            self.host.pool,
            unit=self.tokens_per_unit,
            key_seed=config.key_seed if config.enable_prefix_caching else None,
        )
        if config.enable_prefix_caching:
            adopt_sequences(kept.sequences, self.groups, self.device, self._prefixes)
        return records

    @property
    def num_cached(self) -> int:
        """Blocks on device and host that have keys, in use or free."""
        return self.device.cached.num_blocks + self.host.pool.cached.num_blocks

    def reseed(self, seed: int) -> None:
        """Make all keys with another seed from now on. What is cached is found no more; running
        sequences offer what they have computed again."""
        for pool in (self.device, self.host.pool):
            for block in range(pool.num_blocks):
                pool.forget(block)
        for held in self._tables.values():
            held.num_offered = held.num_offered_in_spans = 0
        self._prefixes.reseed(seed)
        if self._records is not None:
            self._records.reseed(seed)

    # Capacity.

    def shortage(
        self,
        num_tokens: int,
        hit: PrefixHit,
        *,
        num_waiting_tokens: int,
        num_waiting: int,
        num_waiting_source_tokens: int = 0,
        num_forks: int = 0,
    ) -> float:
        """The share of the memory in use that must be freed before a sequence of `num_tokens`
        tokens, and `num_forks` that share them, can be admitted after `num_waiting` groups with
        `num_waiting_tokens` tokens, and these tokens of sources; 0 or less if none."""
        num_promised = self._demand.of_all(
            num_waiting_tokens, num_waiting_source_tokens, num_waiting
        )
        num_new = sum(self._demand.after(num_tokens, hit, self.device.is_used, num_forks=num_forks))
        num_short = self._num_short(num_new, num_promised)
        return num_short / max(1, self.device.num_blocks - self.device.num_free_blocks)

    # Prefixes.

    def match_prefix(
        self, seq: CacheableSequence, *, is_fetched: Callable[[int, int], bool] | None = None
    ) -> PrefixHit:
        """The longest usable prefix of a waiting sequence on the device, or, with what the host
        has, one that `is_fetched` prefers: it gets the number of moves and the number of further
        tokens that need not be computed."""
        hit = self._prefixes.find(seq)
        if is_fetched is None or not self.host.pool.num_blocks:
            return hit
        further = self._prefixes.find(seq, on_host=True)
        num_more = further.num_tokens - hit.num_tokens
        return further if num_more and is_fetched(further.num_moves, num_more) else hit

    def is_to_come(self, seq: CacheableSequence, hit: PrefixHit) -> bool:
        """Whether most of the tokens that a waiting sequence would compute are being computed for
        another one, and will be found soon."""
        return self._prefixes.is_to_come(seq, hit.num_tokens, self._num_offered, self._is_saving)

    def _num_offered(self, seq: CacheableSequence) -> int:
        held = self._tables.get(seq.seq_id)
        return held.num_offered if held else 0

    def _is_saving(self, seq: CacheableSequence, position: int) -> bool:
        held = self._tables.get(seq.seq_id)
        return held is not None and self._states.is_saving(seq, held, position)

    def offer(self, seq: CacheableSequence, num_tokens: int, *, in_spans: bool = True) -> None:
        """Let others find a sequence's first `num_tokens` tokens, which are computed: the results
        are in. If another block has the same contents, they still find that one. A sequence that
        has yet to fork has computed none. `in_spans`: also what windows and chunks have of them."""
        held, end = self._tables.get(seq.seq_id), num_tokens // self.tokens_per_unit
        if held is None or not self._prefixes.is_enabled:
            return
        if end <= (held.num_offered_in_spans if in_spans else held.num_offered):
            return
        keys = self._prefixes.keys(seq, end)
        self._prefixes.record_computed(keys[held.num_offered : end])
        if not held.num_offered:
            self._offer_source(seq, held)
        for number in self._growing:
            self._offer_blocks(held, number, keys, held.num_offered, end)
        held.num_offered = end
        if in_spans:
            for number in self._spans:
                self._offer_blocks(held, number, keys, held.num_offered_in_spans, end)
            held.num_offered_in_spans = end
        if held.unconfirmed:
            self._released.confirm(held, end * self.tokens_per_unit)
        if held.saved:
            self._states.confirm(seq, held)

    def _offer_blocks(
        self, held: SequenceTables, number: int, keys: Sequence[BlockKey], start: int, end: int
    ) -> None:
        """Let others find what a cache group has of the units of keys from `start` to `end`."""
        table, num_units = held.tables[number], self._block_tokens[number] // self.tokens_per_unit
        first = max(start // num_units, table.first)  # others have been released
        starts = range(first * num_units, end, num_units)
        for unit, block in zip(starts, table.blocks[first - table.first :], strict=False):
            units = tuple(keys[unit : min(unit + num_units, end)])
            self.device.cached.add(block, Contents(number, units, len(units) == num_units))

    def offer_all(self, seq: CacheableSequence) -> None:
        """Let others find all that a sequence has computed, also after its last whole unit: its
        memory is about to be released, so nothing is written after it. States are found anyway."""
        end = seq.num_confirmed
        self.offer(seq, end)
        held = self._tables[seq.seq_id]
        is_plain = self._prefixes.is_enabled and not self._state_groups and not held.is_withdrawn
        if end % self.tokens_per_unit and is_plain and seq.length == seq.num_known:
            for block, contents in self._prefixes.last_blocks(seq, held, end):
                self.device.cached.add(block, contents)

    def _offer_source(self, seq: CacheableSequence, held: SequenceTables) -> None:
        for number, keys in self._prefixes.source_keys(seq).items():
            for block, key in zip(held.tables[number].blocks, keys, strict=True):
                self.device.cached.add(block, Contents(number, (key,), is_full=True))

    def confirm_plan(self, plan: int) -> None:
        """Let the states be found that ended sequences have left: a plan's result is in."""
        self._states.confirm_plan(plan)

    def withdraw(self, seq: CacheableSequence) -> set[BlockKey]:
        """Let nobody find any token, on device or host, that a failed sequence may have computed,
        here or elsewhere; returns the keys of these tokens."""
        if (held := self._tables.get(seq.seq_id)) is not None:
            held.is_withdrawn = True
        self._states.withdraw(seq)
        keys = set(self._prefixes.first_keys(seq))
        keys.update(*self._prefixes.source_keys(seq).values())
        for pool in (self.device, self.host.pool):
            for block in pool.cached.blocks_with(keys):
                pool.forget(block)
        return keys

    def add_withdrawal(self, step_id: int) -> None:
        """Let workers know that the sequences of a step's failed rows are withdrawn."""
        if self._records is not None:
            self._records.add_withdrawal(step_id)

    # Other worker groups.

    def find_entries(self, seq: CacheableSequence) -> tuple[int, list[CachedEntry]]:
        """What others may read of a waiting sequence's longest usable prefix, on device and host,
        and its number of tokens."""
        hit = self._prefixes.find(seq, on_host=self.host.pool.num_blocks > 0)
        entries = self.exchange.entries(hit)
        if len(entries) < sum(len(group.blocks) for group in hit.groups) and len(self.groups) == 1:
            return len(entries) * self.groups[0].block_tokens, entries
        return hit.num_tokens if entries else 0, entries

    def num_entries(self, num_tokens: int) -> int:
        """The most entries of the prefix cache that hold as many tokens."""
        return sum(-(-num_tokens // tokens) for tokens in self._block_tokens.values())

    def can_lease(self, entries: Iterable[CachedEntry]) -> bool:
        """Whether these entries can be kept, with what is reserved for sequences."""
        blocks = [block for entry in entries for block in entry.blocks if block >= 0]
        return sum(not self.device.is_used(block) for block in blocks) <= self._num_available

    def can_receive(self, num_blocks: int) -> bool:
        """Whether others' blocks can be copied here; nothing is preempted for them."""
        return self._can_provide(num_blocks) is AllocStatus.OK

    # Admission.

    def max_forks(self, num_tokens: int, num_source_tokens: int) -> int:
        """Most sequences that can fork from one of `num_tokens` tokens, if they are alone."""
        num_blocks = self.device.num_blocks - self._demand.of(num_tokens, num_source_tokens)
        return max(0, num_blocks // max(1, self._demand.per_fork))

    def can_admit(
        self, num_tokens: int, hit: PrefixHit, *, num_forks: int = 0, memory_freed: int = 0
    ) -> AllocStatus:
        """Whether a sequence of `num_tokens` tokens, and `num_forks` that will share them, can be
        admitted once others have freed as much memory. Some stays reserved for running sequences,
        if there are any."""
        if self._demand.of(num_tokens, hit.num_source_tokens, num_forks) > self.device.num_blocks:
            return AllocStatus.NEVER
        num_new = sum(self._demand.after(num_tokens, hit, self.device.is_used, num_forks=num_forks))
        return self._can_provide(num_new, -memory_freed)

    def admit(self, seq: CacheableSequence, hit: PrefixHit, *, num_forks: int = 0) -> Moves:
        """Allocate or reserve memory for all tokens of a sequence, and for the states of
        `num_forks` others; returns the `swap_in` and `copy` of its tokens that were found.
        Followers that share more of its tokens will wait for them."""
        self._count_found(seq, hit)
        self._prefixes.expect(seq, hit.num_tokens)
        moves = Moves()
        numbers = self._demand.after(seq.length, hit, self.device.is_used, num_forks=num_forks)
        taken = self._pin([hit], self._num_available - sum(numbers))
        self._allocate(seq, hit, taken, moves)
        self._tables[seq.seq_id].num_forks = num_forks
        self._num_reserved += num_forks * self._demand.per_fork
        if hit.num_moves:  # what is fetched is offered again where it arrives
            self._tables[seq.seq_id].num_offered = 0
            self._tables[seq.seq_id].num_offered_in_spans = 0
        return moves

    def _count_found(self, seq: CacheableSequence, hit: PrefixHit) -> None:
        if self._prefixes.is_enabled:
            self._num_queried += seq.num_known
            found = [hit.num_tokens]
            if len(self.groups) > 1:
                found = self._prefixes.found_by_group(seq, on_host=self.host.pool.num_blocks > 0)
            self._num_found = [sum(pair) for pair in zip(self._num_found, found, strict=True)]

    def start_jointly(
        self, sequences: Iterable[S], num_common_tokens: Callable[[S, S], int]
    ) -> list[JointStart[S]]:
        """Where the first tokens of sequences come from that are admitted together: the device, or
        a sequence before it that will compute more of them. `num_common_tokens`: in how many first
        tokens two sequences are equal; the last token of a sequence is not shared."""
        unit = lcm(self.tokens_per_unit, *self._block_tokens.values())
        starts: list[JointStart[S]] = []
        for seq in sequences:
            hit = self._prefixes.find(seq, multiple=unit)
            limit = seq.num_known - 1
            commons = [
                (min(limit, num_common_tokens(seq, start.seq)) // unit * unit, start)
                for start in starts
            ]
            shared = [(n, s.seq) for n, s in commons if self._may_share(n, s)]
            num_tokens, source = max(shared, key=lambda pair: pair[0], default=(0, None))
            if num_tokens > hit.num_tokens:
                none = no_hit(len(self.groups), hit.num_source_tokens)
                starts.append(JointStart(seq, none, source, num_tokens))
            else:
                starts.append(JointStart(seq, hit, None, hit.num_tokens))
        return starts

    def _may_share(self, num_tokens: int, start: JointStart[S]) -> bool:
        """Whether the first tokens of a sequence can be shared with another one that is admitted
        together with it. A state can be copied only where the sequence computes it, and of windows
        and chunks it has what is read after the tokens that were found, and nothing before that."""
        if self.has_states:
            return num_tokens > start.num_tokens
        return not self._spans or num_tokens >= start.num_tokens

    def can_admit_jointly(
        self, starts: Sequence[JointStart[S]], num_sequences: int = 0
    ) -> AllocStatus:
        """Whether all these sequences can be admitted. There will be up to `num_sequences`."""
        if num_sequences * self._demand.per_fork > self.device.num_blocks:
            return AllocStatus.NEVER
        return self._can_provide(self._num_new_jointly(starts))

    def _num_new_jointly(self, starts: Sequence[JointStart[S]]) -> int:
        """Number of blocks that must be free to admit all these sequences."""
        shared = {block for start in starts for block in start.hit.shared}
        num_blocks = sum(not self.device.is_used(block) for block in shared)
        for start in starts:
            hit = start.hit
            if start.source is not None:
                hit = self._demand.hit_of(start.num_tokens, hit.num_source_tokens)
            upfront = _num_upfront(start.seq, starts)
            length = start.seq.length
            num_blocks += sum(self._demand.after(length, hit, lambda _: True, num_upfront=upfront))
        return num_blocks

    def admit_jointly(self, starts: Sequence[JointStart[S]]) -> Moves:
        """Allocate memory for all these sequences, without reusing for one what was found for
        another; returns the `copy` of states that were found."""
        moves = Moves()
        num_spare = self._num_available - self._num_new_jointly(starts)
        found = list({block for start in starts for block in start.hit.shared})
        self.device.share(found)
        taken = self._pin([start.hit for start in starts], num_spare)
        for start in starts:
            hit = start.hit
            self._count_found(start.seq, hit)
            if start.source is not None:
                hit = self._hit_in(start.source, start.num_tokens, hit.num_source_tokens)
            self._allocate(start.seq, hit, taken, moves, _num_upfront(start.seq, starts))
            if start.source is not None and self._state_groups:
                branch = start.num_tokens, start.seq.seq_id
                self._tables[start.source.seq_id].branches.append(branch)
        self.device.release(found)
        return moves

    def _hit_in(self, seq: CacheableSequence, num_tokens: int, num_source_tokens: int) -> PrefixHit:
        """The first tokens of a sequence, which fill blocks in every group, to share them with
        another one. They may still have to be computed."""
        hits, tables = [], self._tables[seq.seq_id].tables
        shape = self._demand.hit_of(num_tokens, num_source_tokens)
        for table, hit in zip(tables, shape.groups, strict=True):
            first = hit.first - table.first if hit.blocks else 0
            assert first >= 0
            hits.append(GroupHit(hit.first, table.blocks[first : first + len(hit.blocks)]))
        return PrefixHit(num_tokens, hits, num_source_tokens)

    def _allocate(
        self,
        seq: CacheableSequence,
        hit: PrefixHit,
        taken: set[int],
        moves: Moves,
        num_upfront: int = 0,
    ) -> None:
        """Allocate blocks for a sequence, the first tokens of which were found; those of windows
        and chunks are only reserved, but for the first `num_upfront` tokens. What was found on the
        host is swapped in. `taken`: see `_pin`."""
        assert seq.seq_id not in self._tables
        pool = self.device
        numbers = self._demand.after(seq.length, hit, pool.is_used, num_upfront=num_upfront)
        used = set(filter(pool.is_used, hit.shared))
        self.host.fetch(hit.host_blocks)
        pool.share(hit.shared)  # before others are evicted
        num_units = hit.num_tokens // self.tokens_per_unit
        held = SequenceTables([], num_offered=num_units, num_offered_in_spans=num_units)
        held.boundaries = self._prefixes.boundaries(seq)
        held.is_prompt = True
        for group, found, number in zip(self.groups, hit.groups, numbers, strict=True):
            table = Table(found.first, self._begin(found, taken, moves))
            held.tables.append(table)
            if not group.has_tokens:
                end = group.max_blocks(0, 0, hit.num_source_tokens)
                table.blocks += pool.allocate(end - len(table.blocks))
                continue
            end = -(-(num_upfront if group.span else seq.length) // group.block_tokens)
            table.blocks += pool.allocate(max(0, end - table.end))
            if group.span:
                num_held = sum(block not in used for block in table.blocks)
                held.num_reserved += max(0, number - num_held)
        self._states.begin(held, hit)
        self._tables[seq.seq_id] = held
        self._num_reserved += held.num_reserved

    def _pin(self, hits: Iterable[PrefixHit], num_spare: int) -> set[int]:
        """Keep what the plan under construction copies. If memory is short, blocks that nobody uses
        are not copied: returns those that lose their contents to the first sequence that found
        them."""
        taken: set[int] = set()
        for copied in filter(None, (group.copied for hit in hits for group in hit.groups)):
            num_unused = sum(not self.device.is_used(block) for block in copied)
            self.device.share(copied)
            if num_spare < num_unused == len(copied):
                self.device.cached.discard(copied[0])
                taken.update(copied)
            else:
                num_spare -= num_unused
                self._pinned += copied
        return taken

    def _begin(self, found: GroupHit, taken: set[int], moves: Moves) -> list[int]:
        """The first blocks of a table: found ones, or new ones to which they are moved."""
        blocks = [*found.blocks]
        for offset, block in enumerate(found.blocks):
            if block in taken:
                taken.remove(block)
                continue
            if block >= 0 and offset < len(found.full):
                continue
            blocks[offset] = self.device.allocate_one()
            if block >= 0:
                moves.copy.extend((block, blocks[offset]))
            else:
                moves.swap_in.extend((~block, blocks[offset]))
        return blocks

    def extend_prompt(
        self, seq: CacheableSequence, start: int, end: int
    ) -> list[BlockUpdate] | None:
        """Make the tokens of a prompt from `start` to `end`, which are computed next, writable, out
        of what is reserved for it; returns the changes of its tables that this takes. None if
        memory is short now, because blocks that it has released are used by others, which found
        them."""
        held = self._tables[seq.seq_id]
        updates: list[BlockUpdate] | None = []
        if self._spans:
            self._slide(seq, held, start)
            updates = self._extend(held, end)
        if self._state_groups and updates is not None:
            self._pass_on_state(held, start)
            self._states.pass_by(seq, held, start, end)
        return updates

    def chunk_end(self, seq: CacheableSequence, start: int, end: int) -> int:
        """Where the chunk of a prompt must end that begins at `start` and may have tokens up to
        `end`: its state is copied where others that were admitted with it branch off."""
        if not self._state_groups:
            return end
        return min([end, *(at for at, _ in self._tables[seq.seq_id].branches if at > start)])

    def _pass_on_state(self, held: SequenceTables, position: int) -> None:
        """Copy a prompt's state at a position to those that branch off there."""
        for at, seq_id in held.branches:
            if at == position and (other := self._tables.get(seq_id)) is not None:
                for number in self._state_groups:
                    targets = other.tables[number].blocks
                    self._copied_states.add(targets[0])
                    pairs = zip(held.tables[number].blocks, targets, strict=True)
                    self._copies += (block for pair in pairs for block in pair)

    # Decoding.

    def advance(self, seq: CacheableSequence) -> list[BlockUpdate] | None:
        """Release what no row to come of a decoding sequence reads, and make its last token
        writable; returns the changes of its tables, or None if memory is short. Now and then its
        tokens are offered, and its state is saved.

        It is called when a sequence has outgrown its memory, in few of its steps: whatever is to be
        done for decoding sequences is done here, so that their other steps cost nothing."""
        held = self._tables[seq.seq_id]
        if self._spans:
            self._released.slide(seq, held, seq.next_position)
        length = seq.length
        if not self.can_reserve(seq, length):
            return None
        updates = self.reserve(seq, length)
        min_offered = held.num_offered * self.tokens_per_unit + OFFERED_TOKENS
        if held.saved and not held.saved[-1].is_found:
            min_offered = held.saved[-1].position
        if length > min_offered and seq.num_confirmed >= min_offered:
            self.offer(seq, seq.num_confirmed, in_spans=self.has_states)
        if self._state_groups:
            self._states.roll(seq, held)
        return updates

    def release_unread(self, seq: CacheableSequence) -> None:
        """Release what no row to come of a decoding sequence will read."""
        if self._spans:
            self._slide(seq, self._tables[seq.seq_id], seq.next_position)

    def _slide(self, seq: CacheableSequence, held: SequenceTables, position: int) -> None:
        num_freed = self._released.slide(seq, held, position)
        if held.is_prompt:
            held.num_reserved += num_freed
            self._num_reserved += num_freed

    def free(self, seq: CacheableSequence) -> None:
        """Release a sequence's memory. Offered tokens can be found until it is reused, the least
        recently used first, and a sequence's last block before its first."""
        if self._state_groups:
            self._states.end(seq, self._tables[seq.seq_id], self._num_plans)
        self._released.release(self._remove(seq))
        self._settle_state_copies()

    def _remove(self, seq: CacheableSequence) -> SequenceTables:
        """Remove and return a sequence's tables, with the references of their blocks."""
        held = self._tables[seq.seq_id]
        self._num_reserved -= held.num_forks * self._demand.per_fork
        held.num_forks = 0
        self.end_prompt(seq)
        self._prefixes.forget(seq)
        del self._tables[seq.seq_id]
        self._released.forget_unconfirmed(held)
        return held

    # Swapping: a block that several of the sequences share is moved once.

    def num_moves(self, sequences: Iterable[CacheableSequence]) -> int:
        """Number of moves to swap these sequences out and in again."""
        contents = self._contents_of(sequences)
        return self.host.num_missing(contents.values()) + len(contents)

    def num_tokens_to_recompute(self, sequences: Sequence[CacheableSequence]) -> int:
        """Tokens that must be computed again if these sequences are freed: with the prefix cache,
        those that no other sequence has, each once."""
        if not self._prefixes.is_enabled or not self._growing:
            return sum(seq.length for seq in sequences)
        growing = self._growing[0]
        return self.memory_freed(sequences, growing) * self._block_tokens[growing]

    def can_swap_out(self, sequences: Iterable[CacheableSequence]) -> bool:
        """Whether the host has room for these sequences, if its cached blocks are evicted. False
        without cache groups: nothing of a sequence could be moved."""
        if not self.groups:
            return False
        contents = self._contents_of(sequences)
        return self.host.num_needed(contents.values()) <= self.host.pool.num_free_blocks

    def swap_out(self, sequences: Sequence[CacheableSequence]) -> list[int]:
        """Move these sequences' blocks to the host, except those of which it has copies; returns
        the plan's `swap_out`.

        The device blocks are free at once: the worker reads them before it does anything else.
        """
        contents = self._contents_of(sequences)
        tables = {seq.seq_id: self._remove(seq) for seq in sequences}
        targets = self.host.put(tables, contents)
        for held in tables.values():
            self._released.release(held)
        self._settle_state_copies()
        return [block for pair in targets.items() for block in pair]

    def can_swap_in(self, sequences: Sequence[CacheableSequence]) -> bool:
        """Whether there is room on the device for these swapped-out sequences, and to grow unless
        they are alone."""
        num_blocks = self.host.num_blocks_of(_ids(sequences))
        grow = len(sequences) * self._demand.per_token
        kept = self._watermark_blocks + grow if self._tables else 0
        return self._num_available - num_blocks >= kept

    def swap_in(self, sequences: Sequence[CacheableSequence]) -> list[int]:
        """Move these sequences to the device; returns the plan's `swap_in`. The host blocks are
        free once the plan is complete; those with keys stay cached."""
        tables = self.host.take(_ids(sequences))
        sources = list(dict.fromkeys(block for held in tables.values() for block in held.blocks()))
        targets = dict(zip(sources, self.device.allocate(len(sources)), strict=True))
        for seq_id, held in tables.items():
            self._tables[seq_id] = held.mapped(targets)
            self.device.share(self._tables[seq_id].blocks())
        self.device.release(list(targets.values()))  # the first reference has no owner
        return [block for pair in targets.items() for block in pair]

    def free_swapped(self, seq: CacheableSequence) -> None:
        """Release a swapped-out sequence's memory."""
        self.host.free(seq.seq_id)

    def _contents_of(self, sequences: Iterable[CacheableSequence]) -> dict[int, Contents | None]:
        """The contents of these sequences' distinct blocks."""
        contents_of = self.device.cached.contents_of
        tables = (self._tables[seq.seq_id] for seq in sequences)
        return {block: contents_of(block) for held in tables for block in held.blocks()}

    # Plans and status.

    def end_plan(self, plan: int = 0, *, has_rows: bool) -> Moves:
        """Complete the plan under construction, of this number; returns what it must move in
        addition: `swap_out`, so that the host keeps what is evicted from the device now, and what
        will be evicted next; and the `copy` and `saved_states` of states."""
        self._num_plans = plan
        copies, self._copies = self._copies, []
        rolling: list[int] = []
        saved: list[int] = []
        if self._state_groups:
            self._settle_state_copies()
            rolling, saved = self._states.save_due(self._num_available, self._copied_states)
            self._copied_states.clear()
        self.device.release(self._pinned)
        self._pinned = []
        self._copy_ahead.end_plan(has_rows=has_rows)
        self.device.release(rolling[1::2] + saved[3::4])
        return Moves(swap_out=self.host.end_plan(), copy=copies + rolling, saved_states=saved)

    def add_records(self, plan: StepPlan) -> None:
        """Add to a complete plan what has changed in the prefix cache, for workers to record."""
        if self._records is not None:
            self._records.add_to(plan)

    @property
    def num_free_blocks(self) -> tuple[int, int]:
        """For status pages: blocks not in use on the device, those with cached contents included,
        and blocks that no sequence uses on the host."""
        return self.device.num_free_blocks, self.host.pool.num_free_blocks

    def usage(self) -> list[CacheGroupUsage]:
        """For status pages: what each cache group has and has found."""
        cached, on_host = self.device.cached.num_entries, self.host.pool.cached.num_entries
        num_used = self._num_used()
        return [
            CacheGroupUsage(
                lifetime=f"{group.lifetime} {group.span}" if group.span else group.lifetime.value,
                block_tokens=group.block_tokens,
                num_state_blocks=group.num_blocks,
                num_used_blocks=num_used[number],
                num_cached=cached[number],
                num_host_cached=on_host[number],
                num_queried_tokens=self._num_queried,
                num_found_tokens=self._num_found[number],
            )
            for number, group in enumerate(self.groups)
        ]

    def _num_used(self) -> list[int]:
        """Device blocks in use by cache group. All that are not in the tables of other groups are
        counted as the first growing group's, whose tables are too long to be searched."""
        growing = next(iter(self._growing), None)
        used = [
            0
            if n == growing
            else len(set().union(*(h.tables[n].blocks for h in self._tables.values())))
            for n in range(len(self.groups))
        ]
        if growing is not None:
            used[growing] = self.device.num_blocks - self.device.num_free_blocks - sum(used)
        return used

    def maps(self, owners: Sequence[tuple[int, int]]) -> tuple[BlockMap, BlockMap]:
        """Owners of the device's and the host's blocks; `owners`: (sequence id, number of its
        request)."""
        device_map = map_blocks(self.device, self._tables, owners)
        return device_map, map_blocks(self.host.pool, self.host.tables, owners)

    def host_blocks(self, seq: CacheableSequence) -> list[int]:
        """A swapped-out sequence's blocks on the host, in order."""
        return list(self.host.tables[seq.seq_id].blocks())

    def check(self, running: Iterable[CacheableSequence]) -> None:
        """Assert the invariants, between plans; `running`: the sequences with memory on the
        device."""
        assert self._tables.keys() == set(_ids(running)), "one table for each"
        self.host.check(self.exchange.references(on_host=True))
        assert not self._pinned
        assert not self._tables.keys() & self.host.tables.keys(), "a table is in both places"
        counts = Counter(block for held in self._tables.values() for block in held.blocks())
        counts += self.exchange.references(on_host=False)
        self.device.check(dict(counts))
        for seq_id, held in self._tables.items():
            blocks = held.blocks()
            assert len(blocks) == len(set(blocks)), f"a block is twice in {seq_id}'s tables"
        num_states = sum(self._state_copies.values())
        num_states += sum(held.num_forks for held in self._tables.values())
        num_reserved = sum(held.num_reserved for held in self._tables.values())
        assert self._num_reserved == num_reserved + num_states * self._demand.per_fork
        assert 0 <= self._num_reserved <= self.device.num_free_blocks


def _num_upfront(seq: S, starts: Sequence[JointStart[S]]) -> int:
    """Tokens that others share with a sequence before they are computed."""
    return max((start.num_tokens for start in starts if start.source is seq), default=0)


def _ids(sequences: Iterable[CacheableSequence]) -> list[int]:
    return [seq.seq_id for seq in sequences]
