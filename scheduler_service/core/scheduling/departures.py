"""How requests and sequences leave a worker group: they end, or they move to another group.

A request moves because its worker group drains, or because it exceeds the group's KV cache. It
leaves the batch at once, so that no further step is planned for it, and can be routed elsewhere
when the results of its steps in flight have arrived: their tokens count, and no later result can be
mistaken for one of a row that it gets elsewhere.
"""

from scheduler_service.core.request import ChoiceFinished
from scheduler_service.core.request_timing import RequestEvent
from scheduler_service.core.scheduling.placed_groups import PlacedGroups
from scheduler_service.core.scheduling.running_set import RunningSet
from scheduler_service.core.sequence import Frontend, Sequence, SequenceGroup, SequenceStatus
from scheduler_service.errors import PagewireError


def finish_choice(frontend: Frontend, handle: int, stop_token_id: int | None) -> None:
    """Report to the frontend that a choice ended, by a stop token or else by length."""
    reason = "length" if stop_token_id is None else "stop"
    finished = ChoiceFinished(handle=handle, reason=reason, stop_token_id=stop_token_id)
    frontend.outbox.choices_finished.append(finished)


class Departures:
    """Ends sequences and groups, and lets groups move to other worker groups."""

    def __init__(self, placed: PlacedGroups, running: RunningSet) -> None:
        self._placed = placed
        self._running = running
        self._ended: list[SequenceGroup] = []

    # Ends.

    def end_sequence(self, seq: Sequence, status: SequenceStatus, now_us: int) -> None:
        """End a sequence and free what it held. Sequences that were to fork from it wait again."""
        running, seq_group = self._running, seq.seq_group
        if seq.status is SequenceStatus.RUNNING:
            running.cache.prefixes.offer(seq, seq.num_confirmed)
            running.vacate(seq, now_us)
        elif seq.status is SequenceStatus.SWAPPED:
            running.release_swapped(seq)
        seq_group.end(seq, status)
        self._placed.update_queues(seq_group)
        if seq_group.num_unfinished == 0:
            self._remove_ended(seq_group)

    def end_seq_group(self, seq_group: SequenceGroup, status: SequenceStatus, now_us: int) -> None:
        """End all unfinished sequences of a group."""
        for seq in list(seq_group.unfinished()):
            self.end_sequence(seq, status, now_us)

    def fail_seq_group(self, seq_group: SequenceGroup, error: PagewireError, now_us: int) -> None:
        """End a group by an error of its own, unless it has ended."""
        if seq_group.num_unfinished:
            seq_group.error = error
            self.end_seq_group(seq_group, SequenceStatus.FINISHED_ERROR, now_us)

    def end_full(self, seq_group: SequenceGroup) -> None:
        """End those choices of a group, which is in no queue yet, that already have the maximum of
        tokens on this worker group."""
        for seq in list(seq_group.unfinished()):
            if len(seq.output_token_ids) >= seq.max_output_tokens:
                finish_choice(seq.frontend, seq.handle, None)
                seq_group.end(seq, SequenceStatus.FINISHED_LENGTH_CAPPED)
        if seq_group.num_unfinished == 0:
            self._remove_ended(seq_group)

    def pop_ended(self) -> list[SequenceGroup]:
        """Remove and return the groups whose sequences have all ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _remove_ended(self, seq_group: SequenceGroup) -> None:
        self._placed.remove(seq_group)
        self._ended.append(seq_group)

    # Moves.

    def begin_move(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Take a group, started here or elsewhere, out of the batch and the queues. Its memory is
        freed; what it has computed can be found here, and may be copied to where it goes."""
        self._placed.discard(seq_group)
        running = self._running
        for seq in seq_group.running():
            if seq.status is SequenceStatus.RUNNING:  # a fork leaves with its parent
                if running.cache.tables.holds(seq) and not seq_group.strategy.is_lockstep:
                    running.cache.prefixes.offer_all(seq)
                running.vacate(seq, now_us)
        for seq in seq_group.swapped():
            running.release_swapped(seq)
            seq.preempt()
        running.drop_ended()  # else it would count as running here, too, once it runs elsewhere
        seq_group.clock.recover(now_us)
        seq_group.record_event(RequestEvent.MOVED, now_us)
        self._placed.migrating[seq_group] = None

    def check(self) -> None:
        """Assert that all ended groups were taken, and that swapped-out groups are listed."""
        assert not self._ended
        for seq_group in self._placed.seq_groups:
            assert (seq_group in self._running.swapped) == bool(seq_group.swapped())
