"""Questions of the router about the capacity of a worker group."""

from dataclasses import dataclass
from itertools import chain

from scheduler_service.core.kv_cache.block_manager import AllocStatus
from scheduler_service.core.policies import Policy
from scheduler_service.core.scheduling.preemption import is_fetch_cheaper
from scheduler_service.core.scheduling.worker_group_state import WorkerGroupState
from scheduler_service.core.sequence import SequenceGroup, SequenceStatus

RUNNING = SequenceStatus.RUNNING


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityEstimate:
    """The cached blocks and free capacity that a group would find in a worker group."""

    num_tokens_to_compute: int
    """Tokens that are neither on the device nor on the host."""
    num_blocks_to_fetch: int
    """Blocks that are on the host; 0 if computing them again is faster."""
    shortage: float
    """The share of the sequences there that must end before the group gets places and blocks in
    addition to the groups that already wait there; 0 if it would get them now."""


class CapacityProbe:
    """Questions about one worker group. They change nothing but a cached answer."""

    def __init__(self, state: WorkerGroupState, policy: Policy) -> None:
        self._state = state
        self._policy = policy
        self._config = state.config
        self._blocks = state.blocks
        self._prefixes = state.prefixes
        self._running = state.running
        self._in_vain: tuple[SequenceGroup, int] | None = None
        """The last group that could not preempt any other, and the running set's changes until
        then: it asks again in every step, and the answer holds while the same sequences run."""

    @property
    def max_step_tokens(self) -> int:
        """Tokens of the largest step."""
        return self._config.max_num_batched_tokens

    @property
    def num_sequences(self) -> int:
        """Running and waiting sequences."""
        return self._state.num_sequences

    @property
    def caches_prefixes(self) -> bool:
        """Whether what one sequence has computed serves others."""
        return self._config.enable_prefix_caching

    def num_tokens_to_compute(self, seq_group: SequenceGroup) -> int:
        """Tokens of a group that has not run that are in no block here, on device or host."""
        longest = seq_group.longest
        num_found = len(self._prefixes.find(longest))
        num_found += len(self._prefixes.find_on_host(longest, num_found))
        return longest.num_known - num_found * self._blocks.block_size

    @property
    def has_room(self) -> bool:
        """Whether any group may have capacity here now."""
        state = self._state
        if state.num_sequences >= self._config.max_num_seqs:  # the usual case under load, first
            return False
        if state.preempting or state.running.swapped:
            return False
        # Beyond that it would only wait here, and could not go elsewhere.
        return self.num_tokens_to_prefill < self._config.max_num_batched_tokens

    def estimate(self, seq_group: SequenceGroup) -> CapacityEstimate:
        """The estimate for a group that fits here."""
        state, longest = self._state, seq_group.longest
        found = self._prefixes.find(longest)
        num_blocks = self._blocks.num_blocks_for(longest.num_known)
        num_promised = self._blocks.num_blocks_for(state.waiting.num_tokens) + len(state.waiting)
        blocks_short = self._blocks.num_blocks_short(num_blocks - len(found), found, num_promised)
        num_sequences = state.num_sequences
        places_short = num_sequences + len(seq_group.waiting()) - self._config.max_num_seqs
        num_used = state.capacity.num_gpu_blocks - self._blocks.num_free_blocks
        is_fetched = is_fetch_cheaper(state.pipeline.rates, self._blocks.block_size)
        stored = self._prefixes.find_on_host(longest, len(found)) if is_fetched else ()
        num_found = (len(found) + len(stored)) * self._blocks.block_size
        return CapacityEstimate(
            num_tokens_to_compute=longest.num_known - num_found,
            num_blocks_to_fetch=len(stored),
            shortage=max(0, places_short / max(1, num_sequences), blocks_short / max(1, num_used)),
        )

    def has_room_for(self, seq_group: SequenceGroup) -> bool:
        """Whether a group that fits would have capacity here now, if necessary by preemption."""
        has_room = self.has_room and self.estimate(seq_group).shortage == 0
        return has_room or self.can_preempt_for(seq_group)

    def can_preempt_for(self, seq_group: SequenceGroup) -> bool:
        """Whether the group would have capacity here now by preempting running or waiting groups.
        False while a group that must start before it waits here: that one is to get the places and
        blocks."""
        state = self._state
        if state.preempting or seq_group.is_suspect or not seq_group.fits(state.capacity):
            return False
        waiting = chain(state.waiting, state.running.swapped)
        if any(self._policy.precedes(other, seq_group) for other in waiting):
            return False
        return self.find_victims(seq_group) is not None

    def find_victims(self, seq_group: SequenceGroup) -> list[SequenceGroup] | None:
        """The fewest groups that must be preempted for a waiting group to be admitted, in order.
        None if it takes precedence over no group here, or if there is no room for it even so.

        Beam groups are not preempted: their sequences change in every step, so the number of blocks
        that they would free is unknown.
        """
        question = (seq_group, self._running.num_changes)
        if question == self._in_vain:
            return None
        yielding = self._policy.yielding(seq_group, self._state.seq_groups)
        first = next(yielding, None)
        if first is None:
            self._in_vain = question
            return None
        found = self._prefixes.find(seq_group.longest)
        victims: list[SequenceGroup] = []
        num_places = num_blocks = 0
        for other in chain([first], yielding):
            if self._would_fit(seq_group, found, num_places, num_blocks):
                return victims
            if other.num_running and not other.is_lockstep and other is not self._state.suspect:
                victims.append(other)
                num_places += other.num_running
                num_blocks += self._num_blocks_of(other)
        return victims if self._would_fit(seq_group, found, num_places, num_blocks) else None

    def _would_fit(
        self, seq_group: SequenceGroup, found: list[int], num_places: int, num_blocks: int
    ) -> bool:
        """Whether the group could be admitted with this many more free places and blocks."""
        num_taken = self._running.num_places - num_places + len(seq_group.waiting())
        verdict = self._blocks.can_allocate(seq_group.max_known_tokens, found, -num_blocks)
        return num_taken <= self._config.max_num_seqs and verdict is AllocStatus.OK

    def _num_blocks_of(self, seq_group: SequenceGroup) -> int:
        """Number of blocks that are freed when the group leaves."""
        seq_ids = [seq.seq_id for seq in seq_group.running() if self._blocks.holds(seq.seq_id)]
        return self._blocks.num_own_blocks(seq_ids)

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect is here."""
        return self._state.suspect is not None

    @property
    def num_tokens_to_prefill(self) -> int:
        """Tokens of prompts that are not computed yet."""
        prefilling = [seq for seq in self._running.prefilling if seq.status is RUNNING]
        num_begun = sum(seq.length - seq.num_computed for seq in prefilling)
        return num_begun + self._state.waiting.num_tokens
