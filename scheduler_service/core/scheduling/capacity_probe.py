"""Questions of the router about the capacity of a worker group."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import chain

from scheduler_service.core import fitting
from scheduler_service.core.config import SchedulerConfig, WorkerGroupCapacity
from scheduler_service.core.kv_cache.alloc_status import AllocStatus
from scheduler_service.core.kv_cache.prefix_hit import PrefixHit
from scheduler_service.core.policies import Policy
from scheduler_service.core.scheduling.placed_groups import PlacedGroups
from scheduler_service.core.scheduling.preemption import is_fetch_cheaper
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus
from scheduler_service.core.throughput import StepRates

RUNNING = SequenceStatus.RUNNING

NEARLY_FULL = 8
"""A worker group with less than this part of its memory free is nearly full."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityEstimate:
    """The cached tokens and free capacity that a group would find in a worker group."""

    num_tokens_to_compute: int
    """Tokens that are neither on the device nor on the host."""
    num_moves: int
    """Moves from the host to the device that it takes; 0 if computing again is faster."""
    shortage: float
    """The share of the sequences there that must end before the group gets places and memory in
    addition to the groups that already wait there; 0 if it would get them now."""


@dataclass(slots=True, eq=False)
class CapacityProbe:
    """Questions about one worker group. They change nothing but a cached answer."""

    config: SchedulerConfig
    capacity: WorkerGroupCapacity
    placed: PlacedGroups
    running: RunningSet
    rates: StepRates
    policy: Policy
    _failed: tuple[SequenceGroup, int] | None = None
    """The last group to which no other yields, and the running set's changes until then: it asks
    again in every step, and the answer holds while the same sequences run, whatever is free."""

    @property
    def num_sequences(self) -> int:
        """Running and waiting sequences, except for swapped-out ones."""
        return self.running.num_places + self.placed.num_waiting_sequences

    def num_tokens_to_compute(self, seq_group: SequenceGroup) -> int:
        """Tokens of a group that has not run that are not here, on device or host."""
        longest = seq_group.longest
        if not seq_group.strategy.reuses_prefixes:
            return longest.num_known
        hit = self.running.cache.prefixes.match(
            longest, is_fetched=lambda num_moves, num_tokens: True
        )
        return longest.num_known - hit.num_tokens

    @property
    def has_room(self) -> bool:
        """Whether any group may have capacity here now."""
        if self.num_sequences >= self.config.max_num_seqs:  # the usual case under load, first
            return False
        if self.placed.preempting or self.running.swapped:
            return False
        # Beyond that it would only wait here, and could not go elsewhere.
        return self.num_tokens_to_prefill < self.config.max_num_batched_tokens

    def estimate(
        self, seq_group: SequenceGroup, before: Collection[SequenceGroup] = ()
    ) -> CapacityEstimate:
        """The estimate for a group that fits here. `before`: groups of other worker groups that
        come here first."""
        longest, waiting = seq_group.longest, self.placed.waiting
        is_fetched = partial(is_fetch_cheaper, self.rates)
        hit = self.running.cache.prefixes.match(longest, is_fetched=is_fetched)
        memory_shortage = self.running.cache.admission.shortage(
            longest.num_known,
            hit,
            num_waiting_tokens=waiting.num_tokens + sum(g.max_known_tokens for g in before),
            num_waiting_source_tokens=waiting.num_source_tokens
            + sum(g.num_source_tokens for g in before),
            num_waiting=len(waiting) + len(before),
            num_forks=self._num_forks(seq_group),
        )
        num_sequences = self.num_sequences + sum(g.num_unfinished for g in before)
        places_short = num_sequences + seq_group.num_unfinished - self.config.max_num_seqs
        return CapacityEstimate(
            num_tokens_to_compute=longest.num_known - hit.num_tokens,
            num_moves=hit.num_moves,
            shortage=max(0, places_short / max(1, num_sequences), memory_shortage),
        )

    def has_places_for(self, seq_group: SequenceGroup) -> bool:
        """Whether all sequences of a group of another worker group, and its adapter, would have
        places here."""
        num_sequences = self.num_sequences + seq_group.num_unfinished
        return num_sequences <= self.config.max_num_seqs and self._has_slot_for(seq_group)

    def has_room_for(
        self, seq_group: SequenceGroup, before: Collection[SequenceGroup] = ()
    ) -> bool:
        """Whether a group that fits would have capacity here now, if necessary by preemption.
        `before`: groups of other worker groups that come here first; none is preempted for them."""
        if not self._has_slot_for(seq_group, before):
            return False
        has_room = self.has_room and self.estimate(seq_group, before).shortage == 0
        return has_room or (not before and self.can_preempt_for(seq_group))

    def _has_slot_for(self, seq_group: SequenceGroup, before: Iterable[SequenceGroup] = ()) -> bool:
        adapters = {group.adapter for group in before if group.adapter is not None}
        adapter = seq_group.adapter
        return adapter is None or self.placed.adapters.has_room_for(adapter, adapters)

    def can_preempt_for(self, seq_group: SequenceGroup) -> bool:
        """Whether the group would have capacity here now by preempting running or waiting groups.
        False while a group that must start before it waits here: that one is to get the places and
        memory."""
        preempting = self.placed.preempting
        if preempting or seq_group.is_suspect or not fitting.fits(seq_group, self.capacity):
            return False
        waiting = chain(self.placed.waiting, self.running.swapped)
        if any(self.policy.precedes(other, seq_group) for other in waiting):
            return False
        return self.find_victims(seq_group) is not None

    def find_victims(self, seq_group: SequenceGroup) -> list[SequenceGroup] | None:
        """The fewest groups that must be preempted for a waiting group to be admitted, in order.
        None if it takes precedence over no group here, or if there is no room for it even so.

        Groups in lockstep are not preempted: their sequences change in every step, so the memory
        that they would free is unknown.
        """
        question = (seq_group, self.running.num_changes)
        if question == self._failed:
            return None
        yielding = self.policy.yielding(seq_group, self.placed.seq_groups)
        first = next(yielding, None)
        if first is None:
            self._failed = question
            return None
        hit = self.running.cache.prefixes.match(seq_group.longest)
        victims: list[SequenceGroup] = []
        num_places = memory = 0
        for other in chain([first], yielding):
            if self._would_fit(seq_group, hit, num_places, memory):
                return victims
            is_lockstep = other.strategy.is_lockstep
            num_held = sum(map(self.running.places.holds, other.running()))
            if num_held and not is_lockstep and other is not self.placed.suspect:
                victims.append(other)
                num_places += num_held
                memory += self.running.cache.tables.memory_freed(other.running())
        return victims if self._would_fit(seq_group, hit, num_places, memory) else None

    def _would_fit(
        self, seq_group: SequenceGroup, hit: PrefixHit, num_places: int, memory: int
    ) -> bool:
        """Whether the group could be admitted with this many more free places, and as much more
        memory."""
        num_used = self.running.num_places - num_places + len(seq_group.waiting())
        max_tokens = seq_group.max_known_tokens
        verdict = self.running.cache.admission.can_admit(
            max_tokens, hit, num_forks=self._num_forks(seq_group), memory_freed=memory
        )
        return num_used <= self.config.max_num_seqs and verdict is AllocStatus.OK

    def _num_forks(self, seq_group: SequenceGroup) -> int:
        """Sequences that would be admitted to share the group's prompt, at most as many as fit
        with its longest sequence."""
        num_fresh = sum(not seq.output_token_ids for seq in seq_group.waiting())
        max_forks = self.running.cache.admission.max_forks(
            seq_group.max_known_tokens, seq_group.num_source_tokens
        )
        return max(0, min(num_fresh - 1, max_forks))

    @property
    def is_nearly_full(self) -> bool:
        """Whether little memory is free, or groups wait for some."""
        tables = self.running.cache.tables
        waits = self.placed.waiting or self.placed.preempting or self.running.swapped
        return bool(waits) or tables.num_free_tokens * NEARLY_FULL < tables.num_tokens

    def memory_short(self, num_steps: int) -> int:
        """Memory that will be missing once running sequences have computed this many more tokens,
        and waiting ones have been admitted; 0 or less if none."""
        tables, running = self.running.cache.tables, self.running
        num_needed = 0
        for seq in (*running.decoding, *running.prefilling, *running.swap_in_pending):
            if seq.status is RUNNING:
                held = max(seq.growth.length, seq.growth.reserved_length)
                end = min(seq.growth.length + num_steps, seq.growth.max_length)
                num_needed += max(0, tables.demand.of(end) - tables.demand.of(held))
        for group in (*self.placed.waiting, *self.placed.preempting, *running.swapped):
            if group not in self.placed.awaiting_kv:  # memory is allocated for what arrives
                num_needed += tables.demand.of(group.max_known_tokens, group.num_source_tokens)
        return num_needed - tables.pool.num_available

    @property
    def num_tokens_to_prefill(self) -> int:
        """Tokens of prompts that are not computed yet, without those of groups whose KV is on its
        way here."""
        prefilling = [seq for seq in self.running.prefilling if seq.status is RUNNING]
        num_begun = sum(seq.growth.length - seq.prefill.num_computed for seq in prefilling)
        num_arriving = sum(group.num_prompt_tokens for group in self.placed.awaiting_kv)
        return num_begun + max(0, self.placed.waiting.num_tokens - num_arriving)
