"""Points of the charts: rates and percentiles, from counters that only grow."""

import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from pagewire.status_rates import RecentStatuses
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


class Series:
    """The points of the last minutes."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.points: deque[Point] = deque()
        self._clock = clock
        self.recent = RecentStatuses()

    def add(self, status: pb.EngineStatus) -> Point:
        """The point for a status that is newer than all before."""
        self.recent.add(status)
        now = self._clock()
        point = [round(now, 2), *self._values(status)]
        self.points.append(point)
        while (self.points[0][0] or 0.0) < now - KEPT_S:
            self.points.popleft()
        return point

    def _values(self, status: pb.EngineStatus) -> Point:
        recent = self.recent
        total = sum(group.num_gpu_blocks for group in status.groups)
        free = sum(group.num_free_gpu_blocks for group in status.groups)
        return [
            _rounded(recent.per_second(lambda s: s.num_generated_tokens), 1),
            _rounded(recent.per_second(lambda s: s.num_prefill_tokens), 1),
            status.num_running,
            status.num_waiting,
            status.num_swapped,
            *self._percentiles(lambda s: s.time_to_first_token),
            *self._percentiles(lambda s: s.inter_token_latency),
            round(1 - free / total, 4) if total else None,
        ]

    def _percentiles(
        self, histogram_of: Callable[[pb.EngineStatus], pb.LatencyHistogram]
    ) -> list[float | None]:
        values = (self.recent.percentile(histogram_of, share) for share in (0.5, 0.9, 0.99))
        return [_rounded(None if value is None else 1000 * value, 3) for value in values]


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
