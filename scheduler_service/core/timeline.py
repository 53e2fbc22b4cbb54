"""What happened to one request, and when.

A request notes its transitions, never its steps: a decode adds nothing. So a timeline is there
when somebody asks for it, and costs nobody anything.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

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


Entry: TypeAlias = tuple[RequestEvent, int, int]
"""The event, when it was in microseconds, and its value: tokens, or a place in `placements`."""


class Timeline:
    """A request's events in order, at most `MAX_EVENTS`."""

    __slots__ = ("entries", "placements")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
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

    def add_placement(self, group_id: str, now_us: int) -> None:
        """Note that a worker group has taken the request."""
        if len(self.placements) == MAX_EVENTS:
            del self.placements[1:]  # the first tells where it began
        self.add(RequestEvent.PLACED, now_us, len(self.placements))
        self.placements.append(group_id)


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """A request that has ended, and whose trace is recorded."""

    request_id: str
    traceparent: str
    """The span that its spans go under."""
    entries: list[Entry]
    placements: list[str]
