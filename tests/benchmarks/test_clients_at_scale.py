"""The benchmark of clients at scale runs every way, and nothing fails."""

import json
from pathlib import Path

from benchmarks.clients_at_scale import main


def test_every_way_is_measured(tmp_path: Path) -> None:
    main(["--requests", "30", "--open", "10", "--tokens", "3", "--results", str(tmp_path)])
    rows = json.loads((tmp_path / "clients_at_scale.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["python", "node", "http"]
    assert [row["failed"] for row in rows] == [0, 0, 0]
    assert all(row["open"] == 30 and row["frontend_cpu_ms"] > 0 for row in rows)
