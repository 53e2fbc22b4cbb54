"""Results are shown on the page as scripts publish them."""

import json
from pathlib import Path

import pytest

from benchmarks.machine import RESULTS
from benchmarks.report import NOT_MEASURED, PAGE, render, rewritten
from benchmarks.tables import publish

ROWS = [{"who": "core", "count": 1000, "ms": 50.5, "hidden": 7}, {"who": "worker", "ms": 1234.5}]


def test_the_page_shows_the_latest_results() -> None:
    page = PAGE.read_text()
    assert rewritten(page) == page, "run python -m benchmarks.report"
    measured = {path.stem for path in RESULTS.glob("*.json")}
    assert {name for name in measured if f"results of {name} -->" not in page} == set()


def test_a_section_without_results_says_so(tmp_path: Path) -> None:
    page = "<!-- results of startup -->\nold\n<!-- end of results -->"
    assert NOT_MEASURED in rewritten(page, tmp_path)


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


def test_the_widest_vector_extension_of_the_machine_is_named() -> None:
    machine = {"processor": "P", "vector_extensions": ["avx2", "avx512f"], "cores": 2}
    machine |= {"python": "3", "protobuf": "6", "grpcio": "1"}
    results = {"machine": machine, "foreign_cores": 0, "facts": "", "columns": {}, "rows": []}
    assert render(results).startswith("P with AVX-512, 2 cores")
