"""Copies the latest results into docs/benchmarks.md, so that no figure there is typed by hand.

    python -m benchmarks.report

The page has a pair of comments for each file under `benchmarks/results/`; the text between them is
replaced by the machine, the facts and the table that `benchmarks.measuring.tables.publish` wrote.
One more pair, of the name `OVERVIEW`, holds the ratios of all results of `benchmarks.offline`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measuring.machine import RESULTS, VECTOR_EXTENSIONS
from benchmarks.measuring.tables import text

PAGE = Path(__file__).parents[1] / "docs/benchmarks.md"
NOT_MEASURED = "Not measured yet."
OVERVIEW = "overview"

_WORKLOADS = ("mixed", "single", "streams", "prefill", "prefix")

_SECTION = re.compile(r"<!-- results of (\w+) -->\n.*?<!-- end of results -->", re.DOTALL)


def render(results: Mapping[str, Any]) -> str:
    """A result as Markdown."""
    machine, columns = results["machine"], results["columns"]
    extensions = [VECTOR_EXTENSIONS[name] for name in machine.get("vector_extensions", ())]
    where = (
        f"{' with '.join([machine['processor'], *extensions[-1:]])}, {machine['cores']} cores, "
        f"Python {machine['python']}, protobuf {machine['protobuf']}, grpcio {machine['grpcio']}; "
        f"other processes used {results['foreign_cores']} cores meanwhile. {results['facts']}"
    )
    rows = [[text(row.get(name)) for name in columns] for row in results["rows"]]
    return "\n".join([where, "", *_table(list(columns.values()), rows)])


def overview(results: Iterable[Mapping[str, Any]]) -> str:
    """Our tokens per second over those of the best peer, by model and workload, as Markdown.

    `results`: of `benchmarks.offline`; those without another engine are left out.
    """
    rows = []
    for result in results:
        peers = [name for name in result["engines"] if not name.startswith("pagewire")]
        if peers:
            ratios = {row["workload"]: row.get("ratio") for row in result["rows"]}
            cells = [text(ratios.get(workload)) for workload in _WORKLOADS]
            what = result["facts"].split(";")[0]
            rows.append([what, *cells, ", ".join(peers)])
    return "\n".join(_table(["model", *_WORKLOADS, "peers"], rows))


def _table(titles: list[str], rows: list[list[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def rewritten(page: str) -> str:
    """The page with the latest results in it."""

    def replace(match: re.Match[str]) -> str:
        name = match[1]
        path = RESULTS / f"{name}.json"
        if name == OVERVIEW:
            offline = sorted(RESULTS.glob("offline_*.json"))
            body = overview(json.loads(path.read_text()) for path in offline)
        else:
            body = render(json.loads(path.read_text())) if path.exists() else NOT_MEASURED
        return f"<!-- results of {name} -->\n{body}\n<!-- end of results -->"

    return _SECTION.sub(replace, page)


def main() -> None:
    """Rewrite the page."""
    PAGE.write_text(rewritten(PAGE.read_text()))


if __name__ == "__main__":
    main()
