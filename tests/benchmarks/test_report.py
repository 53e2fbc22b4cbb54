"""The figures on the page are those of the results."""

from benchmarks.machine import RESULTS
from benchmarks.report import PAGE, render, rewritten


def test_the_page_shows_the_latest_results() -> None:
    page = PAGE.read_text()
    assert rewritten(page) == page, "run python -m benchmarks.report"
    shown = {path.stem for path in RESULTS.glob("*.json") if f"results of {path.stem}" in page}
    assert shown == {"scheduler_overhead", "pipelining", "endurance"}


def test_a_result_becomes_a_table() -> None:
    machine = {"processor": "P", "cores": 2, "python": "3", "protobuf": "6", "grpcio": "1"}
    line = {
        "process": "core",
        "rss_mib_at_a_fifth": 50.5,
        "rss_mib_at_the_end": 51.0,
        "bytes_per_request": 1234.5,
    }
    results = {
        "date": "2026-01-02",
        "machine": machine,
        "foreign_cores": 0.1,
        "requests": 1000,
        "requests_per_s": 70,
        "processes": [line],
    }
    text = render("endurance", results)
    assert text.startswith("2026-01-02: P, 2 cores")
    assert text.endswith("| core | 50.5 | 51 | 1,234 |")
