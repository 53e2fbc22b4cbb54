"""Numbers that only grow, kept on one thread.

The client library's own counters take a lock for each change, as any thread may make it, and look
for a histogram's bucket one by one: microseconds, which a frontend would pay for every token.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.utils import floatToGoString


class Histogram:
    """How often values fell into each bucket, and their sum.

    `bounds` are the buckets' upper ends, each in its bucket; a last bucket has all above.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, or several that are alike."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: (upper end, values up to it)."""
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._counts)), strict=True))
