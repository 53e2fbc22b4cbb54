"""The benchmark of recovery kills processes and reports the resulting pauses."""

import json
from pathlib import Path

import pytest

from benchmarks.recovery import Stream, main
from pagewire_client import SamplingParams


def test_it_writes_a_line_for_each_kind_of_process(tmp_path: Path) -> None:
    main(["--kills", "1", "--model", "simulated", "--results", str(tmp_path)])
    rows = json.loads((tmp_path / "recovery_simulated.json").read_text())["rows"]
    assert [row["victim"] for row in rows] == ["worker", "core", "frontend"]
    assert all(row["streams"] > 0 for row in rows)
    assert all(0 < row["p50_ms"] <= row["p99_ms"] <= row["max_ms"] for row in rows)


@pytest.mark.parametrize(
    ("arrivals", "recovery_s"),
    [
        ([9.9, 10.3, 10.31, 10.9], 0.3),  # a later pause is another matter
        ([9.9, 10.01, 10.02, 10.3, 10.31], 0.3),  # what was on its way is not the next token
        ([9.0, 9.9, 10.02, 10.03], 0.02),  # nor is the time before the kill
    ],
)
def test_the_next_token_is_the_one_behind_the_pause(
    arrivals: list[float], recovery_s: float
) -> None:
    stream = Stream([1], SamplingParams(), arrivals)
    assert stream.recovery_s(killed_at=10.0) == pytest.approx(recovery_s)
