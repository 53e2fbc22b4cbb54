"""The benchmark of idle time runs, and sees whether plans leave before results are back."""

import json
from pathlib import Path

from benchmarks.pipelining import main


def test_plans_leave_ahead_of_results_from_depth_two_on(tmp_path: Path) -> None:
    load = ["--step-us", "1000", "--running", "4", "--steps", "40", "--turns", "1", "--no-model"]
    main([*load, "--depth", "1", "2", "--results", str(tmp_path)])
    content = json.loads((tmp_path / "pipelining.json").read_text())
    one, two = content["rows"]
    assert (one["pipeline_depth"], two["pipeline_depth"]) == (1, 2)
    assert one["steps"] == two["steps"] == 40
    assert one["plans_sent_ahead"] == 0.0
    assert two["plans_sent_ahead"] > 0.5
    assert one["step_us_p50"] >= 1000
    assert one["idle_us_p99"] >= one["idle_us_p50"] > 0
