"""The figures on the page are those of the results."""

from pathlib import Path

from benchmarks.machine import RESULTS
from benchmarks.report import NOT_MEASURED, PAGE, render, rewritten


def test_the_page_shows_the_latest_results() -> None:
    page = PAGE.read_text()
    assert rewritten(page) == page, "run python -m benchmarks.report"
    measured = {path.stem for path in RESULTS.glob("*.json")}
    assert {name for name in measured if f"results of {name} -->" not in page} == set()


def test_a_section_without_results_says_so(tmp_path: Path) -> None:
    page = "<!-- results of startup -->\nold\n<!-- end of results -->"
    assert NOT_MEASURED in rewritten(page, tmp_path)


def test_a_result_becomes_a_table() -> None:
    machine = {
        "processor": "P",
        "vector_extensions": ["avx2", "avx512f"],
        "cores": 2,
        "python": "3",
        "protobuf": "6",
        "grpcio": "1",
    }
    line = {"victim": "core", "kills": 1000, "streams": 8, "p50_ms": 50.5, "p99_ms": 1234.5}
    results = {"machine": machine, "foreign_cores": 0.1, "streams": 8, "budget_ms": 4000}
    text = render("recovery_simulated", results | {"rows": [line]})
    assert text.startswith("P with AVX-512, 2 cores")
    assert text.endswith("| core | 1,000 | 8 | 50.5 | 1,234 |  |  |")
