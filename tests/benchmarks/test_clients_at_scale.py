"""The benchmark of clients at scale runs every way, and nothing fails."""

import json
from pathlib import Path

import pytest

from benchmarks.clients_at_scale import main


@pytest.mark.parametrize(
    ("requests", "most_open"),
    [
        (1500, 1000),
        pytest.param(10_000, 10_000, marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_every_way_is_measured_and_nothing_fails(
    requests: int, most_open: int, tmp_path: Path
) -> None:
    load = ["--requests", str(requests), "--open", str(most_open), "--tokens", "3"]
    main([*load, "--results", str(tmp_path)])
    rows = json.loads((tmp_path / "clients_at_scale.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["python", "node", "http"]
    assert [row["failed"] for row in rows] == [0, 0, 0]
    assert [row["open"] for row in rows[:2]] == [most_open] * 2
    assert all(row["frontend_cpu_ms"] > 0 and row["client_kb"] > 0 for row in rows)
