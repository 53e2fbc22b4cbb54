"""How long things took, counted in buckets that grow by a constant factor."""

from collections.abc import Iterable
from math import ceil, log2

FIRST_BOUND_US = 100
BUCKETS_PER_DOUBLING = 4
GROWTH = 2 ** (1 / BUCKETS_PER_DOUBLING)
NUM_BUCKETS = 96
"""Up to 24 doublings of the first bound: 28 minutes."""


class LatencyHistogram:
    """Numbers by bucket: bucket i holds what took up to `FIRST_BOUND_US * GROWTH**i`.

    They only grow, so that a reader takes the difference of any two readings for the time between.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = [0] * NUM_BUCKETS

    def add(self, us: int, number: int = 1) -> None:
        """Something took so many microseconds, so many times."""
        bucket = 0
        if us > FIRST_BOUND_US:
            bucket = min(ceil(BUCKETS_PER_DOUBLING * log2(us / FIRST_BOUND_US)), NUM_BUCKETS - 1)
        self.counts[bucket] += number


def summed(histograms: Iterable[LatencyHistogram]) -> list[int]:
    """The counts of several together."""
    none = [0] * NUM_BUCKETS
    return [sum(bucket) for bucket in zip(none, *(h.counts for h in histograms), strict=True)]
