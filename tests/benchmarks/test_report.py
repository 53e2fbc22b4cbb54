"""The figures on the page are those of the results."""

import json
from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.machine import RESULTS
from benchmarks.report import NOT_MEASURED, PAGE, render, rewritten

MEASURED_AND_DRAWN = sorted(name for name in plots.PLOTS if (RESULTS / f"{name}.json").exists())


def test_the_page_shows_the_latest_results() -> None:
    page = PAGE.read_text()
    assert rewritten(page) == page, "run python -m benchmarks.report"
    measured = {path.stem for path in RESULTS.glob("*.json")}
    assert {name for name in measured if f"results of {name} -->" not in page} == set()


def test_a_section_without_results_says_so(tmp_path: Path) -> None:
    page = "<!-- results of wire -->\nold\n<!-- end of results -->"
    assert NOT_MEASURED in rewritten(page, tmp_path)


@pytest.mark.parametrize("name", MEASURED_AND_DRAWN)
def test_results_are_drawn_and_twice_the_same(name: str, tmp_path: Path) -> None:
    results = json.loads((RESULTS / f"{name}.json").read_text())
    first = plots.draw(name, results, tmp_path).read_bytes()
    assert plots.draw(name, results, tmp_path).read_bytes() == first
    assert (plots.IMAGES / f"{name}.svg").exists(), "run python -m benchmarks.report"
    assert f"images/benchmarks/{name}.svg" in PAGE.read_text()


def test_a_result_becomes_a_table() -> None:
    machine = {
        "processor": "P",
        "vector_extensions": ["avx2", "avx512f"],
        "cores": 2,
        "python": "3",
        "protobuf": "6",
        "grpcio": "1",
    }
    line = {
        "process": "core",
        "rss_mib_at_a_fifth": 50.5,
        "rss_mib_at_the_end": 51.0,
        "bytes_per_request": 1234.5,
    }
    results = {
        "machine": machine,
        "foreign_cores": 0.1,
        "requests": 1000,
        "requests_per_s": 70,
        "processes": [line],
    }
    text = render("endurance", results)
    assert text.startswith("P with AVX-512, 2 cores")
    assert text.endswith("| core | 50.5 | 51 | 1,234 |")
