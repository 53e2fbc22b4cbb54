"""The batch of one worker group: its running sequences, and the memory and the places they hold."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from scheduler_service.core.kv_cache.manager import KVCacheManager
from scheduler_service.core.request_queue import RemovableHeap
from scheduler_service.core.request_timing import RequestEvent, RequestPhase, StepClock
from scheduler_service.core.scheduling.batch import Batch
from scheduler_service.core.scheduling.resources import Entrants, Memory, Places, Resource
from scheduler_service.core.sequence import Sequence, SequenceGroup, SequenceStatus

RUNNING = SequenceStatus.RUNNING


def _order(seq: Sequence) -> tuple[tuple[int, ...], int]:
    return seq.order


class RunningSet:
    """The running sequences of a worker group, in order of priority.

    A running sequence is in `prefilling`, in `decoding` or in `swap_in_pending`, and has memory, or
    it will fork from a sequence in one of these lists. A sequence that leaves because it ended
    stays in its list until `drop_ended`, so that the ends of many sequences in a step cost one
    pass.
    """

    def __init__(self, cache: KVCacheManager, clock: StepClock, max_num_seqs: int) -> None:
        self.cache = cache
        self.places = Places(max_num_seqs)
        """One is taken by each running sequence, forks that wait for their parent's prefill
        included."""
        self.resources: tuple[Resource, ...] = (self.places, Memory(cache))
        """What a sequence must get to run, in the order in which they are asked."""
        self.num_changes = 0
        """Number of times that sequences started or stopped running."""
        self.decoding: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.swap_in_pending: list[Sequence] = []
        """Sequences whose KV the last plan swaps in; they get rows from the next plan on."""
        self.swapped: RemovableHeap[SequenceGroup] = RemovableHeap()
        """Swapped-out groups, in the policy's order. While there are any, nothing else is admitted.
        They cannot wait forever: the memory suffices for them, and running groups end.
        """
        self._clock = clock
        self._max_hold_us = 0
        self._num_changes_at_hold = -1
        self._has_ended = False
        self._forget_seq_ids: list[int] = []
        self._unintroduced: set[Sequence] = set()
        """Sequences that have memory and that the worker does not know, yet or any more."""
        self._retiring: list[Sequence] = []

    @property
    def num_places(self) -> int:
        """The number of running sequences that have rows to come."""
        return self.places.num_used

    def enter(
        self, seq: Sequence, forks: list[Sequence], now_us: int, *, awaits_swap_in: bool = False
    ) -> None:
        """Start a sequence that will prefill, and the `forks` that will share its prompt; they have
        acquired all resources.

        `awaits_swap_in`: its rows begin in the next plan, because this one swaps in some of its KV.
        """
        seq.hold_forks(forks)
        self._start([seq, *forks], now_us)
        self._unintroduced.add(seq)
        if awaits_swap_in:
            self.swap_in_pending.append(seq)
        else:
            insort(self.prefilling, seq, key=_order)

    def begin_decoding(self, seq: Sequence) -> None:
        """Add a sequence whose prompt is computed, or that was forked from such a sequence."""
        insort(self.decoding, seq, key=_order)

    def swap_in(self, seq_group: SequenceGroup, batch: Batch) -> list[int]:
        """Resume the swapped-out sequences of a group; returns the plan's `swap_in`.
        They decode from the next plan on."""
        sequences = seq_group.swapped()
        self.swapped.remove(seq_group)
        pairs = self.cache.swap.swap_in(sequences)
        for seq in sequences:
            seq.prefill.skip(seq.growth.length - 1)
        self.places.acquire(Entrants(sequences, []), batch)
        self._start(sequences, batch.now_us)
        self._unintroduced.update(sequences)
        self.swap_in_pending += sequences
        return pairs

    def release_swapped(self, seq: Sequence) -> None:
        """Free the memory of a swapped-out sequence that will not be swapped in."""
        self.cache.swap.free(seq)
        if len(seq.seq_group.swapped()) == 1:
            self.swapped.remove(seq.seq_group)

    def pop_swapped_in(self) -> list[Sequence]:
        """Return, in order, the sequences whose KV the last plan swapped in; they are now
        decoding if their prompts are computed, prefilling otherwise."""
        if not self.swap_in_pending:
            return []
        swapped_in, self.swap_in_pending = sorted(self.swap_in_pending, key=_order), []
        for seq in swapped_in:
            insort(self.decoding if seq.prefill.is_complete else self.prefilling, seq, key=_order)
        return swapped_in

    def is_unintroduced(self, seq: Sequence) -> bool:
        """Whether a sequence has memory and has not been sent to the worker yet."""
        return seq in self._unintroduced

    def mark_introduced(self, seq: Sequence) -> None:
        """Record that the plan being made sends a sequence to the worker."""
        self._unintroduced.discard(seq)

    def max_hold_us(self) -> int:
        """How long the clients of all running requests can wait for their tokens; 0 while prompts
        are computed."""
        if self.prefilling or self.swap_in_pending:
            return 0
        if self.num_changes != self._num_changes_at_hold:
            # Sequences that have ended stay in the list until the next plan.
            seq_groups = {seq.seq_group for seq in self.decoding if seq.status is RUNNING}
            self._max_hold_us = min((seq_group.max_hold_us for seq_group in seq_groups), default=0)
            self._num_changes_at_hold = self.num_changes
        return self._max_hold_us

    def last(self) -> Sequence:
        """The last in order of the prefilling and decoding sequences."""
        ends = [running[-1] for running in (self.decoding, self.prefilling) if running]
        return max(ends, key=_order)

    def pop_last(self) -> Sequence:
        """Remove the last sequence in order from its list; the caller then calls `vacate` or
        `swap_out`."""
        last = self.last()
        running = self.decoding if self.decoding and self.decoding[-1] is last else self.prefilling
        return running.pop()

    def pop_last_seq_group(self) -> list[Sequence]:
        """Remove the sequences of the last one's group from their lists, and return them in order;
        the caller then calls `vacate` or `swap_out`."""
        seq_group = self.last().seq_group
        popped = []
        while (self.decoding or self.prefilling) and self.last().seq_group is seq_group:
            popped.append(self.pop_last())
        return popped[::-1]

    def drop_beam(self, seq: Sequence) -> None:
        """Free the memory of a decoding beam; the sequence stays in the batch, idle."""
        index = bisect_left(self.decoding, seq.order, key=_order)
        assert self.decoding[index] is seq
        del self.decoding[index]
        self.cache.free(seq)
        self._forget(seq)

    def add_beam(self, seq: Sequence) -> None:
        """Make an idle sequence decode after it was given the memory of a beam."""
        insort(self.decoding, seq, key=_order)
        self._unintroduced.add(seq)

    def pop_seq_group(self, seq_group: SequenceGroup) -> list[Sequence]:
        """Remove a group's sequences from their lists, and return them in order; the caller then
        calls `vacate` or `swap_out`. Must not be called during an iteration over the lists."""
        popped = [s for s in self.decoding + self.prefilling if s.seq_group is seq_group]
        self.decoding = [seq for seq in self.decoding if seq.seq_group is not seq_group]
        self.prefilling = [seq for seq in self.prefilling if seq.seq_group is not seq_group]
        return sorted(popped, key=_order)

    def vacate(self, seq: Sequence, now_us: int) -> None:
        """Stop running a sequence, free its memory, and let it and its forks wait again."""
        if self.cache.tables.holds(seq):
            self._forget(seq)
        for other in (seq, *seq.live_forks()):
            for resource in self.resources:
                resource.release(other)
            other.preempt()
            self._leave(other, now_us)

    def swap_out(self, sequences: list[Sequence], now_us: int) -> list[int]:
        """Stop running sequences of one group; returns the plan's `swap_out`."""
        seq_group = sequences[0].seq_group
        if seq_group not in self.swapped:
            self.swapped.push(seq_group.rank, seq_group)
        for seq in sequences:
            # Memory for drafts that were refused may never have been written.
            if not seq_group.strategy.is_lockstep and self.cache.tables.trim(
                seq, seq.growth.length - 1
            ):
                seq.growth.reserve(seq.growth.length - 1)
        pairs = self.cache.swap.swap_out(sequences)
        for seq in sequences:
            self._forget(seq)
            self.places.release(seq)
            seq.swap_out()
            self._leave(seq, now_us)
        return pairs

    @contextmanager
    def only(self, has_turn: Callable[[SequenceGroup], bool]) -> Iterator[None]:
        """Hide the sequences of groups that do not have their turn while a step is planned."""
        lists = self.decoding, self.prefilling, self.swap_in_pending
        hidden = [[seq for seq in listed if not has_turn(seq.seq_group)] for listed in lists]
        self.decoding, self.prefilling, self.swap_in_pending = (
            [seq for seq in listed if has_turn(seq.seq_group)] for listed in lists
        )
        yield
        lists = self.decoding, self.prefilling, self.swap_in_pending
        self.decoding, self.prefilling, self.swap_in_pending = (
            sorted(shown + rest, key=_order) for shown, rest in zip(lists, hidden, strict=True)
        )

    def drop_ended(self) -> None:
        """Remove sequences that no longer run from the lists."""
        if self._has_ended:
            self.swap_in_pending = [seq for seq in self.swap_in_pending if seq.status is RUNNING]
            self.decoding = [seq for seq in self.decoding if seq.status is RUNNING]
            self.prefilling = [seq for seq in self.prefilling if seq.status is RUNNING]
            self._has_ended = False

    def retire(self, seq: Sequence) -> None:
        """Record that the plan being made has a sequence's last row. Its place is free for the next
        plan, with which the worker forgets it; its memory is when the result is in."""
        self._retiring.append(seq)

    def end_plan(self) -> list[int]:
        """Complete the plan; returns the sequences that stopped running since the last one, for the
        worker to forget."""
        seq_ids, self._forget_seq_ids = self._forget_seq_ids, []
        for seq in self._retiring:
            self.places.release(seq)
            self._forget_seq_ids.append(seq.seq_id)
            self._unintroduced.add(seq)
        self._retiring.clear()
        return seq_ids

    def check(self, seq_groups: Iterable[SequenceGroup]) -> None:
        """Assert the invariants; `seq_groups` are all groups of this worker group."""
        running = [s for g in seq_groups for s in g.sequences if s.status is RUNNING]
        lists = self.decoding + self.prefilling + self.swap_in_pending
        listed = [s for s in lists if s.status is RUNNING]
        forks = [fork for leader in listed for fork in leader.live_forks()]
        retired = [s for s in listed if not self.places.holds(s)]
        assert all(
            s.growth.length >= s.growth.max_length and s in self._unintroduced for s in retired
        )
        assert self.num_places == len(running) - len(retired)
        assert len(listed) + len(forks) == len(running), "one place for each"
        assert {*listed, *forks} == set(running)
        self.cache.check(listed)
        assert self._unintroduced <= set(listed)
        for sequences in (self.decoding, self.prefilling):
            orders = [s.order for s in sequences]
            assert orders == sorted(orders)

    def _start(self, sequences: list[Sequence], now_us: int) -> None:
        """`sequences`: all of one group."""
        seq_group = sequences[0].seq_group
        if seq_group.num_running == 0:
            seq_group.clock.enter_batch(self._clock, now_us)
            seq_group.record_event(RequestEvent.STARTED, now_us)
        for seq in sequences:
            seq.enter_batch()
        self.num_changes += 1

    def _leave(self, seq: Sequence, now_us: int) -> None:
        self.num_changes += 1
        self._has_ended = True
        seq_group = seq.seq_group
        if seq_group.num_running == 0:
            seq_group.clock.leave_batch(now_us, RequestPhase.PREEMPTED)

    def _forget(self, seq: Sequence) -> None:
        """Make the next plan instruct the worker to forget a sequence."""
        if seq in self._unintroduced:
            self._unintroduced.remove(seq)
        else:
            self._forget_seq_ids.append(seq.seq_id)
