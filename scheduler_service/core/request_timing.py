"""A request's time by activity, and the events of its life.

A worker group's time is split at each result into forward pass, sampling, planning and the rest
(the wire); `StepClock` keeps the running totals of each. A request notes the totals when it
enters the batch and takes the difference when it leaves, so that a step costs nothing per
request. All times are whole microseconds, so that parts add up exactly.

A request's `Timeline` holds its transitions, never its steps: a decode adds nothing.
"""

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TypeAlias

from scheduler_service.core.request import RequestTimings
from scheduler_service.core.step_plan import StepResult


def to_us(now: float) -> int:
    """Seconds as whole microseconds."""
    return round(now * 1e6)


@dataclass(slots=True, eq=False)
class StepClock:
    """One worker group's time up to `mark_us`, split into parts that add up to it."""

    mark_us: int
    """When the last result came in."""
    plan_us: int = 0
    wire_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    unassigned_plan_us: int = 0
    """Planning since the last result. It counts as far as it delayed the worker: in a full
    pipeline planning is hidden behind the forward pass."""

    @property
    def totals(self) -> tuple[int, ...]:
        """Time so far: all of it, then its parts: wire, forward pass, sampling, planning."""
        return self.mark_us, self.wire_us, self.forward_us, self.sample_us, self.plan_us

    def advance(self, now_us: int, result: StepResult) -> int:
        """Split the time since the last result by the durations that the worker reports; return
        that time. A result that the worker held back counts from when it was ready."""
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


MAX_EVENTS = 64
NUM_FIRST_EVENTS = 16
"""First events that are kept if there are more: those left out are in the middle."""


class RequestEvent(IntEnum):
    """An event in a request's life; numbered as in `status.proto`."""

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
"""The event, its time in microseconds, and its value: tokens, or an index in `placements`."""


class Timeline:
    """A request's events in order, at most `MAX_EVENTS`."""

    __slots__ = ("entries", "placements")

    def __init__(self) -> None:
        self.entries: list[TimelineEntry] = []
        self.placements: list[str] = []
        """Ids of the worker groups that it was routed to."""

    def add(self, event: RequestEvent, now_us: int, value: int) -> None:
        """Add an event, once even if several sequences have it at the same time."""
        entry = (event, now_us, value)
        if entry in self.entries[-2:]:
            return
        self.entries.append(entry)
        if len(self.entries) > MAX_EVENTS:
            del self.entries[NUM_FIRST_EVENTS]

    def add_placement(self, worker_group_id: str, now_us: int) -> None:
        """Add that the request was routed to a worker group."""
        if len(self.placements) == MAX_EVENTS:
            del self.placements[1:]  # the first is where it began
        self.add(RequestEvent.PLACED, now_us, len(self.placements))
        self.placements.append(worker_group_id)


class RequestPhase(Enum):
    """The activity of a request, as its timings distinguish them."""

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
    timings: RequestTimings = field(default_factory=RequestTimings)
    """Durations of the phases that have ended."""
    timeline: Timeline = field(default_factory=Timeline)
    awaits_kv: bool = False
    """Whether it waits for the KV of another worker group."""
    entered: tuple[StepClock, tuple[int, ...]] | None = None
    """The worker group's clock, and its totals when the request entered the batch."""

    @classmethod
    def start(cls, now_us: int, phase: RequestPhase) -> "RequestClock":
        """A clock for a request that is submitted now."""
        return cls(now_us, phase, now_us)

    def enter_batch(self, steps: StepClock, now_us: int) -> None:
        """Record that its first sequence has entered the batch."""
        self.end_kv_wait(now_us)
        self._close_waiting(now_us)
        self.phase = RequestPhase.RUNNING
        self.entered = steps, steps.totals

    def leave_batch(self, now_us: int, phase: RequestPhase) -> None:
        """Record that its last sequence has left the batch; `phase`: the reason."""
        assert self.entered is not None
        steps, before = self.entered
        # The group's parts cover the time from the result before it entered to the last one.
        covered, *parts = (now - then for now, then in zip(steps.totals, before, strict=True))
        elapsed = max(0, now_us - self.since_us)
        excess = max(0, covered - elapsed)
        for index, part in enumerate(parts):
            surplus = min(part, excess)
            parts[index] -= surplus
            excess -= surplus
        timings = self.timings
        timings.wire_us += parts[0] + elapsed - sum(parts)
        timings.forward_us += parts[1]
        timings.sample_us += parts[2]
        timings.plan_us += parts[3]
        self.entered = None
        self.phase = phase
        self.since_us += elapsed

    def await_kv(self, now_us: int) -> None:
        """Record that it waits for KV from now on, if it is outside the batch."""
        if self.phase is not RequestPhase.RUNNING and not self.awaits_kv:
            self._close_waiting(now_us)
            self.awaits_kv = True

    def end_kv_wait(self, now_us: int) -> None:
        """Record that it waits for no KV any more, but for what it has waited for before."""
        if self.awaits_kv:
            self._close_waiting(now_us)
            self.awaits_kv = False

    def recover(self, now_us: int) -> None:
        """Record that it lost its worker group outside the batch and waits for another one."""
        assert self.phase is not RequestPhase.RUNNING
        self.end_kv_wait(now_us)
        self._close_waiting(now_us)
        self.phase = RequestPhase.RECOVERY

    def finish(self, now_us: int) -> RequestTimings:
        """End the last phase; return the timings of the ended request."""
        if self.phase is RequestPhase.RUNNING:
            self.leave_batch(now_us, RequestPhase.QUEUE)
        self._close_waiting(now_us)
        self.timings.total_us = self.since_us - self.submitted_us
        return self.timings

    def _close_waiting(self, now_us: int) -> None:
        elapsed = max(0, now_us - self.since_us)
        if self.awaits_kv:
            self.timings.transfer_us += elapsed
        elif self.phase is RequestPhase.QUEUE:
            self.timings.queue_us += elapsed
        elif self.phase is RequestPhase.PREEMPTED:
            self.timings.preempted_us += elapsed
        else:
            self.timings.recovery_us += elapsed
        self.since_us += elapsed
