"""Groups of options that commands share.

A command with a parameter for a group gets the group's options instead of it:

    @with_options(connection=CONNECTION)
    def status(connection: Connection, json: bool = False) -> None: ...

has the options of `Connection`'s fields besides `--json`, and is called with a `Connection`. A
field's docstring is the help text of its option.
"""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Generic, TypeAlias, TypeVar, get_type_hints

import typer

from pagewire.bearer_tokens import read_tokens
from pagewire_cli.local import engine_args
from pagewire_cli.local.health import is_taken
from pagewire_cli.local.runtime_directory import running_cores
from pagewire_client.async_client import AsyncClient
from pagewire_client.client import Client
from pagewire_client.connection import (
    DEFAULT_ADDRESS,
    ConnectionOptions,
    TlsOptions,
    check_address,
    connection_options,
)
from pagewire_client.errors import InvalidArgument
from pagewire_client.retry import RetryPolicy
from pagewire_client.sampling_params import SamplingParams

DEFAULT_CORE = "127.0.0.1:7610"
MEMBER_NAME = "pagewire-cluster"
"""The DNS name in the certificates of a cluster's members."""

CoreToQuery: TypeAlias = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="HOST:PORT or unix:PATH of a scheduler core to query instead of a frontend.",
    ),
]

_IMPATIENT = RetryPolicy(max_retries=2)
"""Few retries: a user is waiting, so that a missing server is reported soon."""

T = TypeVar("T")


@dataclass(frozen=True)
class OptionGroup(Generic[T]):
    """Options, and what is built from their values."""

    parameters: tuple[inspect.Parameter, ...]
    build: Callable[..., T]


