"""The page of all metrics, generated from the lists of the services."""

from collections.abc import Iterable

from scheduler_service.core_service import metrics as core
from scheduler_service.frontend import metrics as frontend
from service_common.prometheus import Metric
from worker_service.service import metrics as worker

HEAD = """\
# Metrics

Every metric of every service, generated from the sources. [Observability](../observability.md)
explains how to scrape them and where to start.

A metric with the same meaning as one of vLLM's has the same name, `vllm:…`; all others begin with
`pagewire_`. Each process also exports its CPU time, memory and open files as `process_…`.
"""

SERVICES = (("Frontend", frontend.ALL), ("Scheduler core", core.ALL), ("Worker", worker.ALL))


def render() -> str:
    """The page as Markdown."""
    sections = (f"## {title}\n\n{_table(metrics)}" for title, metrics in SERVICES)
    return "\n".join([HEAD, *sections])


def _table(metrics: Iterable[Metric]) -> str:
    rows = ["| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
    for metric in metrics:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows) + "\n"
