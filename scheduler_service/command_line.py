"""Command lines of services: logging, the process's limits, and errors as one line."""

import inspect
import resource
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn, TypeVar

import typer

from pagewire.usage_errors import spelled_as_options
from scheduler_service.errors import CannotRecord
from service_common.config_flags import (
    CLUSTER,
    LOGGING,
    Flags,
    begin_log,
    run_service,
    takes_flags,
)
from service_common.errors import CannotListen, TooFewThreads
from service_common.tracing import CannotTrace

Config = TypeVar("Config")
EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2


def service_command(
    serve: Callable[[Config], Coroutine[Any, Any, None]], *flags: Iterable[inspect.Parameter]
) -> Callable[[Callable[[Flags], Config]], Callable[..., None]]:
    """Make a command with these flags, those of every service, of a function that makes the
    configuration from their values and raises ValueError.

    `serve` imports what it needs when it is called, so that flags are checked at once. The command
    serves until a signal ends it. It exits with 2 for a wrong flag, or if a recording or spans
    cannot be written, and with 1 if the address cannot be used, or if there are too few threads.
    """

    def decorate(make_config: Callable[[Flags], Config]) -> Callable[..., None]:
        def command(flags: Flags) -> None:
            begin_log(flags)
            try:
                config = make_config(flags)
            except ValueError as error:
                exit_with(spelled_as_options(str(error), flags), EXIT_BAD_CONFIG)
            _allow_many_connections()
            try:
                run_service(serve(config))
            except (CannotRecord, CannotTrace) as error:
                exit_with(spelled_as_options(str(error), flags), EXIT_BAD_CONFIG)
            except (CannotListen, TooFewThreads) as error:
                exit_with(error, EXIT_FAILURE)

        command.__name__, command.__doc__ = make_config.__name__, make_config.__doc__
        return takes_flags(*flags, CLUSTER.parameters, LOGGING)(command)

    return decorate


def _allow_many_connections() -> None:
    """Raise the limit of open files to what the system allows; the usual one is for `select`."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))


def exit_with(error: object, code: int) -> NoReturn:
    """End the command with one line about the error."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)