def with_options(**groups: OptionGroup[Any]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Replaces each named parameter of a command by the options of its group."""

    def decorate(command: Callable[..., Any]) -> Callable[..., None]:
        own = [p for p in _parameters(command) if p.name not in groups]
        shared = [p for group in groups.values() for p in group.parameters]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, group in groups.items():
                parts = {p.name: values.pop(p.name) for p in group.parameters}
                values[name] = group.build(**parts)
            command(**values)

        signature = inspect.Signature(
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *shared)]
        )
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        return run

    return decorate


def _parameters(command: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(command, eval_str=True).parameters.values())


def _option(
    name: str, kind: Any, default: object, help_text: str, *names: str, **settings: Any
) -> inspect.Parameter:
    if kind is bool and not names:
        names = (f"--{name.replace('_', '-')}",)
    option = typer.Option(*names, help=help_text, **settings)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def group_of(
    record: type[T],
    settings: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    *,
    has_variables: bool = True,
) -> OptionGroup[T]:
    """A dataclass's fields as options, with their docstrings as help texts.

    `settings`: more arguments of `typer.Option`, by field. `has_variables`: each option may be
    given by an environment variable instead.
    """
    kinds, texts = get_type_hints(record), _field_docs(record)

    def option(item: Field[Any]) -> inspect.Parameter:
        own: dict[str, Any] = {"envvar": f"PAGEWIRE_{item.name.upper()}"} if has_variables else {}
        own |= settings.get(item.name, {})
        return _option(item.name, kinds[item.name], _default(item), texts[item.name], **own)

    return OptionGroup(tuple(map(option, fields(record))), record)  # type: ignore[arg-type]


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module by name, parsed once for all of them."""
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def _field_docs(record: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, inherited ones too, each on one line."""
    texts = {}
    for base in reversed(record.__mro__[:-1]):
        definition = _classes(base.__module__)[base.__name__]
        for statement, following in zip(definition.body, definition.body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return texts


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach a deployment."""

    address: list[str] = field(default_factory=lambda: [DEFAULT_ADDRESS])
    """HOST:PORT or unix:PATH of a frontend; repeat it for others to fail over to."""
    api_key: str | None = None
    """Sent with each call; of several, separated by spaces, the first. Other users of this machine
    cannot read the variable."""
    tls: bool = False
    """Use TLS."""
    tls_ca: Path | None = None
    """Certificates (PEM) that may sign the server's."""
    tls_cert: Path | None = None
    """This client's certificate (PEM)."""
    tls_key: Path | None = None
    """That certificate's key (PEM)."""

    def client(self) -> Client:
        """A client of that deployment."""
        return Client(self.address, tls=self._tls(), api_key=self.api_key, retry=_IMPATIENT)

    def async_client(self, retry: RetryPolicy) -> AsyncClient:
        """An asyncio client of that deployment."""
        return AsyncClient(self.address, tls=self._tls(), api_key=self.api_key, retry=retry)

    def _tls(self) -> TlsOptions | None:
        return TlsOptions.of(self.tls_ca, self.tls_cert, self.tls_key, is_on=self.tls)


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Credentials for a scheduler core."""

    cluster_token_file: Path | None = None
    """File of the cluster's token."""
    cluster_ca: Path | None = None
    """The cluster's authority (PEM)."""
    cluster_cert: Path | None = None
    """A member's certificate (PEM)."""
    cluster_key: Path | None = None
    """That certificate's key (PEM)."""

    def connection_to(self, core: str) -> ConnectionOptions:
        """The options of channels and calls. Raises ValueError that names an invalid file."""
        check_address(core, "core")
        files = (self.cluster_ca, self.cluster_cert, self.cluster_key)
        tls = TlsOptions.of(*files, server_name=MEMBER_NAME, prefix="--cluster-")
        return connection_options(core, tls, self._token())

    def _token(self) -> str:
        if self.cluster_token_file is None:
            return ""
        try:
            return read_tokens(self.cluster_token_file)[0]
        except ValueError as error:
            raise ValueError(f"--cluster-token-file: {error}") from error


@dataclass(frozen=True, kw_only=True)
class CoreConnection(Membership):
    """How to reach a scheduler core."""

    core: str | None = None
    """HOST:PORT or unix:PATH of the core."""

    def options(self) -> ConnectionOptions:
        """The options of channels and calls. Raises ValueError that names an invalid file, or if
        several cores run on this machine."""
        return self.connection_to(self.core or _core_on_this_machine())


def _core_on_this_machine() -> str:
    """The core of the only `pagewire serve` of this user, or the one at the usual port."""
    found = [DEFAULT_CORE] if is_taken(DEFAULT_CORE) else []
    found += running_cores()
    if len(found) > 1:
        raise ValueError(f"--core: expected one of {', '.join(found)}: several cores run here")
    return found[0] if found else DEFAULT_CORE


class EarlyStopping(StrEnum):
    """When a beam search ends, as in transformers."""

    TRUE = "true"
    FALSE = "false"
    NEVER = "never"


_NO_OPTIONS = {
    "logit_bias",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "prompt_logprobs",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "thought",
}
"""Sampling parameters that the command line does not have."""

_ANSWERS = {
    *("n", "best_of", "beam_width", "length_penalty", "early_stopping"),
    *("min_tokens", "ignore_eos", "logprobs"),
}
"""Sampling parameters that conversations lack: those of several answers and of measurements."""

_PARAMETERS = {
    "beam_search.width": "beam_width",
    "beam_search.length_penalty": "length_penalty",
    "beam_search.early_stopping": "early_stopping",
    "choice.choices": "choice",
}
"""Parameters named differently from the field of a request's sampling parameters that they fill."""


def spelled_with_parameters(error: InvalidArgument) -> str:
    """What the server says, beginning with the command's parameter if that fills the field."""
    path = re.sub(r"\[\d+\]", "", error.field).removeprefix("sampling_params.")
    return _PARAMETERS.get(path, path) + error.message.removeprefix(error.field)


_LIST_OPTION: tuple[Any, Any] = (list[str], [])
_OWN_KINDS: dict[str, tuple[Any, Any]] = {
    "max_tokens": (int, 256),
    "stop": _LIST_OPTION,
    "choice": _LIST_OPTION,
    "json_schema": (str | None, None),
    "early_stopping": (EarlyStopping | None, None),
    "ignore_eos": (bool, None),
}
"""Type and default of options that have other ones than their parameter."""

_OWN_HELP = {
    "max_tokens": "Most tokens of the answer.",
    "stop": "The answer ends before this text; may be repeated.",
    "json_schema": "The answer is JSON that this schema allows: a file, or JSON text.",
    "grammar": "The answer matches this grammar: a file, or Lark text.",
    "choice": "The answer is one of these texts; to be repeated.",
    "early_stopping": "Beam search: when it ends.",
}


def _sampling_group(names: Iterable[str]) -> OptionGroup[SamplingParams]:
    kinds, texts = get_type_hints(SamplingParams), _field_docs(SamplingParams) | _OWN_HELP

    def option(name: str) -> inspect.Parameter:
        kind, default = _OWN_KINDS.get(name, (kinds[name], None))
        names = ("--n", "-n") if name == "n" else ()
        return _option(name, kind, default, texts[name].partition(" None:")[0], *names)

    return OptionGroup(tuple(map(option, names)), _sampling_params)


def _sampling_params(**values: Any) -> SamplingParams:
    values["json_schema"] = _content("json_schema", values["json_schema"], "{")
    values["grammar"] = _content("grammar", values["grammar"], ":")
    values["choice"] = values["choice"] or None
    if (ends := values.get("early_stopping")) is not None:
        values["early_stopping"] = "never" if ends == "never" else ends == "true"
    return SamplingParams(**values)


def _content(name: str, text: str | None, mark: str) -> str | None:
    """The contents of the file of this name if it exists, else the text itself, which has `mark`
    in it. Raises BadParameter for other text."""
    if text is None:
        return None
    try:
        if Path(text).is_file():
            return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError):  # not a valid file name
        return text
    if mark not in text:
        option = f"--{name.replace('_', '-')}"
        raise typer.BadParameter(f"{option}: expected a file or a text with {mark}, got {text!r}")
    return text


def _engine_parameter(flag: engine_args.Flag) -> inspect.Parameter:
    """`envvar` is only shown in the help: a service reads its environment itself."""
    name = f"{flag.option}/--no-{flag.option[2:]}" if flag.negatable else flag.option
    kind: Any = flag.kind
    return _option(
        flag.name,
        kind | None,
        None,
        flag.help,
        *filter(None, (name, flag.short)),
        envvar=f"PAGEWIRE_{flag.name.upper()}",
        show_default=False,
        rich_help_panel=("All services" if flag.service == "all" else flag.service.capitalize()),
    )


_OFFERED = [option.name for option in fields(SamplingParams) if option.name not in _NO_OPTIONS]
_FILES = {option.name: {"metavar": "FILE"} for option in fields(Membership)}

CONNECTION = group_of(Connection)
_CORE = {"metavar": "ADDRESS", "show_default": f"that of `pagewire serve`, else {DEFAULT_CORE}"}
CORE_CONNECTION = group_of(CoreConnection, {**_FILES, "core": _CORE})
MEMBERSHIP = group_of(Membership, _FILES)
SAMPLING = _sampling_group(name for name in _OFFERED if name not in _ANSWERS)
"""Options of a conversation, which has one answer at a time."""
SAMPLING_AND_ANSWERS = _sampling_group(_OFFERED)
ENGINE: OptionGroup[dict[str, Any]] = OptionGroup(
    tuple(_engine_parameter(flag) for flag in engine_args.FLAGS), dict
)
"""The services' flags; None where one was not given."""
