"""Events of a run with their times, to find the cause of a difference."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Event:
    """A disturbance, or an observation of a stream."""

    at_s: float
    """Seconds since the timeline began."""
    subject: str
    """Which process, link or stream."""
    what: str

    def __str__(self) -> str:
        return f"{self.at_s:8.2f} s  {self.subject:24} {self.what}"


class Timeline:
    """All events of a run in their order."""

    def __init__(
        self, path: Path | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`path`: a file to which each event is written as it happens."""
        self._path = path
        self._clock = clock
        self._began_at = clock()
        self.events: list[Event] = []

    @property
    def now_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began_at

    def note(self, subject: str, what: str) -> None:
        """Record an event now."""
        event = Event(self.now_s, subject, what)
        self.events.append(event)
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{event}\n")

    def __str__(self) -> str:
        return "\n".join(str(event) for event in self.events)
