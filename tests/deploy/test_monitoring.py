"""Prometheus' configuration, alerts and the Grafana dashboard query metrics that exist."""

import re
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest
import yaml

from tests.support import dashboard
from tools.docs import metrics_reference
from tools.launch import ROOT

PROMETHEUS = ROOT / "deploy/prometheus"
GRAFANA = ROOT / "deploy/grafana"
OF_PROCESSES = {"process_cpu_seconds_total", "process_resident_memory_bytes"}


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def exported() -> dict[str, set[str]]:
    """Names that can be queried, with their labels. tests/end_to_end/test_metrics.py checks that
    the services export what their lists contain."""
    names: dict[str, set[str]] = {name: set() for name in OF_PROCESSES}
    for _, metrics in metrics_reference.SERVICES:
        for metric in metrics:
            labels = set(metric.labels)
            if metric.kind == "histogram":
                names[f"{metric.name}_bucket"] = labels | {"le"}
                names[f"{metric.name}_sum"] = names[f"{metric.name}_count"] = labels
            else:
                names[metric.name] = labels
    return names


def selectors(expression: Any) -> Iterator[Any]:
    """The time series in an expression. Fails if it is not PromQL."""
    if isinstance(expression, promql.VectorSelector):
        yield expression
        return
    for name in ("vector_selector", "expr", "lhs", "rhs", "param"):
        child = getattr(expression, name, None)
        if child is not None:
            yield from selectors(child)
    for child in getattr(expression, "args", None) or ():
        yield from selectors(child)


def parsed(text: str) -> Any:
    for variable, value in {"$__rate_interval": "1m", "$model": "m"}.items():
        text = text.replace(variable, value)
    return promql.parse(text)


EXPRESSIONS = [*dashboard.expressions(), *(rule["expr"] for rule in alerts())]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_query_is_promql_over_metrics_that_are_exported(expression: str) -> None:
    names = exported()
    found = list(selectors(parsed(expression)))
    assert found
    for selector in found:
        assert selector.name in names
        for matcher in selector.matchers.matchers:
            assert matcher.name in names[selector.name] | {"job", "instance"}


def test_every_panel_has_a_query_and_variables_list_a_label_that_is_exported() -> None:
    shown = [panel for panel in dashboard.DASHBOARD["panels"] if panel["type"] != "row"]
    assert all(panel["targets"] for panel in shown)
    names = exported()
    for variable in dashboard.DASHBOARD["templating"]["list"]:
        found = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", variable["query"]["query"])
        assert found is not None
        assert found[2] in names[found[1]]


def test_the_dashboard_asks_the_provisioned_datasource() -> None:
    folder = GRAFANA / "provisioning/datasources/prometheus.yml"
    [source] = yaml.safe_load(folder.read_text())["datasources"]
    asked = [panel["datasource"] for panel in dashboard.DASHBOARD["panels"] if "targets" in panel]
    asked += [target["datasource"] for target in dashboard.targets()]
    assert asked
    for datasource in asked:
        assert datasource == {"type": source["type"], "uid": source["uid"]}


def test_every_alert_has_a_severity_and_a_summary() -> None:
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    for rule in alerts():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
