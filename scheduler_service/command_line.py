"""What both commands share: logging, and errors as one line and an exit code."""

import asyncio
import logging
import sys
from collections.abc import Callable, Coroutine
from enum import StrEnum
from typing import Any, NoReturn, TypeVar

import typer

from scheduler_service.addresses import CannotListen

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

    Exits with 2 when `make_config` raises ValueError, with 1 when the address cannot be used.
    """
    logging.basicConfig(
        level=log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        config = make_config()
    except ValueError as error:
        _exit_with(error, EXIT_BAD_CONFIG)
    try:
        asyncio.run(serve(config))
    except CannotListen as error:
        _exit_with(error, EXIT_FAILURE)


def _exit_with(error: Exception, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)
