"""Points of the dashboard's charts from counters that only grow."""

import pytest

from pagewire.status_rates import PERCENTILE_WINDOW_S
from pagewire.v1 import status_pb2 as pb
from scheduler_service.frontend.http.dashboard.series import FIELDS, KEPT_S, Series


def status(uptime_s: float, generated: int = 0, **changes: object) -> pb.EngineStatus:
    return pb.EngineStatus(uptime_s=uptime_s, num_generated_tokens=generated, **changes)  # type: ignore[arg-type]


def histogram(*counts: int) -> pb.LatencyHistogram:
    return pb.LatencyHistogram(first_bound_s=0.001, growth=2.0, counts=counts)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def of(point: list[float | None], field: str) -> float | None:
    return point[FIELDS.index(field)]


def test_rates_are_of_the_last_seconds() -> None:
    series = Series(Clock())
    assert of(series.add(status(0.0)), "output") is None
    points = [series.add(status(second, 100 * second)) for second in range(1, 5)]
    points.append(series.add(status(5, 400)))
    assert [of(point, "output") for point in points] == [100, 100, 100, 100, 66.7]


def test_a_new_core_begins_anew() -> None:
    series = Series(Clock())
    series.add(status(50, 9_000))
    assert of(series.add(status(1, 10)), "output") is None
    assert of(series.add(status(2, 30)), "output") == 20


def test_percentiles_forget_what_is_past_the_window() -> None:
    series = Series(Clock())
    series.add(status(0, inter_token_latency=histogram()))
    point = series.add(status(1, inter_token_latency=histogram(0, 10)))
    assert of(point, "interTokenP50") == pytest.approx(2**0.5, abs=1e-3)
    later = 1 + PERCENTILE_WINDOW_S
    point = series.add(status(later, inter_token_latency=histogram(0, 10, 0, 10)))
    assert of(point, "interTokenP50") == pytest.approx(4 * 2**0.5, abs=1e-3)


def test_points_are_kept_for_minutes() -> None:
    clock = Clock()
    series = Series(clock)
    for second in range(int(KEPT_S) + 100):
        clock.now += 1
        series.add(status(second))
    assert len(series.points) == KEPT_S + 1


def test_steps_are_counted_by_worker_group() -> None:
    series = Series(Clock())
    for second, steps in enumerate((10, 30)):
        group = pb.WorkerGroupStatus(group_id="g", num_steps=steps, num_gpu_blocks=4)
        point = series.add(status(second, groups=[group]))
    assert series.recent.steps_per_second("g") == 20.0
    assert of(point, "used") == 1.0
