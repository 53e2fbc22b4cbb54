"""Whether to retry after a failure, and how long to wait.

Nothing here sleeps or uses gRPC: the clients do the waiting.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagewire_client import errors


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    """Limits of retries while a server is unreachable or full."""

    max_retries: int = 5
    """Retries of a request for which nothing was received yet, while no server has ever been
    reached, or while the server that was reached cannot serve the request."""
    recovery_timeout_s: float = 60.0
    """How long to retry otherwise, from the first failure: after a connection broke, begun streams
    included, and while the server is full and none of the client's requests proceeds. Long enough
    for a server to restart and to load its model."""
    initial_backoff_s: float = 0.1
    """First delay; each further one is twice as long."""
    max_backoff_s: float = 2.0
    """Longest delay."""

    def backoff_s(self, retries: int, draw: float) -> float:
        """The delay before retry number `retries` (from 0); `draw` in [0, 1) is the jitter."""
        # The exponent is bounded because a long recovery would overflow a float.
        longest = min(self.max_backoff_s, self.initial_backoff_s * 2 ** min(retries, 32))
        return longest * (0.5 + draw / 2)


NO_RETRIES = RetryPolicy(max_retries=0, recovery_timeout_s=0.0)
"""No retries."""


NEVER_S = 1e9
"""From this timeout on, some 30 years, a call has no deadline: gRPC's clock ends in 2262, and an
instant after that counts as passed."""


class Deadline:
    """The instant by which a call with all its retries must be over; None and `NEVER_S`: never.

    Raises ValueError for what is no number above 0.
    """

    def __init__(
        self, timeout_s: float | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if timeout_s is not None and not _is_positive(timeout_s):
            raise ValueError(f"timeout: expected a number of seconds above 0, got {timeout_s!r}")
        self._clock = clock
        self._end: float | None = None
        if timeout_s is not None and timeout_s < NEVER_S:
            self._end = clock() + timeout_s

    def remaining_s(self) -> float | None:
        """Seconds left, not below 0; None without a deadline."""
        return None if self._end is None else max(0.0, self._end - self._clock())


def _is_positive(value: Any) -> bool:
    try:
        return bool(value > 0)
    except TypeError:
        return False


class Attempts:
    """The history of one request's attempts, which decides whether to retry."""

    def __init__(
        self,
        policy: RetryPolicy,
        deadline: Deadline,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._deadline = deadline
        self._clock = clock
        self._draw = draw
        self._retries = 0
        self._begun = False
        self._failing_since: float | None = None

    def progressed(self) -> None:
        """Note that something was received: the count of failures restarts."""
        self._begun = True
        self._retries = 0
        self._failing_since = None

    def delay_after(self, error: errors.PagewireError) -> float:
        """Seconds to wait before the next attempt; raises if there is to be none.

        Raises `error` itself, or DeadlineExceeded if the deadline comes before the next attempt.
        """
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        if not self._is_passing(error) or self._is_exhausted(error, now):
            raise error
        delay = self._policy.backoff_s(self._retries, self._draw())
        delay = max(delay, error.retry_delay_s or 0.0)
        remaining = self._deadline.remaining_s()
        if remaining is not None and remaining <= delay:
            raise errors.DeadlineExceeded(f"timeout while retrying: {error.message}") from error
        self._retries += 1
        return delay

    def _is_passing(self, error: errors.PagewireError) -> bool:
        """Whether the same request may succeed later."""
        if isinstance(error, errors.Overloaded):
            return error.retry_delay_s is not None
        return isinstance(error, errors.Unavailable)

    def _is_exhausted(self, error: errors.PagewireError, now: float) -> bool:
        assert self._failing_since is not None
        since = self._failing_since
        if isinstance(error, errors.Overloaded):  # perhaps with other requests of this client
            since = max(since, error.progressed_at)
        if self._begun or _will_be_over(error):
            return now - since >= self._policy.recovery_timeout_s
        return self._retries >= self._policy.max_retries


def _will_be_over(error: errors.PagewireError) -> bool:
    """Whether the cause is a server that restarts or is full, rather than one that is missing."""
    is_restarting = error.was_connected and error.reason in ("", "SHUTTING_DOWN")
    return is_restarting or isinstance(error, errors.Overloaded)
