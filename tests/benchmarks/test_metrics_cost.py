"""What is measured of the metrics' cost is measured at all; how much it is, is not held to."""

import json
from pathlib import Path

from benchmarks import metrics_cost


def test_each_line_tells_of_steps_and_scrapes(tmp_path: Path) -> None:
    metrics_cost.main(["--running", "1", "16", "--steps", "5", "--results", str(tmp_path)])
    [file] = tmp_path.iterdir()
    rows = json.loads(file.read_text())["rows"]
    assert [row["running"] for row in rows] == [1, 16]
    for row in rows:
        assert row["step_us"] > 0
        assert row["scrape_on_core_us"] > 0
        ratio = (row["step_us"] + row["metrics_us"]) / row["step_us"]
        assert abs(row["with_to_without"] - ratio) < 0.001
