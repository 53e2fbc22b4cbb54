"""A comparison as text and tables."""

from collections.abc import Iterator, Sequence

import numpy as np
from rich.table import Table

from tools.what_if.comparison import Comparison, Latencies
from tools.what_if.cost_model import Fit

PERCENTILES = (50, 90, 99)


def summary_lines(comparison: Comparison) -> Iterator[str]:
    """The cost of steps by worker group, where groups with too few steps share their lines, and
    the requests that the tables describe."""
    groups: dict[Fit, list[str]] = {}
    for group_id, fit in comparison.fits.items():
        groups.setdefault(fit, []).append(group_id[:8])
    for fit, names in groups.items():
        base, per_row, per_token, per_block = map(_us, fit.model)
        yield (
            f"step time of {', '.join(names)}, from {fit.num_steps} steps: {base} + {per_row} per "
            f"row + {per_token} per further prompt token + {per_block} per moved block"
        )
        yield (
            f"  mean {_us(fit.mean_seconds)}, mean error of a prediction {_us(fit.mean_error)} "
            f"({fit.mean_error / fit.mean_seconds:.0%})"
        )
    line = f"{len(comparison.runs[0].histories)} requests that ended well in the recording"
    if comparison.num_assumed:
        line += (
            f"; {comparison.num_assumed} more are part of the load, with an assumed length, "
            "since their end was not recorded"
        )
    yield line


def tables(comparison: Comparison) -> Iterator[Table]:
    """A line per configuration; if there are several tenants, a second table with a line per
    tenant and configuration."""
    table = _table("configuration")
    table.add_column("preemptions", justify="right")
    for run in comparison.runs:
        preemptions = "" if run.num_preemptions is None else str(run.num_preemptions)
        table.add_row(run.name, *_cells(run.latencies()), preemptions)
    yield table
    if len(comparison.tenants) > 1:
        table = _table("tenant", "configuration")
        for tenant in comparison.tenants:
            for run in comparison.runs:
                table.add_row(tenant or "(none)", run.name, *_cells(run.latencies(tenant)))
            table.add_section()
        yield table


def _table(*names: str) -> Table:
    caption = f"milliseconds, as {' / '.join(f'p{percent}' for percent in PERCENTILES)}"
    table = Table(caption=caption, caption_justify="left")
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in ("first token", "between tokens", "end to end", "tokens/s", "ended well"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(latencies: Latencies) -> list[str]:
    return [
        _spread(latencies.first_token),
        _spread(latencies.between_tokens),
        _spread(latencies.end_to_end),
        f"{latencies.tokens_per_s:.0f}",
        str(latencies.num_requests),
    ]


def _spread(seconds: Sequence[float]) -> str:
    values = np.percentile(seconds, PERCENTILES) if seconds else ()
    return " / ".join(_digits(1000 * value) for value in values) or "-"


def _us(seconds: float) -> str:
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    """Three digits, or all digits before the decimal point."""
    rounded = float(f"{value:.3g}")
    places = 2 if rounded < 10 else 1 if rounded < 100 else 0
    return f"{value:.{places}f}"
