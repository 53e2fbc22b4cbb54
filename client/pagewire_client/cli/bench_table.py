"""What `pagewire bench` shows, while it runs and at its end."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pagewire_client.bench import Limits, Percentiles, Summary, Workload
from pagewire_client.bench.load_generator import OnEnd
from pagewire_client.load.record import Record

Lines = Sequence[tuple[float, Summary]]
"""What came of each rate."""


def render(model: str, limits: Limits, lines: Lines) -> Table:
    """A line for each figure, a column for each rate."""
    table = Table(
        "",
        *(_rate(rate) for rate, _ in lines),
        title=f"{model}: requests per second",
        title_justify="left",
    )
    for name, figures in _figures(limits, [summary for _, summary in lines]):
        table.add_row(name, *figures, end_section=name.startswith(("unfinished", "all tokens")))
    return table


def _figures(limits: Limits, of: Sequence[Summary]) -> Iterator[tuple[str, list[str]]]:
    yield "complete", [str(s.num_complete) for s in of]
    yield "failed", [str(s.num_failed) for s in of]
    yield "unfinished", [str(s.num_unfinished) for s in of]
    yield "most at once", [str(s.max_in_flight) for s in of]
    yield "seconds", [f"{s.duration_s:.1f}" for s in of]
    yield "requests/s", [f"{s.requests_per_s:.2f}" for s in of]
    yield f"good ones/s ({_limits(limits)})", [f"{s.good_requests_per_s:.2f}" for s in of]
    yield "output tokens/s", [f"{s.output_tokens_per_s:.0f}" for s in of]
    yield "all tokens/s", [f"{s.total_tokens_per_s:.0f}" for s in of]
    yield from _times("first token, ms", [s.first_token_ms for s in of])
    yield from _times("between tokens, ms", [s.inter_token_ms for s in of])
    yield from _times("whole answer, ms", [s.total_ms for s in of])


def _times(name: str, of: Sequence[Percentiles | None]) -> Iterator[tuple[str, list[str]]]:
    for part in ("mean", "p50", "p90", "p99"):
        cells = ["" if times is None else f"{getattr(times, part):.1f}" for times in of]
        yield f"{name}, {part}", cells


def _rate(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g}"


def _limits(limits: Limits) -> str:
    return f"{1000 * limits.first_token_s:g} / {1000 * limits.inter_token_s:g} ms"


@contextmanager
def progress_bar(workload: Workload) -> Iterator[OnEnd]:
    """Ended requests, on standard error, where that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task(_rate(workload.rate), total=workload.num_requests)

        def on_end(_: Record) -> None:
            progress.advance(task)

        yield on_end
