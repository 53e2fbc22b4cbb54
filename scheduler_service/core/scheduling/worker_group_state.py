"""The sequences in one worker group's batch: their places, and the order among them."""

from bisect import bisect_left, insort
from collections.abc import Iterable

from scheduler_service.core.kv_cache.block_manager import BlockManager
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_service.core.stats.request_timing import RequestEvent, RequestPhase, StepClock

RUNNING = SequenceStatus.RUNNING


def _order(seq: Sequence) -> tuple[tuple[int, ...], int]:
    return seq.order


class RunningSet:
    """The sequences in the batch, in order of priority.

    A sequence of the batch is in `prefilling`, in `decoding`, in `arriving`, or a fork of one that
    is to prefill; those in the lists have blocks. A sequence that leaves because it ended stays in
    its list until `drop_ended`, so that a step's many ends cost one pass.
    """

    def __init__(self, blocks: BlockManager, clock: StepClock) -> None:
        self.num_places = 0
        """Places taken in the batch."""
        self.num_changes = 0
        """How often sequences have entered the batch or left it."""
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.arriving: list[Sequence] = []
        """Those whose blocks the last plan swaps in; their rows begin in the next one."""
        self._blocks = blocks
        self._clock = clock
        self._has_ended = False
        self._forget_seq_ids: list[int] = []
        self._unknown: set[Sequence] = set()
        """Sequences with blocks that were not sent to the worker yet."""

    def enter(
        self, seq: Sequence, forks: list[Sequence], now_us: int, *, arrives: bool = False
    ) -> None:
        """Give a sequence that will prefill, and those that will fork from it, their places.

        `arrives`: it begins in the next plan, since this one swaps in some of its blocks.
        """
        seq.hold_forks(forks)
        self._take_places([seq, *forks], now_us)
        seq.seq_group.has_begun = True
        self._unknown.add(seq)
        if arrives:
            self.arriving.append(seq)
        else:
            insort(self.prefilling, seq, key=_order)

    def begin_decoding(self, seq: Sequence) -> None:
        """Its prompt is computed, or it has forked."""
        insort(self.decoding, seq, key=_order)

    def come_back(self, sequences: list[Sequence], now_us: int) -> None:
        """Give sequences of one group their places that were swapped out, and whose blocks this
        plan swaps in: they decode from the next one on."""
        self._take_places(sequences, now_us)
        self._unknown.update(sequences)
        self.arriving += sequences

    def land(self) -> list[Sequence]:
        """Put those whose blocks the last plan swapped in among those that decode, if they have
        done so before, or else among those that prefill. In order."""
        landed, self.arriving = sorted(self.arriving, key=_order), []
        for seq in landed:
            insort(self.decoding if seq.is_prefilled else self.prefilling, seq, key=_order)
        return landed

    def mark_introduced(self, seq: Sequence) -> bool:
        """Note that a plan has a row of a sequence; whether the worker needs it sent."""
        is_new = seq in self._unknown
        self._unknown.discard(seq)
        return is_new

    def last(self) -> Sequence:
        """The last in order of those in the lists."""
        ends = [running[-1] for running in (self.decoding, self.prefilling) if running]
        return max(ends, key=_order)

    def pop_last(self) -> Sequence:
        """The last in order, out of its list; it is still to be vacated or swapped out."""
        last = self.last()
        running = self.decoding if self.decoding and self.decoding[-1] is last else self.prefilling
        return running.pop()

    def pop_last_seq_group(self) -> list[Sequence]:
        """All of the last one's group, out of their lists, in order; they are still to be vacated
        or swapped out."""
        seq_group = self.last().seq_group
        popped = []
        while (self.decoding or self.prefilling) and self.last().seq_group is seq_group:
            popped.append(self.pop_last())
        return popped[::-1]

    def is_unknown(self, seq: Sequence) -> bool:
        """Whether a sequence with blocks was not sent to the worker yet."""
        return seq in self._unknown

    def drop_beam(self, seq: Sequence) -> None:
        """Take a decoding sequence's blocks; it keeps its place, idle."""
        index = bisect_left(self.decoding, seq.order, key=_order)
        assert self.decoding[index] is seq
        del self.decoding[index]
        self._blocks.free(seq.seq_id)
        self._forget(seq)

    def add_beam(self, seq: Sequence) -> None:
        """An idle sequence has got blocks, and decodes."""
        insort(self.decoding, seq, key=_order)
        self._unknown.add(seq)

    def pop_seq_group(self, seq_group: SequenceGroup) -> list[Sequence]:
        """All of a group's, out of their lists, in order; they are still to be vacated or swapped
        out. Not while the lists are gone through."""
        popped = [s for s in self.decoding + self.prefilling if s.seq_group is seq_group]
        self.decoding = [seq for seq in self.decoding if seq.seq_group is not seq_group]
        self.prefilling = [seq for seq in self.prefilling if seq.seq_group is not seq_group]
        return sorted(popped, key=_order)

    def vacate(self, seq: Sequence, now_us: int) -> None:
        """Take a sequence's place and blocks, and its forks' places: they wait again."""
        if self._blocks.holds(seq.seq_id):
            self._blocks.free(seq.seq_id)
            self._forget(seq)
        for other in (seq, *seq.live_forks()):
            other.preempt()
            self._note_left(other, now_us)

    def swap_out(self, sequences: list[Sequence], now_us: int) -> list[int]:
        """Take the places of sequences of one group and move their blocks to the host; the pairs
        of blocks to move."""
        pairs = self._blocks.swap_out([seq.seq_id for seq in sequences])
        for seq in sequences:
            self._forget(seq)
            seq.swap_out()
            self._note_left(seq, now_us)
        return pairs

    def drop_ended(self) -> None:
        """Take those that have left out of the lists."""
        if self._has_ended:
            self.arriving = [seq for seq in self.arriving if seq.status is RUNNING]
            self.decoding = [seq for seq in self.decoding if seq.status is RUNNING]
            self.prefilling = [seq for seq in self.prefilling if seq.status is RUNNING]
            self._has_ended = False

    def take_forget_seq_ids(self) -> list[int]:
        """Sequences that have left since the last call, for the worker to forget."""
        seq_ids, self._forget_seq_ids = self._forget_seq_ids, []
        return seq_ids

    def check(self, seq_groups: Iterable[SequenceGroup]) -> None:
        """Assert the invariants; `seq_groups` are all that are placed here."""
        running = [s for g in seq_groups for s in g.sequences if s.status is RUNNING]
        lists = self.decoding + self.prefilling + self.arriving
        listed = [s for s in lists if s.status is RUNNING]
        forks = [fork for leader in listed for fork in leader.live_forks()]
        assert self.num_places == len(running)
        assert len(listed) + len(forks) == len(running), "one place for each"
        assert {*listed, *forks} == set(running)
        assert {s.seq_id for s in listed} == self._blocks.seq_ids(), "one table for each"
        assert self._unknown <= set(listed)
        for sequences in (self.decoding, self.prefilling):
            orders = [s.order for s in sequences]
            assert orders == sorted(orders)

    def _take_places(self, sequences: list[Sequence], now_us: int) -> None:
        """`sequences`: all of one group."""
        seq_group = sequences[0].seq_group
        if seq_group.num_running == 0:
            seq_group.clock.enter_batch(self._clock, now_us)
            seq_group.note(RequestEvent.STARTED, now_us)
        for seq in sequences:
            seq.enter_batch()
        seq_group.num_running += len(sequences)
        self.num_places += len(sequences)
        self.num_changes += 1

    def _note_left(self, seq: Sequence, now_us: int) -> None:
        self.num_places -= 1
        self.num_changes += 1
        self._has_ended = True
        seq_group = seq.seq_group
        seq_group.num_running -= 1
        if seq_group.num_running == 0:
            seq_group.clock.leave_batch(now_us, RequestPhase.PREEMPTED)

    def _forget(self, seq: Sequence) -> None:
        """Let the next plan make the worker forget a sequence that it knows."""
        if seq in self._unknown:
            self._unknown.remove(seq)
        else:
            self._forget_seq_ids.append(seq.seq_id)
