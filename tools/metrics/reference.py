"""`docs/metrics.md`: every metric of every service, from their lists.

python -m tools.metrics.reference
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from scheduler_service.core_service import metric_list as core
from scheduler_service.frontend import metric_list as frontend
from worker_service.metrics import metric_list as worker

PAGE = Path(__file__).parents[2] / "docs/metrics.md"

INTRODUCTION = """\
# Metrics

Every metric of every service, generated from the sources by `python -m tools.metrics.reference`.
How to scrape them, and what to look at first, is told in [observability](observability.md).

A metric that means what one of vLLM's means has its name, `vllm:…`; all others begin with
`pagewire_`. Each process also tells its CPU time, memory and open files as `process_…`.
"""

SERVICES = (
    ("Frontend", frontend.ALL),
    ("Scheduler core", core.ALL),
    ("Worker", worker.ALL),
)


class Listed(Protocol):
    """What the services' lists have in common."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def help(self) -> str: ...
    @property
    def labels(self) -> tuple[str, ...]: ...


def page() -> str:
    """The whole page."""
    sections = (f"## {title}\n\n{_table(metrics)}" for title, metrics in SERVICES)
    return "\n".join([INTRODUCTION, *sections])


def _table(metrics: Iterable[Listed]) -> str:
    rows = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    rows += [
        f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {metric.help} |"
        for metric in metrics
    ]
    return "\n".join(rows) + "\n"


def _labels(metric: Listed) -> str:
    return ", ".join(f"`{label}`" for label in metric.labels)


if __name__ == "__main__":
    PAGE.write_text(page())
