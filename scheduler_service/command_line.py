"""Command lines of services: logging, the process's limits, and errors as one line."""

import asyncio
import inspect
import resource
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn, TypeVar

import typer

from scheduler_service.errors import CannotRecord
from service_common.config_flags import CLUSTER, LOGGING, Flags, takes_flags
from service_common.errors import CannotListen
from service_common.logging_config import LogFormat, LogLevel, configure_logging
from service_common.tracing import CannotTrace

Config = TypeVar("Config")
EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2


def service_command(
    serve: Callable[[Config], Coroutine[Any, Any, None]], *flags: Iterable[inspect.Parameter]
) -> Callable[[Callable[[Flags], Config]], Callable[..., None]]:
    """Make a command with these flags, the cluster's and logging's, of a function that makes the
    configuration from their values."""

    def decorate(make_config: Callable[[Flags], Config]) -> Callable[..., None]:
        def command(flags: Flags) -> None:
            log_level, log_format = flags["log_level"], flags["log_format"]
            run_service(lambda: make_config(flags), serve, log_level, log_format)

        command.__name__, command.__doc__ = make_config.__name__, make_config.__doc__
        return takes_flags(*flags, CLUSTER.parameters, LOGGING)(command)

    return decorate


def run_service(
    make_config: Callable[[], Config],
    serve: Callable[[Config], Coroutine[Any, Any, None]],
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    """Make the configuration and serve until a signal ends the service.

    Exits with 2 when `make_config` raises ValueError or a recording cannot be made, with 1 when the
    address cannot be used.
    """
    configure_logging(log_level, log_format)
    try:
        config = make_config()
    except ValueError as error:
        exit_with(error, EXIT_BAD_CONFIG)
    _allow_many_connections()
    try:
        asyncio.run(serve(config))
    except (CannotRecord, CannotTrace) as error:
        exit_with(error, EXIT_BAD_CONFIG)
    except CannotListen as error:
        exit_with(error, EXIT_FAILURE)


def _allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows; the usual one is for `select`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def exit_with(error: Exception, code: int) -> NoReturn:
    """End the command with one line about the error."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)
