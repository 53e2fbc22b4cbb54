"""`deploy/grafana/dashboards/pagewire.json`: the dashboard, row by row.

python -m tools.metrics.dashboard
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "deploy/grafana/dashboards/pagewire.json"
DATASOURCE = {"type": "prometheus", "uid": "pagewire-prometheus"}
WIDTH, HEIGHT = 24, 8

MODEL = 'model_name=~"$model"'
PERCENTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel, with its legend."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""
    is_stacked: bool = False


def rate(metric: str, by: str, matching: str = MODEL) -> str:
    """The increase of a counter per second."""
    return f"sum by ({by}) (rate({metric}{{{matching}}}[$__rate_interval]))"


def percentiles(metric: str) -> tuple[Query, ...]:
    """The percentiles of a histogram."""
    return tuple(
        Query(
            f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le')})",
            f"p{round(share * 100)}",
        )
        for share in PERCENTILES
    )


def mean(metric: str, by: str) -> str:
    """The mean of a histogram."""
    return f"{rate(f'{metric}_sum', by)} / {rate(f'{metric}_count', by)}"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Throughput": (
        Panel(
            "Tokens",
            "short",
            (
                Query(
                    rate("vllm:generation_tokens_total", "model_name"), "generated {{model_name}}"
                ),
                Query(rate("vllm:prompt_tokens_total", "model_name"), "prompt {{model_name}}"),
                Query(
                    rate("pagewire_prefill_tokens_total", "model_name"),
                    "prefilled {{model_name}}",
                ),
            ),
            "Per second. Prefilled tokens exclude those found in the prefix cache and include "
            "recomputed ones.",
        ),
        Panel(
            "Requests ended",
            "reqps",
            (Query(rate("vllm:request_success_total", "finished_reason"), "{{finished_reason}}"),),
            is_stacked=True,
        ),
        Panel(
            "Requests by tenant",
            "reqps",
            (
                Query(
                    rate("pagewire_requests_total", "tenant, outcome", ""), "{{tenant}} {{outcome}}"
                ),
            ),
            is_stacked=True,
        ),
    ),
    "Latency": (
        Panel("Time to first token", "s", percentiles("vllm:time_to_first_token_seconds")),
        Panel("Time between tokens", "s", percentiles("vllm:inter_token_latency_seconds")),
        Panel("Whole requests", "s", percentiles("vllm:e2e_request_latency_seconds")),
    ),
    "Queue and memory": (
        Panel(
            "Requests",
            "short",
            (
                Query(f"sum(vllm:num_requests_running{{{MODEL}}})", "running"),
                Query(f"sum(vllm:num_requests_waiting{{{MODEL}}})", "waiting"),
                Query(f"sum(vllm:num_requests_swapped{{{MODEL}}})", "swapped out"),
            ),
            is_stacked=True,
        ),
        Panel("Time in the queue", "s", percentiles("vllm:request_queue_time_seconds")),
        Panel(
            "KV blocks in use",
            "percentunit",
            (Query(f"vllm:kv_cache_usage_perc{{{MODEL}}}", "{{engine}}"),),
        ),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            (
                Query(
                    f"{rate('vllm:prefix_cache_hits_total', 'model_name')} / "
                    f"{rate('vllm:prefix_cache_queries_total', 'model_name')}",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Preemptions and moved blocks",
            "short",
            (
                Query(rate("vllm:num_preemptions_total", "model_name"), "preemptions"),
                Query(rate("pagewire_swapped_out_blocks_total", "model_name"), "blocks out"),
                Query(rate("pagewire_swapped_in_blocks_total", "model_name"), "blocks in"),
                Query(rate("pagewire_copied_blocks_total", "model_name"), "blocks copied"),
            ),
            "Per second.",
        ),
        Panel(
            "Live requests by tenant",
            "short",
            (Query("pagewire_tenant_requests", "{{tenant}}"),),
            is_stacked=True,
        ),
    ),
    "Where requests' time goes": (
        Panel(
            "Time of requests, by part",
            "s",
            (Query(rate("pagewire_request_part_seconds_sum", "part"), "{{part}}"),),
            "Seconds of requests' time per second, by part; the parts add up to the clients' "
            "waiting time.",
            is_stacked=True,
        ),
        Panel(
            "Mean request, by part",
            "s",
            (Query(mean("pagewire_request_part_seconds", "part"), "{{part}}"),),
            is_stacked=True,
        ),
        Panel(
            "Worker groups' time, by part",
            "percentunit",
            (
                Query(
                    f"avg by (part) (rate(pagewire_group_time_seconds_total{{{MODEL}}}"
                    "[$__rate_interval]))",
                    "{{part}}",
                ),
            ),
            "Wire is the rest: transfer between processes, and idle time.",
            is_stacked=True,
        ),
    ),
    "Steps": (
        Panel("Duration of steps", "s", percentiles("pagewire_step_duration_seconds")),
        Panel(
            "Tokens per step",
            "short",
            (Query(mean("vllm:iteration_tokens_total", "model_name"), "{{model_name}}"),),
        ),
        Panel(
            "Core's time per step",
            "s",
            (
                Query(
                    f"{rate('pagewire_planning_seconds_total', 'model_name')} / "
                    f"{rate('pagewire_step_duration_seconds_count', 'model_name')}",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Size of plans",
            "bytes",
            (Query(mean("pagewire_plan_bytes", "model_name"), "{{model_name}}"),),
        ),
        Panel(
            "Idle devices",
            "percentunit",
            (
                Query(
                    "rate(pagewire_worker_idle_seconds_total[$__rate_interval])",
                    "{{instance}} {{reason}}",
                ),
            ),
            "Idle time between steps: without a plan, or with one queued.",
        ),
        Panel(
            "Workers' time, by part",
            "percentunit",
            (
                Query(
                    "sum by (part) (rate(pagewire_worker_step_time_seconds_total"
                    "[$__rate_interval]))",
                    "{{part}}",
                ),
            ),
            is_stacked=True,
        ),
    ),
    "Workers and recovery": (
        Panel(
            "Worker groups by state",
            "short",
            (Query(f"sum by (state) (pagewire_group_state{{{MODEL}}})", "{{state}}"),),
            is_stacked=True,
        ),
        Panel(
            "Losses",
            "short",
            (
                Query("increase(pagewire_worker_losses_total[$__rate_interval])", "workers"),
                Query("increase(pagewire_steps_overdue_total[$__rate_interval])", "overdue steps"),
                Query("increase(pagewire_link_failures_total[$__rate_interval])", "links"),
                Query(
                    "sum(increase(pagewire_frontend_core_losses_total[$__rate_interval]))", "core"
                ),
            ),
        ),
        Panel(
            "Requests continued on other workers",
            "short",
            (
                Query(
                    f"sum(increase(pagewire_requests_recovered_total{{{MODEL}}}[$__rate_interval]))",
                    "requests",
                ),
            ),
        ),
        Panel(
            "Time in recovery",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (le) (rate("
                    f'pagewire_request_part_seconds_bucket{{{MODEL}, part="recovery"}}'
                    "[$__rate_interval])))",
                    "p99",
                ),
            ),
        ),
        Panel(
            "Processes' CPU",
            "short",
            (
                Query(
                    'rate(process_cpu_seconds_total{job=~"pagewire-.*"}[$__rate_interval])',
                    "{{job}} {{instance}}",
                ),
            ),
            "Cores.",
        ),
        Panel(
            "Processes' memory",
            "bytes",
            (Query('process_resident_memory_bytes{job=~"pagewire-.*"}', "{{job}} {{instance}}"),),
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The dashboard in Grafana's format."""
    return {
        "uid": "pagewire",
        "title": "Pagewire",
        "tags": ["llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_model_variable()]},
        "panels": _panels(),
    }


def expressions() -> list[str]:
    """Every query, as Prometheus receives it."""
    return [query.expression for panels in ROWS.values() for p in panels for query in p.queries]


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(vllm:num_requests_running, model_name)", "refId": "model"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        found.append(_row(len(found) + 1, title, y))
        y += 1
        for index, panel in enumerate(panels):
            x, line = index % 3 * (WIDTH // 3), index // 3
            place = {"x": x, "y": y + line * HEIGHT, "w": WIDTH // 3, "h": HEIGHT}
            found.append(_panel(len(found) + 1, panel, place))
        y += -(-len(panels) // 3) * HEIGHT
    return found


def _row(number: int, title: str, y: int) -> dict[str, Any]:
    place = {"x": 0, "y": y, "w": WIDTH, "h": 1}
    return {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.is_stacked else "none"}
    custom = {"fillOpacity": 30 if panel.is_stacked else 0, "stacking": stacking}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expression,
                "legendFormat": query.legend,
            }
            for index, query in enumerate(panel.queries)
        ],
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
