"""Groups of options that commands share.

A command with a parameter for a group gets the group's options instead of it:

    @with_options(connection=CONNECTION)
    def status(connection: Connection, json: bool = False) -> None: ...

has the options of `Connection`'s fields besides `--json`, and is called with a `Connection`.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar, get_type_hints

import typer

from pagewire_client.async_client import AsyncClient
from pagewire_client.client import Client
from pagewire_client.connection import (
    DEFAULT_ADDRESS,
    ConnectionOptions,
    TlsOptions,
    connection_options,
)
from pagewire_client.local import engine_args
from pagewire_client.retry import RetryPolicy
from pagewire_client.sampling_params import SamplingParams

DEFAULT_CORE = "127.0.0.1:7610"
MEMBER_NAME = "pagewire-cluster"
"""The DNS name in the certificates of a cluster's members."""

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


def _group_of(record: type[T]) -> OptionGroup[T]:
    """A dataclass's fields as options."""
    hints = get_type_hints(record, include_extras=True)
    parameters = tuple(
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(entry),
            annotation=hints[entry.name],
        )
        for entry in fields(record)  # type: ignore[arg-type]
    )
    return OptionGroup(parameters, record)


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


@dataclass(frozen=True, kw_only=True)
class Connection:
    """How to reach a deployment."""

    address: Annotated[
        list[str],
        typer.Option(
            envvar="PAGEWIRE_ADDRESS",
            help="HOST:PORT or unix:PATH of a frontend; several to fail over between.",
        ),
    ] = field(default_factory=lambda: [DEFAULT_ADDRESS])
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PAGEWIRE_API_KEY",
            help="Sent with each call. Other users of this machine cannot read the variable.",
        ),
    ] = None
    tls: Annotated[bool, typer.Option("--tls", envvar="PAGEWIRE_TLS", help="Use TLS.")] = False
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_TLS_CA", help="Certificates (PEM) that may sign the server's."
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="PAGEWIRE_TLS_CERT", help="This client's certificate (PEM)."),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(envvar="PAGEWIRE_TLS_KEY", help="That certificate's key (PEM)."),
    ] = None

    def client(self) -> Client:
        """A client of that deployment."""
        return Client(self.address, tls=self._tls(), api_key=self.api_key, retry=_IMPATIENT)

    def async_client(self, retry: RetryPolicy) -> AsyncClient:
        """An asyncio client of that deployment."""
        return AsyncClient(self.address, tls=self._tls(), api_key=self.api_key, retry=retry)

    def _tls(self) -> TlsOptions | None:
        if not (self.tls or self.tls_ca or self.tls_cert or self.tls_key):
            return None
        return TlsOptions(
            root_certificates=self.tls_ca,
            certificate_chain=self.tls_cert,
            private_key=self.tls_key,
        )


@dataclass(frozen=True, kw_only=True)
class Membership:
    """Credentials for a scheduler core."""

    cluster_token_file: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_CLUSTER_TOKEN_FILE",
            metavar="FILE",
            help="File of the cluster's token.",
        ),
    ] = None
    cluster_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_CLUSTER_CA", metavar="FILE", help="The cluster's authority (PEM)."
        ),
    ] = None
    cluster_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_CLUSTER_CERT", metavar="FILE", help="A member's certificate (PEM)."
        ),
    ] = None
    cluster_key: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_CLUSTER_KEY", metavar="FILE", help="That certificate's key (PEM)."
        ),
    ] = None

    def connection_to(self, core: str) -> ConnectionOptions:
        """The options of channels and calls. Raises OSError for a file that cannot be read."""
        tls = None
        if self.cluster_ca or self.cluster_cert or self.cluster_key:
            tls = TlsOptions(
                root_certificates=self.cluster_ca,
                certificate_chain=self.cluster_cert,
                private_key=self.cluster_key,
                server_name=MEMBER_NAME,
            )
        return connection_options(core, tls, self._token())

    def _token(self) -> str | None:
        """The first token of the file, which is the one to send."""
        tokens = self.cluster_token_file.read_text().split() if self.cluster_token_file else []
        return tokens[0] if tokens else None


