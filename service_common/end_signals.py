"""Signals that ask a process to end."""

import signal
import time
from collections.abc import Callable

SAME_REQUEST_S = 0.5
"""Signals that follow the first one within this time are of the same request. A supervisor that
stops a group of processes signals all of them, and a process that started others then signals these
once more."""


def end_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask this process to end: SIGTERM, SIGINT, and the SIGHUP of a terminal that
    ends, unless it is ignored, as under `nohup`."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *(() if is_ignored else (signal.SIGHUP,)))


class EndSignals:
    """Distinguishes a second request to end, which ends a process at once, from the first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first_s: float | None = None

    def is_second_request(self, number: int) -> bool:
        """Whether the signal that has just come is of a second request. A SIGHUP never is: both the
        kernel and the shell send one when a terminal ends."""
        now_s = self._clock()
        if self._first_s is None:
            self._first_s = now_s
        return number != signal.SIGHUP and now_s - self._first_s > SAME_REQUEST_S
