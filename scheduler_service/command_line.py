"""What both commands share: logging, and errors as one line and an exit code."""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import typer

from scheduler_service.addresses import CannotListen
from scheduler_service.replay.output import CannotRecord

Config = TypeVar("Config")

EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2


class LogLevel(StrEnum):
    """Least severity that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def run_service(
    make_config: Callable[[], Config],
    serve: Callable[[Config], Coroutine[Any, Any, None]],
    log_level: LogLevel,
) -> None:
    """Make the configuration and serve until told to end.

    Exits with 2 when `make_config` raises ValueError or a recording cannot be made, with 1 when the
    address cannot be used.
    """
    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        config = make_config()
    except ValueError as error:
        exit_with(error, EXIT_BAD_CONFIG)
    try:
        asyncio.run(serve(config))
    except CannotRecord as error:
        exit_with(error, EXIT_BAD_CONFIG)
    except CannotListen as error:
        exit_with(error, EXIT_FAILURE)


def exit_with(error: Exception, code: int) -> NoReturn:
    """End the command with one line about what is wrong."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)
