"""Results are shown on the page as scripts publish them."""

import json
from pathlib import Path

import pytest

from benchmarks.measuring.machine import RESULTS
from benchmarks.measuring.tables import publish
from benchmarks.report import PAGE, overview, render, rewritten

ROWS = [{"who": "core", "count": 1000, "ms": 50.5, "hidden": 7}, {"who": "worker", "ms": 1234.5}]


def test_the_page_shows_the_latest_results() -> None:
    page = PAGE.read_text()
    assert rewritten(page) == page, "run python -m benchmarks.report"
    measured = {path.stem for path in RESULTS.glob("*.json")}
    assert {name for name in measured if f"results of {name} -->" not in page} == set()


def test_a_published_result_is_printed_and_becomes_a_section(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {"who": "process", "count": "times", "ms": "p50, ms"}
    publish("kills", "Eight streams.", columns, ROWS, 0.25, tmp_path, seed=3)
    printed = capsys.readouterr().out
    assert "Eight streams." in printed
    assert "1,234" in printed
    results = json.loads((tmp_path / "kills.json").read_text())
    assert (results["seed"], results["rows"]) == (3, ROWS)
    where, *table = render(results).splitlines()
    assert "other processes used 0.25 cores meanwhile. Eight streams." in where
    assert table == [
        "",
        "| process | times | p50, ms |",
        "| --- | --- | --- |",
        "| core | 1,000 | 50.5 |",
        "| worker |  | 1,234 |",
    ]


def test_the_overview_has_the_ratios_of_each_result_with_peers() -> None:
    facts = "llama in bfloat16 on cpu; pagewire 0.1.0, vllm 0.32.0."
    rows = [{"workload": "single", "ratio": 1.4}, {"workload": "mixed", "ratio": 0.9}]
    result = {"facts": facts, "engines": {"pagewire": {}, "vllm": {}}, "rows": rows}
    alone = result | {"engines": {"pagewire": {}, "pagewire dense": {}}}
    assert overview([result, alone]).splitlines() == [
        "| model | mixed | single | streams | prefill | prefix | peers |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| llama in bfloat16 on cpu | 0.9 | 1.4 |  |  |  | vllm |",
    ]
