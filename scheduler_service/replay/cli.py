"""`python -m scheduler_service replay FILE`."""

import logging
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from scheduler_service.command_line import EXIT_BAD_CONFIG, EXIT_FAILURE, exit_with
from scheduler_service.replay.exact_replay import ExactReplay, Observer, Summary
from scheduler_service.replay.recording_file import BadRecording, RecordingReader
from scheduler_service.replay.report import difference_lines, plans_table, summary_lines


def replay(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `--record` wrote.", show_default=False)
    ],
) -> None:
    """Run a recorded schedule again, without workers or models.

    Every plan must come out as it was recorded. Exits with 1 at the first that does not, and with
    2 if the file cannot be read.
    """
    logging.disable(logging.CRITICAL)  # the core logs again what it logged when it was recorded
    try:
        replay_exactly(Console(highlight=False, soft_wrap=True), RecordingReader(file))
    except OSError as error:
        exit_with(f"{file}: {error.strerror or error}", EXIT_BAD_CONFIG)
    except (BadRecording, ValueError) as error:
        exit_with(error, EXIT_BAD_CONFIG)


def replay_exactly(
    console: Console, reader: RecordingReader, observe: Observer | None = None
) -> None:
    """Replay and print the summary; ends the command if anything differs."""
    started_at = time.perf_counter()
    summary = ExactReplay(reader.header).run(reader.entries(), observe)
    elapsed_s = time.perf_counter() - started_at
    console.print("\n".join(summary_lines(reader, summary, elapsed_s)), markup=False)
    _print_differences(console, summary)
    if not summary.is_exact:
        raise typer.Exit(EXIT_FAILURE)


def _print_differences(console: Console, summary: Summary) -> None:
    if summary.output_difference is not None:
        lines = difference_lines("first outputs that differ", summary.output_difference)
        console.print("\n".join(lines), markup=False)
    if summary.difference is not None:
        lines = difference_lines("first difference", summary.difference)
        console.print("\n".join(lines), markup=False)
        if summary.difference.entry.do == "schedule":
            console.print(plans_table(summary.difference), markup=False)
