"""Memory for sequences that enter the batch: whether there is enough, and its allocation."""

from collections.abc import Callable, Iterable, Sequence
from math import lcm

from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.block_table import Moves, SequenceTables, Table
from scheduler_service.core.kv_cache.device_tables import DeviceTables
from scheduler_service.core.kv_cache.host_cache import HostCache
from scheduler_service.core.kv_cache.prefix_branches import PrefixBranches
from scheduler_service.core.kv_cache.prefix_cache import PrefixCache
from scheduler_service.core.kv_cache.prefix_hit import GroupHit, JointStart, PrefixHit, S, no_hit
from scheduler_service.core.kv_cache.prefix_keys import CacheableSequence
from scheduler_service.core.kv_cache.saved_states import SavedStates


class Admission:
    """Allocates memory for the tokens of sequences that the prefix cache has not.

    Invariant: a device block has a reference more while the plan under construction copies it to a
    sequence that has found a part of it.
    """

    def __init__(
        self,
        tables: DeviceTables,
        host: HostCache,
        cache: PrefixCache,
        branches: PrefixBranches,
        states: SavedStates,
    ) -> None:
        self._tables, self._host, self._states = tables, host, states
        self._cache, self._branches = cache, branches
        self._device = tables.pool
        self._demand = tables.demand
        self._pinned: list[int] = []
        """References that end with the plan: blocks that it copies to those that found them."""
        self.num_queried = 0
        """Tokens of the sequences admitted so far, if the prefix cache was searched for them."""
        self.num_found = [0] * len(tables.groups)
        """By group: the first of these tokens that it had."""

    def end_plan(self) -> None:
        """Let go of what the plan under construction copies."""
        self._device.release(self._pinned)
        self._pinned = []

    # One sequence.

    def max_forks(self, num_tokens: int, num_source_tokens: int) -> int:
        """Most sequences that can fork from one of `num_tokens` tokens, if they are alone."""
        num_blocks = self._device.num_blocks - self._demand.of(num_tokens, num_source_tokens)
        return max(0, num_blocks // max(1, self._demand.per_fork))

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
        num_new = self._num_new(num_tokens, hit, num_forks)
        num_short = self._tables.num_short(num_new, num_promised)
        return num_short / max(1, self._device.num_blocks - self._device.num_free_blocks)

    def can_admit(
        self, num_tokens: int, hit: PrefixHit, *, num_forks: int = 0, memory_freed: int = 0
    ) -> AllocStatus:
        """Whether a sequence of `num_tokens` tokens, and `num_forks` that will share them, can be
        admitted once others have freed as much memory. Some stays reserved for running sequences,
        if there are any."""
        if self._demand.of(num_tokens, hit.num_source_tokens, num_forks) > self._device.num_blocks:
            return AllocStatus.NEVER
        return self._tables.can_provide(self._num_new(num_tokens, hit, num_forks), -memory_freed)

    def _num_new(self, num_tokens: int, hit: PrefixHit, num_forks: int) -> int:
        """Number of blocks that must be free to admit a sequence and its forks."""
        return sum(self._demand.after(num_tokens, hit, self._device.is_used, num_forks=num_forks))

    def admit(self, seq: CacheableSequence, hit: PrefixHit, *, num_forks: int = 0) -> Moves:
        """Allocate or reserve memory for all tokens of a sequence, and for the states of
        `num_forks` others; returns the `swap_in` and `copy` of its tokens that were found.
        Followers that share more of its tokens will wait for them."""
        self._count_found(seq, hit)
        self._branches.expect(seq, hit.num_tokens)
        num_new = self._num_new(seq.growth.length, hit, num_forks)
        taken = self._pin([hit], self._device.num_available - num_new)
        moves = Moves()
        held = self._allocate(seq, hit, taken, moves)
        held.num_forks = num_forks
        if hit.num_moves:  # what is fetched is offered again where it arrives
            held.num_offered = held.num_offered_in_spans = 0
        self._tables.begin(seq, held)
        return moves

    # Several that are admitted together.

    def start_jointly(
        self, sequences: Iterable[S], num_common_tokens: Callable[[S, S], int]
    ) -> list[JointStart[S]]:
        """Where the first tokens of sequences come from that are admitted together: the device, or
        a sequence before it that will compute more of them. `num_common_tokens`: in how many first
        tokens two sequences are equal; the last token of a sequence is not shared."""
        unit = lcm(self._cache.unit, *self._tables.block_tokens.values())
        starts: list[JointStart[S]] = []
        for seq in sequences:
            hit = self._cache.find(seq, multiple=unit)
            limit = seq.num_known - 1
            commons = [
                (min(limit, num_common_tokens(seq, start.seq)) // unit * unit, start)
                for start in starts
            ]
            shared = [(n, s.seq) for n, s in commons if self._may_share(n, s)]
            num_tokens, source = max(shared, key=lambda pair: pair[0], default=(0, None))
            if num_tokens > hit.num_tokens:
                none = no_hit(len(self._tables.groups), hit.num_source_tokens)
                starts.append(JointStart(seq, none, source, num_tokens))
            else:
                starts.append(JointStart(seq, hit, None, hit.num_tokens))
        return starts

    def _may_share(self, num_tokens: int, start: JointStart[S]) -> bool:
        """Whether the first tokens of a sequence can be shared with another one that is admitted
        together with it. A state can be copied only where the sequence computes it, and of windows
        and chunks it has what is read after the tokens that were found, and nothing before that."""
        if self._tables.has_states:
            return num_tokens > start.num_tokens
        return not self._tables.has_spans or num_tokens >= start.num_tokens

    def can_admit_jointly(
        self, starts: Sequence[JointStart[S]], num_sequences: int = 0
    ) -> AllocStatus:
        """Whether all these sequences can be admitted. There will be up to `num_sequences`."""
        if num_sequences * self._demand.per_fork > self._device.num_blocks:
            return AllocStatus.NEVER
        return self._tables.can_provide(self._num_new_jointly(starts))

    def _num_new_jointly(self, starts: Sequence[JointStart[S]]) -> int:
        """Number of blocks that must be free to admit all these sequences."""
        shared = {block for start in starts for block in start.hit.shared}
        num_blocks = sum(not self._device.is_used(block) for block in shared)
        for start in starts:
            hit = start.hit
            if start.source is not None:
                hit = self._demand.hit_of(start.num_tokens, hit.num_source_tokens)
            branches = _branches(start.seq, starts)
            length = start.seq.growth.length
            num_blocks += sum(self._demand.after(length, hit, lambda _: True, branches=branches))
        return num_blocks

    def admit_jointly(self, starts: Sequence[JointStart[S]]) -> Moves:
        """Allocate memory for all these sequences, without reusing for one what was found for
        another; returns the `copy` of states that were found."""
        moves = Moves()
        num_spare = self._device.num_available - self._num_new_jointly(starts)
        found = list({block for start in starts for block in start.hit.shared})
        self._device.share(found)
        taken = self._pin([start.hit for start in starts], num_spare)
        for start in starts:
            hit = start.hit
            self._count_found(start.seq, hit)
            if start.source is not None:
                hit = self._hit_in(start.source, start.num_tokens, hit.num_source_tokens)
            held = self._allocate(start.seq, hit, taken, moves, _branches(start.seq, starts))
            self._tables.begin(start.seq, held)
            if start.source is not None and (self._tables.has_states or self._tables.has_spans):
                branch = start.num_tokens, start.seq.seq_id
                self._tables.held[start.source.seq_id].branches.append(branch)
        self._device.release(found)
        return moves

    def _hit_in(self, seq: CacheableSequence, num_tokens: int, num_source_tokens: int) -> PrefixHit:
        """The first tokens of a sequence, which fill blocks in every group, to share them with
        another one. They may still have to be computed: what windows and chunks have of them is
        shared then."""
        hits, tables = [], self._tables.held[seq.seq_id].tables
        shape = self._demand.hit_of(num_tokens, num_source_tokens)
        for group, table, hit in zip(self._tables.groups, tables, shape.groups, strict=True):
            if group.span:
                hits.append(GroupHit(num_tokens // group.block_tokens))
                continue
            first = hit.first - table.first if hit.blocks else 0
            assert first >= 0
            hits.append(GroupHit(hit.first, table.blocks[first : first + len(hit.blocks)]))
        return PrefixHit(num_tokens, hits, num_source_tokens)

    # Allocation.

    def _count_found(self, seq: CacheableSequence, hit: PrefixHit) -> None:
        if self._cache.is_enabled:
            self.num_queried += seq.num_known
            found = [hit.num_tokens]
            if len(self._tables.groups) > 1:
                found = self._cache.found_by_group(seq)
            self.num_found = [sum(pair) for pair in zip(self.num_found, found, strict=True)]

    def _allocate(
        self,
        seq: CacheableSequence,
        hit: PrefixHit,
        taken: set[int],
        moves: Moves,
        branches: Sequence[int] = (),
    ) -> SequenceTables:
        """Allocate blocks for a sequence, the first tokens of which were found; those of windows
        and chunks are only to be reserved. What was found on the host is swapped in. `taken`: see
        `_pin`; `branches`: where others go on from it."""
        pool = self._device
        numbers = self._demand.after(seq.growth.length, hit, pool.is_used, branches=branches)
        used = set(filter(pool.is_used, hit.shared))
        self._host.fetch(hit.host_blocks)
        pool.share(hit.shared)  # before others are evicted
        num_units = hit.num_tokens // self._cache.unit
        held = SequenceTables([], num_offered=num_units, num_offered_in_spans=num_units)
        held.boundaries = self._branches.boundaries(seq)
        held.is_prompt = True
        for group, found, number in zip(self._tables.groups, hit.groups, numbers, strict=True):
            table = Table(found.first, self._begin(found, taken, moves))
            held.tables.append(table)
            if not group.has_tokens:
                end = group.max_blocks(0, 0, hit.num_source_tokens)
                table.blocks += pool.allocate(end - len(table.blocks))
                continue
            if group.span:
                num_held = sum(block not in used for block in table.blocks)
                held.num_reserved += max(0, number - num_held)
            else:
                end = -(-seq.growth.length // group.block_tokens)
                table.blocks += pool.allocate(max(0, end - table.end))
        self._states.begin(held, hit)
        return held

    def _pin(self, hits: Iterable[PrefixHit], num_spare: int) -> set[int]:
        """Keep what the plan under construction copies. If memory is short, blocks that nobody uses
        are not copied: returns those that lose their contents to the first sequence that found
        them."""
        taken: set[int] = set()
        for copied in filter(None, (group.copied for hit in hits for group in hit.groups)):
            num_unused = sum(not self._device.is_used(block) for block in copied)
            self._device.share(copied)
            if num_spare < num_unused == len(copied):
                self._device.cached.discard(copied[0])
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
            blocks[offset] = self._device.allocate_one()
            if block >= 0:
                moves.copy.extend((block, blocks[offset]))
            else:
                moves.swap_in.extend((~block, blocks[offset]))
        return blocks


def _branches(seq: S, starts: Sequence[JointStart[S]]) -> list[int]:
    """Where others go on from a sequence: their numbers of tokens that it computes."""
    return [start.num_tokens for start in starts if start.source is seq]
