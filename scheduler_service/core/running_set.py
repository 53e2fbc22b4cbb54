"""The sequences in one worker group's batch: their places, and the order among them."""

from bisect import insort
from collections.abc import Iterable

from scheduler_service.core.block_manager import BlockManager
from scheduler_service.core.request_clock import Phase, StepClock
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus

RUNNING = SequenceStatus.RUNNING


def _order(seq: Sequence) -> tuple[tuple[int, ...], int]:
    return seq.order


class RunningSet:
    """Who is in the batch, in order of priority.

    A sequence of the batch is in `prefilling`, in `decoding`, or a fork of one in `prefilling`;
    those in the lists are known to the worker and have blocks. A sequence that leaves because it
    ended stays in its list until `drop_ended`, so that a step's many ends cost one pass.
    """

    def __init__(self, blocks: BlockManager, clock: StepClock) -> None:
        self.num_places = 0
        """Places taken in the batch."""
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self._blocks = blocks
        self._clock = clock
        self._has_ended = False
        self._forget_seq_ids: list[int] = []

    def enter(self, seq: Sequence, forks: list[Sequence], now_us: int) -> None:
        """Give a sequence that will prefill, and those that will fork from it, their places."""
        seq.forks = forks
        for other in (seq, *forks):
            other.status = RUNNING
            other.group.num_running += 1
        self.num_places += 1 + len(forks)
        group = seq.group
        group.has_begun = True
        if group.num_running == 1 + len(forks):
            group.clock.enter_batch(self._clock, now_us)
        insort(self.prefilling, seq, key=_order)

    def begin_decoding(self, seq: Sequence) -> None:
        """Its prompt is computed, or it has forked."""
        insort(self.decoding, seq, key=_order)

    def pop_last(self) -> Sequence:
        """The last in order, out of its list; its place and blocks are still to be vacated."""
        lists = [running for running in (self.decoding, self.prefilling) if running]
        return max(lists, key=lambda running: running[-1].order).pop()

    def vacate(self, seq: Sequence, now_us: int) -> None:
        """Take a sequence's place and blocks, and its forks' places: they wait again."""
        if self._blocks.holds(seq.seq_id):
            self._blocks.free(seq.seq_id)
            self._forget_seq_ids.append(seq.seq_id)
        group = seq.group
        for other in (seq, *seq.live_forks()):
            other.restart()
            self.num_places -= 1
            group.num_running -= 1
        if group.num_running == 0:
            group.clock.leave_batch(now_us, Phase.PREEMPTED)
        self._has_ended = True

    def drop_ended(self) -> None:
        """Take those that have left out of the lists."""
        if self._has_ended:
            self.decoding = [seq for seq in self.decoding if seq.status is RUNNING]
            self.prefilling = [seq for seq in self.prefilling if seq.status is RUNNING]
            self._has_ended = False

    def take_forget_seq_ids(self) -> list[int]:
        """Sequences that have left since the last call, for the worker to forget."""
        seq_ids, self._forget_seq_ids = self._forget_seq_ids, []
        return seq_ids

    def check(self, groups: Iterable[SequenceGroup]) -> None:
        """Assert the invariants; `groups` are all that are placed here."""
        running = [s for g in groups for s in g.sequences if s.status is RUNNING]
        listed = [s for s in self.decoding + self.prefilling if s.status is RUNNING]
        forks = [fork for leader in self.prefilling for fork in leader.live_forks()]
        assert self.num_places == len(running)
        assert len(listed) + len(forks) == len(running), "one place for each"
        assert {*listed, *forks} == set(running)
        assert {s.seq_id for s in listed} == self._blocks.seq_ids(), "blocks for what is known"
        for sequences in (self.decoding, self.prefilling):
            orders = [s.order for s in sequences]
            assert orders == sorted(orders)
