"""The time limit of a step, from the durations of the steps before it.

A step takes a + b * (tokens computed) + c * (pairs of a token and one that it attends to), where a,
b and c are properties of the worker: unknown, but not negative. The averages over measured steps
obey the same formula. So whatever a, b and c are, a step that has at most k times the tokens and k
times the pairs of the average step takes at most k times as long (k at least 1). The bound is
computed from the average of decodes and from the average of prefills, and the lower one is used:
decodes are bound by memory and prefills by arithmetic, so neither predicts the other well.

A limit is that bound times a generous factor, and never below a floor. The first steps of a size
may compile kernels or record graphs: they have a higher floor and are left out of the averages.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pagewire.v1 import worker_service_pb2 as worker_pb
from scheduler_service.core.throughput import MovingAverage, StepWork
from scheduler_service.core_service.workers.errors import GroupHung, SessionFailed, StepOverdue
from service_common.durations import check_seconds

NUM_FIRST_STEPS = 2
"""Steps of a size that may take as long as a first one. Sizes are classified by powers of two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimeout:
    """How much longer than expected a step may take; validated on construction."""

    floor_s: float = 10.0
    """Seconds that any step may take before its worker is considered hung, even if its heartbeats
    continue; 0 disables the limit."""

    first_floor_s: float = 300.0
    """The same for the first steps of each size, which may compile kernels or record graphs: a
    large model on few cores takes minutes for a batch of prompts."""

    factor: float = 10.0
    """How many times longer a step may take than predicted from the steps before it."""

    def __post_init__(self) -> None:
        """Raise ValueError, naming the flag, if a number is out of range."""
        check_seconds(step_timeout=self.floor_s, first_step_timeout=self.first_floor_s)
        if self.floor_s and not self.floor_s <= self.first_floor_s:
            expected = f"expected at least --step-timeout ({self.floor_s:g})"
            raise ValueError(f"first_step_timeout: {expected}, got {self.first_floor_s:g}")
        if not 1 <= self.factor < float("inf"):
            raise ValueError(f"step_timeout_factor: expected at least 1, got {self.factor:g}")


class _Average:
    """Averages over steps of one kind: duration, tokens and attention pairs."""

    def __init__(self) -> None:
        self._seconds = MovingAverage()
        self._tokens = MovingAverage()
        self._pairs = MovingAverage()

    def add(self, work: StepWork, seconds: float) -> None:
        self._seconds.add(seconds)
        self._tokens.add(_num_tokens(work))
        self._pairs.add(work.num_attended_pairs)

    def bounds(self, work: StepWork) -> Iterator[float]:
        """Upper bound of a step's duration by this average; none before the first value."""
        seconds, tokens, pairs = self._seconds.mean, self._tokens.mean, self._pairs.mean
        if seconds is not None and tokens and pairs:
            more = (1.0, _num_tokens(work) / tokens, work.num_attended_pairs / pairs)
            yield seconds * max(more)


class StepTimes:
    """Durations of one worker group's steps so far, and the time limit that follows from them for
    the next step."""

    def __init__(self, timeout: StepTimeout) -> None:
        self._timeout = timeout
        self._decodes = _Average()
        self._prefills = _Average()
        self._num_seen: Counter[tuple[bool, int]] = Counter()

    @property
    def min_limit_s(self) -> float:
        """Lower bound of all limits; infinite if there are no limits."""
        return self._timeout.floor_s or float("inf")

    def limit_s(self, work: StepWork) -> float:
        """Seconds after which a step is overdue."""
        bounds = [*self._decodes.bounds(work), *self._prefills.bounds(work)]
        is_first = not bounds or self._is_first(work)
        floor_s = self._timeout.first_floor_s if is_first else self._timeout.floor_s
        return max(self.min_limit_s, floor_s, self._timeout.factor * min(bounds, default=0.0))

    def observe(self, work: StepWork, seconds: float) -> None:
        """Record the duration of a step."""
        is_first = self._is_first(work)
        self._num_seen[_size(work)] += 1
        if not is_first:
            (self._prefills if work.num_prefill_tokens else self._decodes).add(work, seconds)

    def _is_first(self, work: StepWork) -> bool:
        return self._num_seen[_size(work)] < NUM_FIRST_STEPS


