"""Copies the latest results into docs/benchmarks.md, so that no figure there is typed by hand.

    python -m benchmarks.report

The page has a pair of comments for each file under `benchmarks/results/`; what stands between
them is replaced by the machine, the date and a table.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
_SECTION = re.compile(r"<!-- results of (\w+) -->\n.*?<!-- end of results -->", re.DOTALL)

Columns = Mapping[str, str]
"""Titles by the names in a result's rows."""

OVERHEAD: Columns = {
    "groups": "groups",
    "running": "running",
    "prompt_tokens": "prompt",
    "deciding_us": "deciding, µs",
    "all_us": "all, µs",
    "all_us_per_row": "all per row, µs",
    "budget_us": "budget, µs",
    "vllm_deciding_us": "vLLM deciding, µs",
    "vllm_all_us": "vLLM all, µs",
    "all_ratio": "vLLM all ÷ ours",
}
PIPELINING: Columns = {
    "worker": "worker",
    "pipeline_depth": "depth",
    "step_us_p50": "step p50, µs",
    "idle_us_p50": "idle p50, µs",
    "idle_us_p99": "idle p99, µs",
    "idle_share": "idle, share of time",
    "plans_sent_ahead": "plans sent ahead",
}
ENDURANCE: Columns = {
    "process": "process",
    "rss_mib_at_a_fifth": "MiB at a fifth",
    "rss_mib_at_the_end": "MiB at the end",
    "bytes_per_request": "bytes per request",
}


def render(name: str, results: Mapping[str, Any]) -> str:
    """A result as Markdown."""
    if name == "scheduler_overhead":
        worst = results["growth"]
        facts = (
            f"At worst, a row of a larger batch costs {worst['with_rows']} times one of a smaller "
            f"(from 256 rows on), and one in a longer context {worst['with_length']} times one in "
            "a shorter. "
        )
        facts += f"vLLM {results['vllm']}." if results["vllm"] else "Without vLLM."
        return _section(results, facts, _table(OVERHEAD, results["rows"]))
    if name == "pipelining":
        facts = f"{results['rows'][0]['running']} sequences."
        return _section(results, facts, _table(PIPELINING, results["rows"]))
    assert name == "endurance", f"unknown result {name}"
    facts = f"{results['requests']:,} requests, {results['requests_per_s']} a second."
    return _section(results, facts, _table(ENDURANCE, results["processes"]))


def _section(results: Mapping[str, Any], facts: str, table: str) -> str:
    machine = results["machine"]
    where = (
        f"{results['date']}: {machine['processor']}, {machine['cores']} cores, "
        f"Python {machine['python']}, protobuf {machine['protobuf']}, grpcio {machine['grpcio']}; "
        f"other processes used {results['foreign_cores']} cores meanwhile. {facts}"
    )
    return f"{where}\n\n{table}"


def _table(columns: Columns, rows: list[Mapping[str, Any]]) -> str:
    lines = [list(columns.values()), ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def rewritten(page: str, folder: Path = RESULTS) -> str:
    """The page with the latest results in it."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        results = json.loads((folder / f"{name}.json").read_text())
        body = render(name, results)
        return f"<!-- results of {name} -->\n{body}\n<!-- end of results -->"

    return _SECTION.sub(replace, page)


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(rewritten(PAGE.read_text()))


if __name__ == "__main__":
    main()