@dataclass(frozen=True, kw_only=True)
class CoreConnection(Membership):
    """How to reach a scheduler core."""

    core: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_CORE", metavar="ADDRESS", help="HOST:PORT or unix:PATH of the core."
        ),
    ] = DEFAULT_CORE

    def options(self) -> ConnectionOptions:
        """The options of channels and calls. Raises OSError for a file that cannot be read."""
        return self.connection_to(self.core)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How an answer is sampled, and where it ends."""

    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 256
    truncate_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Keep the last N tokens of a longer prompt; -1: as many as fit."),
    ] = None
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy.")
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most probable tokens whose probabilities reach this sum."
        ),
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from the N most probable tokens.")] = (
        None
    )
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from tokens at least this times as probable as the most probable one."
        ),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Makes the answer repeatable.")] = None
    stop: Annotated[
        list[str], typer.Option(help="The answer ends before this text; may be repeated.")
    ] = field(default_factory=list)
    json_schema: Annotated[
        str | None,
        typer.Option(help="The answer is JSON that this schema allows: a file, or JSON text."),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="The whole answer matches this regular expression.")
    ] = None
    grammar: Annotated[
        str | None, typer.Option(help="The answer matches this grammar: a file, or Lark text.")
    ] = None
    choice: Annotated[
        list[str], typer.Option(help="The answer is one of these texts; to be repeated.")
    ] = field(default_factory=list)

    def params(self) -> SamplingParams:
        """The options as sampling parameters."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop,
            json_schema=_content(self.json_schema),
            regex=self.regex,
            grammar=_content(self.grammar),
            choice=self.choice or None,
        )


class EarlyStopping(StrEnum):
    """When a beam search ends, as in transformers."""

    TRUE = "true"
    FALSE = "false"
    NEVER = "never"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How many answers there are, and how they are found."""

    n: Annotated[int | None, typer.Option("--n", "-n", help="Number of answers.")] = None
    best_of: Annotated[
        int | None,
        typer.Option(help="Number of candidates, of which the most probable are printed."),
    ] = None
    beam_width: Annotated[
        int | None, typer.Option(help="Use beam search with N beams instead of sampling.")
    ] = None
    length_penalty: Annotated[
        float | None,
        typer.Option(help="Beam search: scores are divided by length to this power."),
    ] = None
    early_stopping: Annotated[
        EarlyStopping | None, typer.Option(help="Beam search: when it ends.")
    ] = None

    def added_to(self, params: SamplingParams) -> SamplingParams:
        """`params` with these options."""
        ends: dict[EarlyStopping | None, Any] = {
            EarlyStopping.TRUE: True,
            EarlyStopping.FALSE: False,
            EarlyStopping.NEVER: "never",
        }
        return replace(
            params,
            n=self.n,
            best_of=self.best_of,
            beam_width=self.beam_width,
            length_penalty=self.length_penalty,
            early_stopping=ends.get(self.early_stopping),
        )


def _content(text: str | None) -> str | None:
    """The contents of the file of this name if it exists, else the text itself."""
    try:
        is_file = text is not None and Path(text).is_file()
    except (OSError, ValueError):  # not a valid file name
        return text
    return Path(text).read_text(encoding="utf-8") if is_file and text is not None else text


def _engine_parameter(flag: engine_args.Flag) -> inspect.Parameter:
    """`envvar` is only shown in the help: a service reads its environment itself."""
    names = [flag.option]
    if flag.kind is bool and flag.negatable:
        names = [f"{flag.option}/--no-{flag.option[2:]}"]
    panel = flag.services[0].capitalize() if len(flag.services) == 1 else "All services"
    option = typer.Option(
        *names,
        envvar=f"PAGEWIRE_{flag.name.upper()}",
        help=flag.help,
        show_default=False,
        rich_help_panel=panel,
    )
    kind: Any = flag.kind
    return inspect.Parameter(
        flag.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


CONNECTION = _group_of(Connection)
CORE_CONNECTION = _group_of(CoreConnection)
MEMBERSHIP = _group_of(Membership)
SAMPLING = _group_of(Sampling)
ANSWERS = _group_of(Answers)
ENGINE: OptionGroup[dict[str, Any]] = OptionGroup(
    tuple(_engine_parameter(flag) for flag in engine_args.FLAGS), dict
)
"""The services' flags; None where one was not given."""
