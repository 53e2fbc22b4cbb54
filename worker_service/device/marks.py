"""Points in a device's work that the host can wait for, and the time between them."""

from collections.abc import Callable
from typing import Protocol

import torch

from worker_service.clock import monotonic_us


class Mark(Protocol):
    """A point in what was queued to a device: all that was queued before it."""

    @property
    def is_reached(self) -> bool:
        """Whether the device has got there."""
        ...

    def wait(self) -> None:
        """Wait until it has; others may use the interpreter meanwhile."""
        ...

    def us_since(self, earlier: "Mark") -> int:
        """Microseconds of device time between two marks that are reached."""
        ...


class CudaMark:
    """An event on the current stream of the thread that makes it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    @property
    def is_reached(self) -> bool:
        """Whether the device has got there."""
        return self._event.query()

    def wait(self) -> None:
        """Wait until it has."""
        # A thread that has no device yet would take the first one, and memory there.
        with torch.cuda.device(self._event.device):
            self._event.synchronize()

    def us_since(self, earlier: Mark) -> int:
        """Microseconds between the two."""
        assert isinstance(earlier, CudaMark)
        return round(earlier._event.elapsed_time(self._event) * 1000)


class HostMark:
    """On a CPU what was queued is done."""

    is_reached = True

    def __init__(self) -> None:
        self._time_us = monotonic_us()

    def wait(self) -> None:
        """There is nothing to wait for."""

    def us_since(self, earlier: Mark) -> int:
        """Microseconds between the two."""
        assert isinstance(earlier, HostMark)
        return self._time_us - earlier._time_us


def marks(device: torch.device) -> Callable[[], Mark]:
    """Makes marks in a device's work."""
    return CudaMark if device.type == "cuda" else HostMark
