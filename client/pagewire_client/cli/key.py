"""`pagewire key`: API keys for the file that frontends are given by --api-keys."""

import hashlib
import json
import re
import secrets
from datetime import UTC, datetime
from typing import Annotated

import typer

from pagewire_client.cli import terminal

KEY_BYTES = 32
PREFIX = "pw-"
"""By which a key that has got out can be found, in a repository say."""

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""As frontends take it: an entry with another name would make the whole file no good."""

key = typer.Typer(help="Make API keys.", no_args_is_help=True)


@key.callback()
def _commands() -> None:
    """Make API keys."""


def _named(tenant: str) -> str:
    if not _TENANT.fullmatch(tenant):
        raise typer.BadParameter("expected 1 to 64 characters of [A-Za-z0-9._-]")
    return tenant


@key.command()
def new(
    tenant: Annotated[
        str, typer.Option(callback=_named, help="Whose requests those with the key are.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model that it is good for; may be repeated.", show_default="all"),
    ] = None,
    expires: Annotated[
        datetime | None,
        typer.Option(
            formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"],
            help="From when on it is no good any more, UTC.",
            show_default="never",
        ),
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="It may see the state of the whole deployment.")
    ] = False,
) -> None:
    """Draw a key, and print its entry for the file of keys.

    The key itself is shown this once, on standard error; only its hash is in the entry:

    pagewire key new --tenant production >> keys.toml
    """
    drawn = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    terminal.write(_entry(drawn, tenant, model, expires, operator=operator))
    typer.echo(drawn, err=True)


def _entry(
    drawn: str, tenant: str, models: list[str] | None, expires: datetime | None, *, operator: bool
) -> str:
    lines = ["[[key]]", f'sha256 = "{hashlib.sha256(drawn.encode()).hexdigest()}"']
    lines.append(f"tenant = {_quoted(tenant)}")
    if models:
        lines.append(f"models = [{', '.join(map(_quoted, models))}]")
    if expires is not None:
        lines.append(f"expires = {expires.replace(tzinfo=UTC).isoformat()}")
    if operator:
        lines.append("operator = true")
    return "\n".join([*lines, "", ""])


def _quoted(text: str) -> str:
    """As JSON quotes it, which is also TOML's way."""
    return json.dumps(text, ensure_ascii=False)
