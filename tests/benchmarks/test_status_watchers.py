"""The benchmark of status watchers, on the smallest scale."""

import pytest

from benchmarks import status_watchers


def test_rounds_with_watchers_and_without_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--groups", "2", "--blocks", "500", "--watchers", "3", "--rows", "2"]
    times = ["--step-us", "2000", "--output-tokens", "8", "--seconds", "0.3", "--rounds", "1"]
    status_watchers.main([*sizes, *times])
    assert "% of the core's loop" in capsys.readouterr().out


def test_the_cost_is_the_difference_of_medians() -> None:
    shares = [(0, 0.1), (4, 0.3), (0, 0.2), (4, 0.5), (0, 0.9), (4, 0.4)]
    rows = [{"watchers": watchers, "loop_share": share} for watchers, share in shares]
    assert status_watchers.cost(rows) == pytest.approx(0.2)
