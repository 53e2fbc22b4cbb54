"""`python -m tools.what_if FILE`: a recorded load under other policies and configurations."""

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pagewire.usage_errors import OneLineCommand
from scheduler_service.command_line import EXIT_BAD_CONFIG, exit_with
from scheduler_service.replay.cli import replay_exactly
from scheduler_service.replay.recording_file import BadRecording, RecordingReader
from tools.what_if.comparison import apply_overrides, compare
from tools.what_if.report import summary_lines, tables
from tools.what_if.trace import TraceReader

_ANY_WIDTH = 10_000

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(cls=OneLineCommand)
def what_if(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="A recording made with `--record`.", show_default=False
        ),
    ],
    config: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="FIELD=VALUE,…",
            help="Compare with this configuration, such as "
            "policy=fair,max_num_seqs=64; may be repeated.",
        ),
    ] = None,
) -> None:
    """Predict how a recorded load would have fared under other policies or configurations.

    Replays the recording exactly, then runs its requests in virtual time, with step times learned
    from it. Exits with 1 if the replay differs from the recording, and with 2 if the file cannot
    be read or a configuration is not valid.
    """
    logging.disable(logging.CRITICAL)  # the core logs again what it logged when it was recorded
    console = Console(highlight=False, soft_wrap=True)
    try:
        reader = RecordingReader(file)
        recorded = reader.header.config
        others = {text: apply_overrides(recorded, text) for text in config or ()}
        trace_reader = TraceReader()
        replay_exactly(console, reader, trace_reader.observe)
        comparison = compare(trace_reader.trace(), recorded, others)
        console.print("\n".join(summary_lines(comparison)), markup=False)
        for table in tables(comparison):  # at their own width, even where the terminal is narrower
            width = Console(width=_ANY_WIDTH).measure(table).maximum
            Console(width=width, highlight=False).print(table)
    except (BadRecording, OSError, ValueError) as error:
        exit_with(error, EXIT_BAD_CONFIG)


if __name__ == "__main__":
    app(prog_name="python -m tools.what_if")
