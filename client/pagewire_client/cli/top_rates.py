"""What happens per second, and how long things take, from statuses one after another."""

from collections import deque
from collections.abc import Callable

from pagewire.v1.status_pb2 import EngineStatus, LatencyHistogram

_RATE_WINDOW_S = 3.0
_PERCENTILE_WINDOW_S = 15.0


class Rates:
    """Differences between the newest status and earlier ones."""

    def __init__(self) -> None:
        self._recent: deque[EngineStatus] = deque()

    def add(self, status: EngineStatus) -> None:
        """Take in a status that is newer than those before."""
        if self._recent and status.uptime_s < self._recent[-1].uptime_s:
            self._recent.clear()  # another core
        self._recent.append(status)
        while status.uptime_s - self._recent[0].uptime_s > _PERCENTILE_WINDOW_S:
            self._recent.popleft()

    def per_second(self, count_of: Callable[[EngineStatus], int]) -> float | None:
        """How fast a counter grows; None as long as there is one status only."""
        now = self._recent[-1]
        before = self._recent[0]
        for status in self._recent:
            if now.uptime_s - status.uptime_s >= _RATE_WINDOW_S:
                before = status
        elapsed = now.uptime_s - before.uptime_s
        return (count_of(now) - count_of(before)) / elapsed if elapsed > 0 else None

    def steps_per_second(self, group_id: str) -> float | None:
        """Of one worker group."""

        def steps(status: EngineStatus) -> int:
            found = [group.num_steps for group in status.groups if group.group_id == group_id]
            return found[0] if found else 0

        rate = self.per_second(steps)
        return None if rate is None else max(0.0, rate)

    def percentile(
        self, histogram_of: Callable[[EngineStatus], LatencyHistogram], share: float
    ) -> float | None:
        """Seconds that a share of what was counted lately took at most; None if nothing was."""
        now, before = histogram_of(self._recent[-1]), histogram_of(self._recent[0])
        counts = list(now.counts)
        for bucket, count in enumerate(before.counts):
            counts[bucket] -= count
        rank = share * sum(counts)
        if not rank:
            return None
        below = 0
        for bucket, count in enumerate(counts):
            if below + count >= rank:
                part = (rank - below) / count
                return float(now.first_bound_s * now.growth ** (bucket - 1 + part))
            below += count
        raise AssertionError("ranks are within the sum")
