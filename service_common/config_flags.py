"""Command lines of services, whose flags are derived from configuration.

A field of a configuration dataclass is a flag of its name: `max_num_seqs` is `--max-num-seqs` and
`PAGEWIRE_MAX_NUM_SEQS`, with the field's type and default, and its docstring is the help text.
"""

import ast
import asyncio
import atexit
import difflib
import inspect
import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import MISSING, Field, fields
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar, get_type_hints

import typer

from pagewire.standard_streams import open_standard_streams
from service_common.cluster import ClusterConfig
from service_common.end_signals import end_signals
from service_common.errors import TooFewThreads
from service_common.logging_config import LogFormat, LogLevel, configure_logging
from service_common.threads import require_threads

Flags: TypeAlias = Mapping[str, Any]
"""Values by flag."""

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

_METAVARS = {
    "core": "HOST:PORT|unix:PATH",
    "listen": "HOST:PORT|unix:PATH",
    "health_listen": "HOST:PORT|unix:PATH",
    "http": "HOST:PORT|off",
    "metrics_port": "[HOST:]PORT|off",
    "otlp_endpoint": "URL",
    "default_timeout": "SECONDS",
    "sse_keep_alive": "SECONDS",
    "grace_period": "SECONDS",
    "max_outgrown_wait": "SECONDS",
}

CONTEXT = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Settings of a command line on which `--max_num_seqs` is `--max-num-seqs`, as on vLLM's."""

_MULTIPLES = {"": 1} | {
    unit: base**power
    for base, units in ((1000, "kmgt"), (1024, "KMGT"))
    for power, unit in enumerate(units, 1)
}


def parse_count(text: str | int) -> int:
    """`8192`, `8k` (8,000), `8K` (8,192) or `1.5m`, as vLLM reads counts of tokens."""
    match = re.fullmatch(r"(\d+)(\.\d+)?([kmgtKMGT]?)", str(text).strip())
    if match is None or (match[2] and (match[3] or "K").isupper()):
        raise typer.BadParameter(
            f"expected a whole number, such as 8192, 8k (8000) or 8K (8192), got {text!r}"
        )
    return int(Decimal(match[1] + (match[2] or "")) * _MULTIPLES[match[3]])


COUNT = {"parser": parse_count, "metavar": "TOKENS"}
"""Settings of a flag that is a number of tokens."""


def flag(
    name: str, kind: Any, default: object, text: str, short: str = "", **settings: Any
) -> inspect.Parameter:
    """One flag; a boolean one that ends in `!` cannot be negated on the command line.

    short: another name. settings: more of `typer.Option`'s.
    """
    names = [short] if short else []
    if name.endswith("!") or short:
        name = name.removesuffix("!")
        names.insert(0, f"--{name.replace('_', '-')}")
    settings.setdefault("metavar", _METAVARS.get(name, "FILE" if kind == Path | None else None))
    settings.setdefault("envvar", f"PAGEWIRE_{name.upper()}")
    option = typer.Option(*names, help=text, **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


class ConfigFlags:
    """The flags of a configuration dataclass."""

    def __init__(
        self,
        config: type,
        *,
        prefix: str = "",
        settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        **names: str | None,
    ) -> None:
        """`names`: flags that are not named as their field, by field; None: no flag. `settings`:
        those of `flag`, by field."""
        named = {field: names.get(field.name, prefix + field.name) for field in fields(config)}
        texts, kinds = _field_docstrings(config), get_type_hints(config)
        self.parameters = [
            flag(
                name,
                kinds[field.name],
                _default(field),
                texts[field.name],
                **settings.get(field.name, {}),
            )
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


@cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name, parsed once for all of them."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _field_docstrings(config: type) -> dict[str, str]:
    definition = _classes(config.__module__)[config.__name__]
    texts = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split())
    return texts


CLUSTER = ConfigFlags(ClusterConfig, prefix="cluster_")
LOGGING = [
    flag("log_level", LogLevel, LogLevel.INFO, "Least severity logged."),
    flag("log_format", LogFormat, LogFormat.TEXT, "Lines for people, or of JSON."),
]


def takes_flags(
    *flags: Iterable[inspect.Parameter],
) -> Callable[[Callable[[Flags], None]], Callable[..., None]]:
    """Make a command with these flags of a function of their values."""
    parameters = [parameter for some in flags for parameter in some]

    def decorate(function: Callable[[Flags], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            function(values)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorate


_PREFIX, _LIKENESS = "PAGEWIRE_", 0.9
"""Of two names, by difflib: that of a letter or two more, less or exchanged. Flags of different
services are less alike, so a variable that another service reads is no misspelling."""

_OF_CLIENTS = {"ADDRESS", "API_KEY"}


def misspelt_variables(names: Iterable[str], flags: Iterable[str]) -> dict[str, str]:
    """Of these variables, those that look like a flag's that is not among them, each with that one.

    Others that no flag reads are not reported: several services may share one environment.
    """
    present = {name.removeprefix(_PREFIX) for name in names if name.startswith(_PREFIX)}
    own = {name.upper() for name in flags}
    found = {}
    for name in sorted(present - own - _OF_CLIENTS):
        for likely in difflib.get_close_matches(name, own - present, n=1, cutoff=_LIKENESS):
            found[_PREFIX + name] = _PREFIX + likely
    return found


def begin_log(flags: Flags) -> None:
    """Configure logging, and warn of variables that are set and look like a misspelt flag's."""
    configure_logging(flags["log_level"], flags["log_format"])
    for name, likely in misspelt_variables(os.environ, flags).items():
        _logger.warning("%s has no effect: did you mean %s?", name, likely)


async def _ignoring_signals_afterwards(service: Coroutine[Any, Any, Result]) -> Result:
    if callable(signal.getsignal(signal.SIGINT)):  # not ignored, as in the background of a shell
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return await service
    finally:
        loop = asyncio.get_running_loop()
        for number in end_signals():
            if loop.remove_signal_handler(number):
                signal.signal(number, lambda *_: None)


def run_service(service: Coroutine[Any, Any, Result]) -> Result:
    """Run a service to its end, and return its result. Raises TooFewThreads.

    Until it handles the signals to end, Ctrl-C interrupts what it does, such as imports, which
    asyncio's own handler would let it finish first.

    If it handled the signals to end, they do nothing from then on: asyncio restores their defaults
    when its loop is closed, and a late signal would replace the exit code of a process that is just
    ending.
    """
    try:
        require_threads()
    except TooFewThreads:
        service.close()
        raise
    return asyncio.run(_ignoring_signals_afterwards(service))


def _leave_deleted_folder() -> None:
    """Change to / if the working directory has been deleted, such as that of a replaced release:
    oneMKL ends a process that has none."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def run_to_exit(command: Callable[[], object]) -> NoReturn:
    """Run a command line and end the process with its exit code.

    The interpreter's own end is left out: it would free all modules object by object, which takes
    a worker more than a second. Nothing depends on it, since services close what they opened before
    they return; exit handlers are called.
    """
    open_standard_streams()
    _leave_deleted_folder()
    code = 0
    try:
        command()
    except SystemExit as end:
        if isinstance(end.code, str):
            raise
        code = end.code or 0
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
