"""`python -m scheduler_service replay FILE`."""

import logging
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from scheduler_service.command_line import EXIT_BAD_CONFIG, EXIT_FAILURE, exit_with
from scheduler_service.core import SchedulerConfig
from scheduler_service.replay.exact_replay import Replay, Summary
from scheduler_service.replay.overrides import apply_overrides
from scheduler_service.replay.plot import CannotPlot, check_plot, write_plot
from scheduler_service.replay.reader import BadRecording, RecordingReader
from scheduler_service.replay.recording import CODEC
from scheduler_service.replay.report import difference_lines, plans_table, summary_lines
from tools.what_if.comparison import compare
from tools.what_if.report import comparison_table, fit_lines, population_line, tenants_table
from tools.what_if.trace import TraceReader

_ANY_WIDTH = 10_000


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `--record` wrote.", show_default=False)
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Compare with this policy; may be repeated."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="FIELD=VALUE,…",
            help="Compare with this configuration, such as "
            "max_num_seqs=64,enable_prefix_caching=false; may be repeated.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the comparison; .svg, .png, .pdf, …"),
    ] = None,
) -> None:
    """Run a recorded schedule again, without workers or models.

    Every plan must come out as it was recorded. Exits with 1 at the first that does not, and with
    2 if the file cannot be read.

    With other policies or configurations: how the same requests would have fared with them, in
    virtual time, by step times learned from the recording.
    """
    logging.disable(logging.CRITICAL)  # the core tells again what it told when it was recorded
    console = Console(highlight=False, soft_wrap=True)
    variants = [f"policy={name}" for name in policy or ()] + (config or [])
    try:
        reader = RecordingReader(file)
        others = {text: apply_overrides(reader.header.config, text) for text in variants}
        if plot is not None:
            check_plot(plot)
        trace_reader = _replay_exactly(console, reader)
        if others or plot is not None:
            _compare(console, reader.header.config, trace_reader, others, plot)
    except (BadRecording, CannotPlot, OSError, ValueError) as error:
        exit_with(error, EXIT_BAD_CONFIG)


def _replay_exactly(console: Console, reader: RecordingReader) -> TraceReader:
    """Replay and tell of it; ends the command if anything differs."""
    trace_reader = TraceReader()
    started_at = time.perf_counter()
    summary = Replay(reader.header.config, CODEC).run(reader.entries(), trace_reader.observe)
    took_s = time.perf_counter() - started_at
    console.print("\n".join(summary_lines(reader, summary, took_s)), markup=False)
    _print_differences(console, summary)
    if not summary.is_exact:
        raise typer.Exit(EXIT_FAILURE)
    return trace_reader


def _print_differences(console: Console, summary: Summary) -> None:
    if summary.news_difference is not None:
        lines = difference_lines("first news that differ", summary.news_difference)
        console.print("\n".join(lines), markup=False)
    if summary.difference is not None:
        lines = difference_lines("first difference", summary.difference)
        console.print("\n".join(lines), markup=False)
        if summary.difference.entry.do == "schedule":
            console.print(plans_table(summary.difference), markup=False)


def _compare(
    console: Console,
    recorded: SchedulerConfig,
    trace_reader: TraceReader,
    others: dict[str, SchedulerConfig],
    plot: Path | None,
) -> None:
    comparison = compare(trace_reader.trace(), recorded, others)
    lines = [*fit_lines(comparison), population_line(comparison)]
    console.print("\n".join(lines), markup=False)
    _print_whole(comparison_table(comparison.rows))
    if comparison.rows[0].by_tenant:
        _print_whole(tenants_table(comparison.rows))
    if plot is not None:
        write_plot(plot, comparison.rows)
        console.print(f"plot: {plot}", markup=False)


def _print_whole(table: Table) -> None:
    """Print a table at its own width, even where the terminal is narrower."""
    Console(width=Console(width=_ANY_WIDTH).measure(table).maximum, highlight=False).print(table)
