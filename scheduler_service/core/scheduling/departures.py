"""How requests and sequences leave a worker group: they end, or they move to another group.

A request moves because its worker group drains, or because it has outgrown the group's KV cache. It
leaves the batch at once, so that no further step is planned for it, and can be routed elsewhere
when the results of its steps in flight have arrived: their tokens count, and no later result can be
mistaken for one of a row that it gets elsewhere.
"""

from collections.abc import Collection

from scheduler_service.core.request import ChoiceFinished
from scheduler_service.core.request_timing import RequestEvent
from scheduler_service.core.scheduling.worker_group_state import WorkerGroupState
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.errors import GenerationFailed


def finish_choice(seq: Sequence, stop_token_id: int | None) -> None:
    """Report to the frontend that a choice ended, by a stop token or else by length."""
    reason = "length" if stop_token_id is None else "stop"
    finished = ChoiceFinished(handle=seq.handle, reason=reason, stop_token_id=stop_token_id)
    seq.seq_group.frontend.outbox.choices_finished.append(finished)


class Departures:
    """Ends sequences and groups, and lets groups move to other worker groups."""

    def __init__(self, state: WorkerGroupState) -> None:
        self._state = state
        self._ended: list[SequenceGroup] = []
        self._migrating: dict[SequenceGroup, None] = {}

    # Ends.

    def end_sequence(self, seq: Sequence, status: SequenceStatus, now_us: int) -> None:
        """End a sequence and free what it held. Sequences that were to fork from it wait again."""
        state, seq_group = self._state, seq.seq_group
        if seq.status is SequenceStatus.RUNNING:
            state.cache.offer(seq, seq.num_confirmed)  # others may find what it has computed
            state.running.vacate(seq, now_us)
        elif seq.status is SequenceStatus.SWAPPED:
            state.running.release_swapped(seq)
        seq_group.end(seq, status)
        if not seq_group.waiting():
            self.discard(seq_group)
        elif seq_group not in state.preempting and seq_group not in self._migrating:
            state.waiting.add(seq_group)
        if seq_group.num_unfinished == 0:
            self._note_ended(seq_group)

    def end_seq_group(self, seq_group: SequenceGroup, status: SequenceStatus, now_us: int) -> None:
        """End all unfinished sequences of a group."""
        for seq in list(seq_group.unfinished()):
            self.end_sequence(seq, status, now_us)

    def fail_seq_group(
        self, seq_group: SequenceGroup, error: GenerationFailed, now_us: int
    ) -> None:
        """End a group by an error of its own, unless it has ended."""
        if seq_group.num_unfinished:
            seq_group.error = error
            self.end_seq_group(seq_group, SequenceStatus.FINISHED_ERROR, now_us)

    def end_full(self, seq_group: SequenceGroup) -> None:
        """End those choices of a group, which is in no queue yet, that already have the maximum of
        tokens on this worker group."""
        for seq in list(seq_group.unfinished()):
            if len(seq.output_token_ids) >= seq.max_output_tokens:
                finish_choice(seq, None)
                seq_group.end(seq, SequenceStatus.FINISHED_LENGTH_CAPPED)
        if seq_group.num_unfinished == 0:
            self._note_ended(seq_group)

    def take_ended(self) -> list[SequenceGroup]:
        """Remove and return the groups whose sequences have all ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def _note_ended(self, seq_group: SequenceGroup) -> None:
        del self._state.seq_groups[seq_group]
        self._ended.append(seq_group)

    # Moves.

    @property
    def migrating(self) -> Collection[SequenceGroup]:
        """Groups that are to move and still have rows in flight."""
        return self._migrating

    def begin_move(self, seq_group: SequenceGroup, now_us: int) -> None:
        """Take a group, started here or elsewhere, out of the batch and the queues. Its memory is
        freed: its tokens are computed again where it goes."""
        self.discard(seq_group)
        running = self._state.running
        for seq in seq_group.running():
            if seq.status is SequenceStatus.RUNNING:  # a fork leaves with its parent
                running.vacate(seq, now_us)
        for seq in seq_group.swapped():
            running.release_swapped(seq)
            seq.preempt()
        running.drop_ended()  # else it would count as running here, too, once it runs elsewhere
        seq_group.clock.recover(now_us)
        seq_group.note(RequestEvent.MOVED, now_us)
        self._migrating[seq_group] = None

    def take_moved(self) -> list[SequenceGroup]:
        """Remove and return the migrating groups that have no rows in flight any more."""
        if not self._migrating:
            return []
        in_flight = {seq.seq_group for seq in self._state.pipeline.open_rows()}
        moved = [seq_group for seq_group in self._migrating if seq_group not in in_flight]
        for seq_group in moved:
            del self._migrating[seq_group]
            del self._state.seq_groups[seq_group]
        return moved

    def discard(self, seq_group: SequenceGroup) -> None:
        """Take a group out of the queues."""
        self._state.waiting.discard(seq_group)
        self._state.preempting.discard(seq_group)
        self._migrating.pop(seq_group, None)

    def check(self) -> None:
        """Assert that all ended groups were taken, and that each waiting group is queued once."""
        assert not self._ended
        queues = (self._state.waiting, self._state.preempting, self._migrating)
        for seq_group in self._state.seq_groups:
            is_queued = sum(seq_group in queue for queue in queues)
            assert is_queued == bool(seq_group.waiting())
            assert (seq_group in self._state.running.swapped) == bool(seq_group.swapped())
