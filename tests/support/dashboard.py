"""The Grafana dashboard of `deploy/grafana`, as tests read it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DASHBOARD: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "deploy/grafana/dashboards/pagewire.json").read_text()
)
WIDTH = 24
"""Columns of Grafana's grid."""


def expressions() -> list[str]:
    """The PromQL expressions of all panels."""
    return [target["expr"] for target in targets()]


def targets() -> Iterator[dict[str, Any]]:
    """The queries of all panels, with their data sources and legends."""
    for panel in DASHBOARD["panels"]:
        yield from panel.get("targets", ())
