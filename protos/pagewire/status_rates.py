"""Rates and percentiles of a deployment, from its successive statuses: counters that only grow."""

from collections import deque
from collections.abc import Callable, Sequence

from pagewire.v1 import status_pb2 as pb

RATE_WINDOW_S = 3.0
PERCENTILE_WINDOW_S = 15.0


class RecentStatuses:
    """The statuses of the longest window, without requests and blocks."""

    def __init__(self) -> None:
        self._statuses: deque[pb.EngineStatus] = deque()

    def add(self, status: pb.EngineStatus) -> None:
        """Add a status that is newer than all before; those of an earlier core are forgotten."""
        if self._statuses and status.uptime_s < self._statuses[-1].uptime_s:
            self._statuses.clear()
        self._statuses.append(_counters(status))
        while status.uptime_s - self._statuses[0].uptime_s > PERCENTILE_WINDOW_S:
            self._statuses.popleft()

    def per_second(self, count_of: Callable[[pb.EngineStatus], int]) -> float | None:
        """How fast a counter grows; None while there is only one status."""
        now, before = self._statuses[-1], self._before()
        elapsed = now.uptime_s - before.uptime_s
        return (count_of(now) - count_of(before)) / elapsed if elapsed > 0 else None

    def steps_per_second(self, group_id: str) -> float | None:
        """Steps per second of one worker group; None while there is only one status."""

        def steps(status: pb.EngineStatus) -> int:
            return sum(group.num_steps for group in status.groups if group.group_id == group_id)

        rate = self.per_second(steps)
        return None if rate is None else max(0.0, rate)

    def percentile(
        self, histogram_of: Callable[[pb.EngineStatus], pb.LatencyHistogram], share: float
    ) -> float | None:
        """The quantile `share` of recent latencies, in seconds; None if there were none."""
        now, before = histogram_of(self._statuses[-1]), histogram_of(self._statuses[0])
        counts = list(now.counts)
        for bucket, count in enumerate(before.counts):
            counts[bucket] -= count
        return quantile(counts, share, now.first_bound_s, now.growth)

    def _before(self) -> pb.EngineStatus:
        """The newest status that is as old as the window of rates, or else the oldest."""
        now = self._statuses[-1].uptime_s
        old = [s for s in self._statuses if now - s.uptime_s >= RATE_WINDOW_S - 0.01]
        return old[-1] if old else self._statuses[0]


def quantile(
    counts: Sequence[int], share: float, first_bound: float, growth: float
) -> float | None:
    """The value below which this share of a histogram's observations lies, in the unit of its
    bounds and with the precision of its buckets. None without observations."""
    rank = share * sum(counts)
    if not rank:
        return None
    below = 0
    for bucket, count in enumerate(counts):
        if below + count >= rank:
            part = (rank - below) / count
            return float(first_bound * growth ** (bucket - 1 + part))
        below += count
    raise AssertionError("ranks are within the sum")


def _counters(status: pb.EngineStatus) -> pb.EngineStatus:
    """The counters from which rates are computed."""
    return pb.EngineStatus(
        uptime_s=status.uptime_s,
        num_generated_tokens=status.num_generated_tokens,
        num_prefill_tokens=status.num_prefill_tokens,
        time_to_first_token=status.time_to_first_token,
        inter_token_latency=status.inter_token_latency,
        groups=[
            pb.WorkerGroupStatus(group_id=g.group_id, num_steps=g.num_steps) for g in status.groups
        ],
    )