class StepWatch:
    """The open steps of one stream to a group's ranks, and when the oldest is overdue.

    A step's duration counts from the time at which it was sent, or the previous step was done,
    whichever is later. It is done when every rank has answered it.
    """

    def __init__(self, times: StepTimes, num_ranks: int) -> None:
        self._times = times
        self._open: deque[tuple[StepWork, int]] = deque()
        """Each step's work, and the number of results that may arrive together."""
        self._num_answers = [0] * num_ranks
        self._num_done = 0
        self._since = 0.0
        self.overdue_at: float | None = None
        """When the oldest open step is overdue; None without any."""

    @property
    def num_done(self) -> int:
        """Steps that all ranks have answered."""
        return self._num_done

    @property
    def limit_s(self) -> float:
        """Seconds for the oldest step in flight and the steps that its result waits for."""
        work, max_results = self._open[0]
        return max_results * self._times.limit_s(work)

    def sent(self, work: StepWork, now: float, max_results: int = 1) -> None:
        """Record that a step was sent; its result may arrive together with those of later steps,
        `max_results` in all."""
        self._open.append((work, max_results))
        if len(self._open) == 1:
            self._begin(now)

    def answered(self, rank: int, now: float) -> list[float]:
        """Record that a rank has answered its oldest step in flight; return the durations in
        seconds of the steps that this completes.

        `now` is in the past for a result that waited to be sent with others; it counts as no
        earlier than the previous answer, which the core may have read late.
        """
        now = max(now, self._since)
        self._num_answers[rank] += 1
        durations = []
        while self._num_done < min(self._num_answers):
            self._num_done += 1
            durations.append(now - self._since)
            self._times.observe(self._open.popleft()[0], durations[-1])
            self._begin(now)
        return durations

    def _begin(self, now: float) -> None:
        self._since = now
        self.overdue_at = now + self.limit_s if self._open else None


def _num_tokens(work: StepWork) -> int:
    """Tokens computed. Moving a block counts as much as computing a token, though it takes less."""
    return work.num_tokens + work.num_moves


def _size(work: StepWork) -> tuple[bool, int]:
    return bool(work.num_prefill_tokens), _num_tokens(work).bit_length()


MAX_HANGS = 3
"""Number of consecutive hangs after which a group is no longer used; being busy with one step for
this many times its limit has the same effect."""

NUM_SOUND_STEPS = 100
"""Steps of one stream after which earlier hangs are forgotten."""


class HangCounter:
    """Counts consecutive hangs of one group's workers since they registered."""

    def __init__(self) -> None:
        self._num_hangs = 0
        self._limit_s = 0.0

    def record_stream(self, num_steps: int) -> None:
        """Record that a stream has ended after `num_steps` steps, for any reason."""
        if num_steps >= NUM_SOUND_STEPS:
            self._num_hangs = 0

    def record(self, overdue: StepOverdue) -> None:
        """Record that a stream has ended because a step was overdue."""
        self._num_hangs += 1
        self._limit_s = overdue.limit_s

    def check(self, infos: Sequence[worker_pb.GetInfoResponse]) -> None:
        """Check the state of the ranks before another stream is opened.

        Raises GroupHung when they have hung too often or for too long, and SessionFailed while one
        is still busy.
        """
        if self._num_hangs == 0:
            return
        busy = {rank: info.busy_us / 1e6 for rank, info in enumerate(infos) if info.busy_us}
        longest_s = max(busy.values(), default=0.0)
        if self._num_hangs >= MAX_HANGS or longest_s >= MAX_HANGS * self._limit_s:
            reason = f"its steps hung {self._num_hangs} times in a row"
            if busy:
                reason += f"; busy for {longest_s:.3g} s"
            raise GroupHung(reason, list(busy) or range(len(infos)))
        if busy:
            names = ", ".join(map(str, busy))
            raise SessionFailed(f"rank {names} is busy for {longest_s:.3g} s with a step that hung")
