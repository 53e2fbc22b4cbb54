"""The commands together, and errors as one line and an exit code."""

import importlib.metadata
import logging
import os
import sys
from typing import Annotated

import typer

from pagewire_cli import services, terminal
from pagewire_cli.adapter import adapter
from pagewire_cli.bench import bench
from pagewire_cli.chat import chat
from pagewire_cli.command import CONTEXT, EXIT_WRONG_OPTION, Command, Group, ServeCommand
from pagewire_cli.demo import demo
from pagewire_cli.drain import drain
from pagewire_cli.generate import generate
from pagewire_cli.key import key
from pagewire_cli.local import health
from pagewire_cli.serve import serve
from pagewire_cli.status import status
from pagewire_cli.top import top
from pagewire_client.connection import is_local
from pagewire_client.errors import LocalServiceError, NotAuthorized, PagewireError, Unavailable

EXIT_FAILURE = 1

app = typer.Typer(
    name="pagewire",
    cls=Group,
    no_args_is_help=True,
    add_completion=False,
    context_settings=CONTEXT,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(importlib.metadata.version("pagewire"))
        raise typer.Exit


@app.callback()
def pagewire(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Serve large language models, and talk with them."""


app.command(cls=ServeCommand)(serve)
for command in (generate, chat, status, top, drain, bench, demo):
    app.command(cls=Command)(command)
app.add_typer(adapter, name="adapter")
app.add_typer(key, name="key")
services.add_to(app)

_NOT_SIGNED = "no known authority has signed its certificate"
_NOT_LISTENING = ("connection refused", "no such file or directory")


def _hint(error: Unavailable) -> str:
    """How to start a server or name one, for users who have just installed Pagewire."""
    if not error.message.startswith("cannot connect to"):
        return ""
    lines = list(getattr(error, "__notes__", ()))
    attempts = [line for address in error.addresses for line in health.attempts(address)]
    is_http = any(health.HTTP in attempt for attempt in attempts)
    says_http = "an HTTP server" in error.message
    lines += attempts if len(attempts) > 1 or (is_http and not says_http) else []
    if error.message.lower().endswith(_NOT_LISTENING) and not is_http:
        lines.append("`pagewire serve` starts one on this machine; --help says how to name another")
    if (proxy := _proxy()) and not all(map(is_local, error.addresses)):
        lines.append(f"the variable {proxy} names a proxy; no_proxy excepts hosts from it")
    if error.message.endswith(_NOT_SIGNED):
        lines.append("--tls-ca (of a core: --cluster-ca) names the file of the authority that has")
    return "".join(f"\n{line}" for line in lines)


def _proxy() -> str | None:
    """The variable by which gRPC chose a proxy."""
    names = ("grpc_proxy", "https_proxy", "http_proxy")
    return next((name for name in names if os.environ.get(name)), None)


def run() -> None:
    """Run the command that the arguments name, and exit."""
    line = "pagewire   | %(asctime)s %(levelname)s %(message)s"
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=line)
    logging.getLogger("pagewire_cli").setLevel(logging.INFO)
    try:
        app()
    except Unavailable as error:
        terminal.error(f"no server answers: {error.message}{_hint(error)}")
    except LocalServiceError as error:
        terminal.error(error.message)
        if error.details.get("exit_code") == str(EXIT_WRONG_OPTION):
            sys.exit(EXIT_WRONG_OPTION)
    except NotAuthorized as error:
        hint = "\n--api-key or PAGEWIRE_API_KEY sends one" if error.reason == "NO_API_KEY" else ""
        terminal.error(f"{error.message}{hint}")
    except (PagewireError, ValueError, OSError) as error:
        terminal.error(str(error))
    sys.exit(EXIT_FAILURE)
