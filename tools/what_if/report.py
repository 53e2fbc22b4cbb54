"""A comparison as tables."""

from collections.abc import Sequence

from rich.table import Table

from tools.what_if.comparison import Comparison, Latencies, Row, percentiles
from tools.what_if.cost_model import Fit


def fit_lines(comparison: Comparison) -> list[str]:
    """Cost of steps by worker group; groups with too few steps share a line."""
    groups: dict[Fit, list[str]] = {}
    for group_id, fit in comparison.fits.items():
        groups.setdefault(fit, []).append(group_id[:8])
    return [line for fit, names in groups.items() for line in _fit_lines(fit, names)]


def _fit_lines(fit: Fit, names: Sequence[str]) -> list[str]:
    model = fit.model
    return [
        f"step time of {', '.join(names)}, from {fit.num_steps} steps: "
        f"{_us(model.base)} + {_us(model.per_row)} per row + {_us(model.per_token)} per further "
        f"prompt token + {_us(model.per_block)} per moved block",
        f"  mean {_us(fit.mean_seconds)}, mean error of a prediction {_us(fit.mean_error)} "
        f"({fit.mean_error / fit.mean_seconds:.0%})",
    ]


def _us(seconds: float) -> str:
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    """Three digits, or all digits before the decimal point."""
    rounded = float(f"{value:.3g}")
    places = 2 if rounded < 10 else 1 if rounded < 100 else 0
    return f"{value:.{places}f}"


def population_line(comparison: Comparison) -> str:
    """The requests that the tables describe."""
    line = f"{comparison.num_requests} requests that ended well in the recording"
    if comparison.num_assumed:
        line += (
            f"; {comparison.num_assumed} more are part of the load, with an assumed length, "
            "since their end was not recorded"
        )
    return line


def comparison_table(rows: Sequence[Row]) -> Table:
    """A line per configuration."""
    table = _table("configuration")
    table.add_column("preemptions", justify="right")
    for row in rows:
        preemptions = "" if row.num_preemptions is None else str(row.num_preemptions)
        table.add_row(row.name, *_cells(row.latencies), preemptions)
    return table


def tenants_table(rows: Sequence[Row]) -> Table:
    """A line per tenant and configuration."""
    table = _table("tenant", "configuration")
    for tenant in rows[0].by_tenant:
        for row in rows:
            table.add_row(tenant or "(none)", row.name, *_cells(row.by_tenant[tenant]))
        table.add_section()
    return table


def _table(*names: str) -> Table:
    table = Table(caption="milliseconds, as p50 / p90 / p99", caption_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in ("first token", "between tokens", "end to end", "tokens/s", "ended well"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(latencies: Latencies) -> list[str]:
    spreads = (latencies.first_token, latencies.between_tokens, latencies.end_to_end)
    return [
        *(_spread(values) for values in spreads),
        f"{latencies.tokens_per_s:.0f}",
        str(latencies.num_requests),
    ]


def _spread(seconds: Sequence[float]) -> str:
    found = percentiles(seconds)
    return " / ".join(_digits(1000 * value) for value in found) if found else "-"
