"""Where a request's time goes, and what happened to it when.

A worker group's time is cut at each result into forward pass, sampling, planning and the rest
(the wire); `StepClock` keeps the running totals of each. A request notes the totals when it
enters the batch and takes the difference when it leaves, so that a step costs nothing per
request. All times are whole microseconds, so that parts add up exactly.

A request's `Timeline` holds its transitions, never its steps: a decode adds nothing.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TypeAlias

from scheduler_service.core.engine_outputs import RequestTimings
from scheduler_service.core.step_plan import StepResult


def to_us(now: float) -> int:
    """Seconds as whole microseconds."""
    return round(now * 1e6)


@dataclass(slots=True, eq=False)
class StepClock:
    """One worker group's time up to `mark_us`, cut into parts that add up to it."""

    mark_us: int
    """When the last result came in."""
    plan_us: int = 0
    wire_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    unassigned_plan_us: int = 0
    """Planning since the last result. It counts as far as it delayed the worker: in a full
    pipeline planning is hidden behind the forward pass."""

    def advance(self, now_us: int, result: StepResult) -> int:
        """Cut the time since the last result by what the worker reports about its step; how much
        it is. One that was held back counts as of when it might have come."""
        elapsed_us = rest = max(0, now_us - result.held_us - self.mark_us)
        self.mark_us += rest
        part = min(rest, result.cache_ops_us + result.forward_us)
        self.forward_us += part
        rest -= part
        part = min(rest, result.sample_us)
        self.sample_us += part
        rest -= part
        part = min(rest, self.unassigned_plan_us)
        self.plan_us += part
        self.wire_us += rest - part
        self.unassigned_plan_us = 0
        return elapsed_us


class RequestPhase(Enum):
    """What a request is doing, according to its timings."""

    QUEUE = "queue"
    RUNNING = "running"
    PREEMPTED = "preempted"
    RECOVERY = "recovery"


@dataclass(slots=True, eq=False)
class RequestClock:
    """One request's time since it was submitted, phase by phase."""

    submitted_us: int
    phase: RequestPhase
    since_us: int
    """When the phase began."""
    timings: RequestTimings
    """Of the phases that are over."""
    entered: tuple[StepClock, int, int, int, int, int] | None = None
    """The worker group's clock, and its totals when the request entered the batch."""

    @classmethod
    def start(cls, now_us: int, phase: RequestPhase) -> "RequestClock":
        """A clock for a request that is submitted now."""
        return cls(now_us, phase, now_us, RequestTimings())

    def enter_batch(self, steps: StepClock, now_us: int) -> None:
        """Its first sequence is in the batch."""
        self._close_waiting(now_us)
        self.phase = RequestPhase.RUNNING
        self.entered = (
            steps,
            steps.mark_us,
            steps.plan_us,
            steps.wire_us,
            steps.forward_us,
            steps.sample_us,
        )

    def leave_batch(self, now_us: int, phase: RequestPhase) -> None:
        """Its last sequence left the batch, and why."""
        assert self.entered is not None
        steps, mark, plan, wire, forward, sample = self.entered
        # The group's parts cover the time from the result before it entered to the last one.
        parts = [
            steps.wire_us - wire,
            steps.forward_us - forward,
            steps.sample_us - sample,
            steps.plan_us - plan,
        ]
        elapsed = max(0, now_us - self.since_us)
        excess = max(0, steps.mark_us - mark - elapsed)
        for index, part in enumerate(parts):
            taken = min(part, excess)
            parts[index] -= taken
            excess -= taken
        timings = self.timings
        timings.wire_us += parts[0] + elapsed - sum(parts)
        timings.forward_us += parts[1]
        timings.sample_us += parts[2]
        timings.plan_us += parts[3]
        self.entered = None
        self.phase = phase
        self.since_us += elapsed

    def recover(self, now_us: int) -> None:
        """It is in no batch, and from now on waits for another worker group."""
        assert self.phase is not RequestPhase.RUNNING
        self._close_waiting(now_us)
        self.phase = RequestPhase.RECOVERY

    def finish(self, now_us: int) -> RequestTimings:
        """The whole account; the request is over."""
        if self.phase is RequestPhase.RUNNING:
            self.leave_batch(now_us, RequestPhase.QUEUE)
        self._close_waiting(now_us)
        self.timings.total_us = self.since_us - self.submitted_us
        return self.timings

    def _close_waiting(self, now_us: int) -> None:
        elapsed = max(0, now_us - self.since_us)
        if self.phase is RequestPhase.QUEUE:
            self.timings.queue_us += elapsed
        elif self.phase is RequestPhase.PREEMPTED:
            self.timings.preempted_us += elapsed
        else:
            self.timings.recovery_us += elapsed
        self.since_us += elapsed


MAX_EVENTS = 64
NUM_FIRST_EVENTS = 16
"""How many of the first are kept where there are more: what is left out is in the middle."""


class RequestEvent(IntEnum):
    """What can happen; the numbers are those of the contract (`status.proto`)."""

    QUEUED = 1
    RESUMED = 2
    PLACED = 3
    STARTED = 4
    PREFILLED = 5
    FIRST_TOKEN = 6
    PREEMPTED = 7
    SWAPPED_OUT = 8
    SWAPPED_IN = 9
    WORKER_LOST = 10
    MOVED = 11
    ENDED = 12


TimelineEntry: TypeAlias = tuple[RequestEvent, int, int]
"""The event, when it was in microseconds, and its value: tokens, or a place in `placements`."""


class Timeline:
    """A request's events in order, at most `MAX_EVENTS`."""

    __slots__ = ("entries", "placements")

    def __init__(self) -> None:
        self.entries: list[TimelineEntry] = []
        self.placements: list[str] = []
        """Ids of the worker groups that it was placed in."""

    def add(self, event: RequestEvent, now_us: int, value: int) -> None:
        """Note an event. Several sequences may have the same at once; it is noted once."""
        entry = (event, now_us, value)
        if entry in self.entries[-2:]:
            return
        self.entries.append(entry)
        if len(self.entries) > MAX_EVENTS:
            del self.entries[NUM_FIRST_EVENTS]

    def add_placement(self, worker_group_id: str, now_us: int) -> None:
        """Note that a worker group has taken the request."""
        if len(self.placements) == MAX_EVENTS:
            del self.placements[1:]  # the first is where it began
        self.add(RequestEvent.PLACED, now_us, len(self.placements))
        self.placements.append(worker_group_id)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that has ended, and whose trace is recorded."""

    request_id: str
    traceparent: str
    """The span that its spans go under."""
    entries: list[TimelineEntry]
    placements: list[str]
