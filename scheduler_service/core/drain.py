"""How fast queues drain, as measured, and how long it is until there is room in them."""

from collections.abc import Iterable

from scheduler_service.core.stats.throughput import MovingRatio

LEAST_DELAY_S, MOST_DELAY_S = 0.1, 60.0
_WEIGHT = 0.04
"""Of the newest departure in the averages: about the last 25 count, as answers differ in length."""
_LEAST_SAMPLES = 8


class DrainRate:
    """Moving averages of what leaves a queue in the time in which something waits in it.

    What leaves at once, without a wait, says nothing of how long one would be.
    """

    def __init__(self) -> None:
        self._requests = MovingRatio(_WEIGHT)
        self._tokens = MovingRatio(_WEIGHT)
        self._since_us: int | None = None

    @property
    def us_per_request(self) -> float | None:
        """Time in which one request leaves; None if too little has been measured."""
        return _settled(self._requests)

    @property
    def us_per_token(self) -> float | None:
        """Time in which requests leave that have one prompt token together."""
        return _settled(self._tokens)

    def note(self, now_us: int, *, num_requests: int, num_tokens: int, is_empty: bool) -> None:
        """So many requests have left since the last note, and whether none waits now."""
        if num_requests and self._since_us is not None:
            self._requests.add(now_us - self._since_us, num_requests)
            self._tokens.add(now_us - self._since_us, num_tokens)
        if is_empty:
            self._since_us = None
        elif num_requests or self._since_us is None:
            self._since_us = now_us

    def interrupt(self) -> None:
        """The time since the last note does not count: nothing could have left."""
        self._since_us = None


def _settled(ratio: MovingRatio) -> float | None:
    return ratio.mean if ratio.num_values >= _LEAST_SAMPLES else None


def retry_delay_s(
    rates: Iterable[DrainRate], *, num_requests: int, num_tokens: int, unmeasured_s: float
) -> float:
    """Seconds until so many requests, with so many prompt tokens, have left queues that drain side
    by side; `unmeasured_s` if none of them has been measured."""
    measured = [
        (1 / rate.us_per_request, 1 / rate.us_per_token)
        for rate in rates
        if rate.us_per_request and rate.us_per_token
    ]
    if not measured:
        return unmeasured_s
    requests_per_us = sum(requests for requests, _ in measured)
    tokens_per_us = sum(tokens for _, tokens in measured)
    return bounded_s(max(num_requests / requests_per_us, num_tokens / tokens_per_us) / 1e6)


def bounded_s(seconds: float) -> float:
    """A delay that is worth waiting, and not too long to look again."""
    return min(max(seconds, LEAST_DELAY_S), MOST_DELAY_S)
