"""The endurance benchmark runs its services, checks their answers and fits a slope."""

import json
from pathlib import Path

import pytest

from benchmarks.endurance import Memory, main


def test_it_writes_a_line_for_each_process(tmp_path: Path) -> None:
    main(["--requests", "50", "--rounds", "5", "--results", str(tmp_path)])
    content = json.loads((tmp_path / "endurance.json").read_text())
    assert content["requests"] == 50
    names = {line["process"] for line in content["processes"]}
    assert names == {"core", "frontend-0", "worker-0", "worker-1"}
    assert all(line["rss_mib_at_the_end"] > 10 for line in content["processes"])


def test_the_slope_leaves_out_the_first_fifth() -> None:
    memory = Memory("core", 0, [100, 200, 300, 400, 500], [0, 5_000, 5_300, 5_600, 5_900])
    memory.finished.insert(0, 50)
    memory.rss_bytes.insert(0, 9_000_000)
    assert memory.settled()[0] == [100, 200, 300, 400, 500]
    del memory.finished[:2], memory.rss_bytes[:2]
    assert memory.bytes_per_request == pytest.approx(3.0)
