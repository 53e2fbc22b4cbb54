"""Command lines of services: flags derived from configuration, logging, and errors as one line.

A field of a configuration dataclass is a flag of its name: `max_num_seqs` is `--max-num-seqs` and
`PAGEWIRE_MAX_NUM_SEQS`, with the field's type and default, and its docstring is the help text.
"""

import ast
import asyncio
import inspect
import resource
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar, get_type_hints

import typer

from scheduler_service.errors import CannotRecord
from service_common.cluster import ClusterConfig
from service_common.errors import CannotListen
from service_common.logging_config import LogFormat, LogLevel, configure_logging
from service_common.tracing import CannotTrace

Config = TypeVar("Config")
Flags: TypeAlias = Mapping[str, Any]
"""Values by flag."""

EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2

_METAVARS = {
    "core": "HOST:PORT|unix:PATH",
    "listen": "HOST:PORT|unix:PATH",
    "health_listen": "HOST:PORT|unix:PATH",
    "http": "HOST:PORT|off",
    "metrics_port": "[HOST:]PORT|off",
    "otlp_endpoint": "URL",
    "default_timeout": "SECONDS",
    "grace_period": "SECONDS",
    "max_outgrown_wait": "SECONDS",
}


def flag(name: str, kind: Any, default: object, text: str) -> inspect.Parameter:
    """One flag; a boolean one that ends in `!` cannot be negated on the command line."""
    names = []
    if name.endswith("!"):
        name = name[:-1]
        names.append(f"--{name.replace('_', '-')}")
    metavar = _METAVARS.get(name, "FILE" if kind == Path | None else None)
    option = typer.Option(*names, envvar=f"PAGEWIRE_{name.upper()}", metavar=metavar, help=text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


class ConfigFlags:
    """The flags of a configuration dataclass."""

    def __init__(self, config: type, *, prefix: str = "", **names: str | None) -> None:
        """`names`: flags that are not named as their field, by field; None: no flag."""
        named = {field: names.get(field.name, prefix + field.name) for field in fields(config)}
        texts, kinds = _field_docstrings(config), get_type_hints(config)
        self.parameters = [
            flag(name, kinds[field.name], _default(field), texts[field.name])
            for field, name in named.items()
            if name is not None
        ]
        self._fields = {
            name.rstrip("!"): field.name for field, name in named.items() if name is not None
        }

    def fields_of(self, flags: Flags) -> dict[str, Any]:
        """The values of the dataclass's fields."""
        return {field: flags[name] for name, field in self._fields.items()}


def _default(field: Field[Any]) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _field_docstrings(config: type) -> dict[str, str]:
    [definition] = ast.parse(inspect.cleandoc(inspect.getsource(config))).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    return texts


CLUSTER = ConfigFlags(ClusterConfig, prefix="cluster_")


def service_command(
    serve: Callable[[Config], Coroutine[Any, Any, None]], *flags: Iterable[inspect.Parameter]
) -> Callable[[Callable[[Flags], Config]], Callable[..., None]]:
    """Make a command with these flags, the cluster's and logging's, of a function that makes the
    configuration from their values."""
    parameters = [
        *(parameter for some in flags for parameter in some),
        *CLUSTER.parameters,
        flag("log_level", LogLevel, LogLevel.INFO, "Least severity logged."),
        flag("log_format", LogFormat, LogFormat.TEXT, "Lines for people, or of JSON."),
    ]

    def decorate(make_config: Callable[[Flags], Config]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            log_level, log_format = values["log_level"], values["log_format"]
            run_service(lambda: make_config(values), serve, log_level, log_format)

        command.__name__, command.__doc__ = make_config.__name__, make_config.__doc__
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

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
