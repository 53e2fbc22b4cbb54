"""The groups that were routed to one worker group: in its batch, in its queues or on their way out,
and the suspect among them that is tried in steps of its own."""

from collections import Counter

from scheduler_service.core.request_queue import WaitingQueue
from scheduler_service.core.request_timing import RequestPhase
from scheduler_service.core.scheduling.adapter_slots import AdapterSlots
from scheduler_service.core.sequence import SequenceGroup


class PlacedGroups:
    """All groups of a worker group. Each that has waiting sequences is in one of three queues."""

    def __init__(self, *, whole_prompts: bool = False, max_loras: int = 0) -> None:
        """`whole_prompts`: whether each prompt is computed in one row. One that does not fit the
        rest of a step would have to let later ones pass, if these had lower ranks, again and again;
        so they are served in the order in which the policy has placed them here."""
        self.seq_groups: dict[SequenceGroup, None] = {}
        """All of them, in order of arrival."""
        self.adapters = AdapterSlots(max_loras)
        self.waiting = WaitingQueue(is_fifo=whole_prompts)
        self.preempting = WaitingQueue()
        """The waiting group, if any, that preempts others here; it has not run here yet."""
        self.migrating: dict[SequenceGroup, None] = {}
        """Groups that are to move elsewhere and still have rows in flight."""
        self.awaiting_kv: dict[SequenceGroup, None] = {}
        """Groups that wait for the KV of another worker group; see `routing/transfers.py`."""
        self._suspect: SequenceGroup | None = None
        self._is_trial = False

    # Queues.

    def add(self, seq_group: SequenceGroup) -> None:
        """Add a group that was routed here. A suspect is computed in steps of its own; there is no
        other one here."""
        self.seq_groups[seq_group] = None
        if seq_group.adapter is not None:
            self.adapters.add(seq_group.adapter)
        if seq_group.is_suspect:
            self._suspect = seq_group

    def remove(self, seq_group: SequenceGroup) -> None:
        """Remove a group that has ended, or goes elsewhere."""
        self.discard(seq_group)
        self.awaiting_kv.pop(seq_group, None)
        del self.seq_groups[seq_group]
        if seq_group.adapter is not None:
            self.adapters.remove(seq_group.adapter)

    def enqueue(self, seq_group: SequenceGroup) -> None:
        """Queue a new group."""
        (self.preempting if seq_group.placement.is_preempting else self.waiting).add(seq_group)

    def settle_preempting(self) -> None:
        """Once the group that preempted others has started, its other sequences wait with the other
        groups."""
        seq_group = self.preempting.head()
        if seq_group is not None and seq_group.num_running:
            self.preempting.discard(seq_group)
            self.waiting.add(seq_group)

    def update_queues(self, seq_group: SequenceGroup) -> None:
        """Queue a group some of whose sequences wait again, or take it out if none does."""
        if not seq_group.waiting():
            self.discard(seq_group)
        elif seq_group not in self.preempting and seq_group not in self.migrating:
            self.waiting.add(seq_group)

    def discard(self, seq_group: SequenceGroup) -> None:
        """Take a group out of the queues."""
        self.waiting.discard(seq_group)
        self.preempting.discard(seq_group)
        self.migrating.pop(seq_group, None)

    def pop_not_started(self) -> list[SequenceGroup]:
        """Remove and return the groups that have not run here."""
        phases = (RequestPhase.QUEUE, RequestPhase.RECOVERY)
        waiting = (*self.preempting, *self.waiting)
        seq_groups = [seq_group for seq_group in waiting if seq_group.clock.phase in phases]
        for seq_group in seq_groups:
            self.remove(seq_group)
        return seq_groups

    def pop_moved(self, in_flight: set[SequenceGroup]) -> list[SequenceGroup]:
        """Remove and return the migrating groups that have no rows in flight any more."""
        moved = [seq_group for seq_group in self.migrating if seq_group not in in_flight]
        for seq_group in moved:
            self.remove(seq_group)
        return moved

    @property
    def num_waiting_sequences(self) -> int:
        """Sequences that wait in the queues."""
        return self.waiting.num_sequences + self.preempting.num_sequences

    # Trials.

    @property
    def suspect(self) -> SequenceGroup | None:
        """The suspect that is tried here, until it has passed the point at which workers died."""
        suspect = self._suspect
        if suspect is not None and not (suspect in self.seq_groups and suspect.is_suspect):
            suspect = self._suspect = None
        return suspect

    def change_turn(self) -> None:
        """Plan for the suspect if the last step was for the others, and for the others if not."""
        self._is_trial = not self._is_trial

    def has_turn(self, seq_group: SequenceGroup) -> bool:
        """Whether a group may have rows in the step that is being planned."""
        if seq_group in self.awaiting_kv:
            return False
        suspect = self.suspect
        return suspect is None or (seq_group is suspect) == self._is_trial

    def check(self) -> None:
        """Assert that each group with waiting sequences is queued once, and no other is."""
        self.adapters.check(Counter(g.adapter for g in self.seq_groups if g.adapter is not None))
        assert self.awaiting_kv.keys() <= self.seq_groups.keys()
        queues = (self.waiting, self.preempting, self.migrating)
        for seq_group in self.seq_groups:
            is_queued = sum(seq_group in queue for queue in queues)
            assert is_queued == bool(seq_group.waiting())
