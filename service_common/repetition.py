"""Failures that come again and again, told of seldom."""

import time
from collections.abc import Callable

INTERVAL_S = 30.0
"""A failure that lasts is told of this often."""


class Repetition:
    """Which of many failures in a row deserve a line in the log.

    The first, each that differs from the last one told, and one every `INTERVAL_S`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told: str | None = None
        self._told_at = 0.0

    def is_news(self, failure: str) -> bool:
        """Whether to tell of `failure`; it counts as told then."""
        now = self._clock()
        if failure == self._told and now - self._told_at < INTERVAL_S:
            return False
        self._told, self._told_at = failure, now
        return True

    def end(self) -> None:
        """It went well: whatever fails next is news."""
        self._told = None
