"""Points of the charts: rates and percentiles, from counters that only grow."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

from pagewire.v1 import status_pb2 as pb

Point: TypeAlias = list[float | None]
"""Values in the order of `FIELDS`; None where nothing is known."""

FIELDS = (
    "time",
    "output",
    "prompt",
    "running",
    "waiting",
    "swapped",
    "firstTokenP50",
    "firstTokenP90",
    "firstTokenP99",
    "interTokenP50",
    "interTokenP90",
    "interTokenP99",
    "used",
)
"""`time`: seconds since 1970; `output`, `prompt`: tokens a second; percentiles in milliseconds;
`used`: the share of device blocks in use."""

KEPT_S = 600.0
RATE_WINDOW_S = 3.0
PERCENTILE_WINDOW_S = 15.0


class Series:
    """The points of the last minutes."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.points: deque[Point] = deque()
        self._clock = clock
        self._recent: deque[pb.EngineStatus] = deque()
        """Statuses of the longest window, without requests and blocks; the last one last."""

    def add(self, status: pb.EngineStatus) -> Point:
        """The point for a status that is newer than all before."""
        if self._recent and status.uptime_s < self._recent[-1].uptime_s:
            self._recent.clear()  # another core, whose counters begin at 0
        self._recent.append(_counters(status))
        while status.uptime_s - self._recent[0].uptime_s > PERCENTILE_WINDOW_S:
            self._recent.popleft()
        now = self._clock()
        point = [round(now, 2), *self._values(status)]
        self.points.append(point)
        while (self.points[0][0] or 0.0) < now - KEPT_S:
            self.points.popleft()
        return point

    def steps_per_s(self) -> dict[str, float]:
        """Steps a second by worker group."""
        rates: dict[str, float] = {}
        now, before = self._recent[-1], self._before(RATE_WINDOW_S)
        elapsed = now.uptime_s - before.uptime_s
        former = {group.group_id: group.num_steps for group in before.groups}
        for group in now.groups:
            steps = group.num_steps - former.get(group.group_id, group.num_steps)
            rates[group.group_id] = max(0, steps) / elapsed if elapsed else 0.0
        return rates

    def _values(self, status: pb.EngineStatus) -> Point:
        before = self._before(RATE_WINDOW_S)
        elapsed = status.uptime_s - before.uptime_s
        output = status.num_generated_tokens - before.num_generated_tokens
        prompt = status.num_prefill_tokens - before.num_prefill_tokens
        total = sum(group.num_gpu_blocks for group in status.groups)
        free = sum(group.num_free_gpu_blocks for group in status.groups)
        return [
            round(output / elapsed, 1) if elapsed else None,
            round(prompt / elapsed, 1) if elapsed else None,
            status.num_running,
            status.num_waiting,
            status.num_swapped,
            *self._percentiles(lambda s: s.time_to_first_token),
            *self._percentiles(lambda s: s.inter_token_latency),
            round(1 - free / total, 4) if total else None,
        ]

    def _before(self, seconds: float) -> pb.EngineStatus:
        """The newest status that is at least this old, or else the oldest."""
        now = self._recent[-1].uptime_s
        old = [s for s in self._recent if now - s.uptime_s >= seconds - 0.01]
        return old[-1] if old else self._recent[0]

    def _percentiles(
        self, histogram_of: Callable[[pb.EngineStatus], pb.LatencyHistogram]
    ) -> list[float | None]:
        now, before = histogram_of(self._recent[-1]), histogram_of(self._recent[0])
        counts = list(now.counts)
        for bucket, count in enumerate(before.counts):
            counts[bucket] -= count
        bounds = now.first_bound_s * 1000, now.growth
        return [percentile(counts, share, *bounds) for share in (0.5, 0.9, 0.99)]


def percentile(
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
            return float(round(first_bound * growth ** (bucket - 1 + part), 3))
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
