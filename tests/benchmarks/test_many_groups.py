"""The benchmark of many worker groups, on the smallest scale."""

import json
from pathlib import Path

from benchmarks import many_groups

FEW = ["--rows", "4", "--prompt-tokens", "8", "--output-tokens", "8", "--seconds", "0.3"]


def test_two_groups_are_measured(tmp_path: Path) -> None:
    sizes = ["--groups", "1", "2", "--step-us", "2000"]
    many_groups.main([*FEW, *sizes, "--results", str(tmp_path)])
    results = json.loads((tmp_path / "many_groups.json").read_text())
    assert [row["groups"] for row in results["rows"]] == [1, 2]
    assert results["rows"][0]["of_linear"] == 1.0
    for row in results["rows"]:
        assert row["tokens_per_s"] > 0
        assert 0 < row["rows_per_step"] <= 4
        assert row["core_cores"] > 0


def test_what_limits_is_the_process_or_the_machine() -> None:
    idle = {
        "step_ms": 5.0,
        "core_cores": 0.3,
        "worker_cores": 0.1,
        "all_worker_cores": 0.4,
        "frontend_cores": 0.1,
    }
    rows = [
        {"groups": 1, "tokens_per_s": 100} | idle,
        {"groups": 4, "tokens_per_s": 300} | idle | {"core_cores": 0.95},
        {"groups": 8, "tokens_per_s": 320} | idle | {"all_worker_cores": 1.5},
    ]
    many_groups.compare(rows, num_cores=2)
    assert [row["limited_by"] for row in rows] == ["", "core", "machine"]
    assert [row["of_linear"] for row in rows] == [1.0, 0.75, 0.4]
