"""`pagewire key`: API keys for the file that frontends are given by --api-keys."""

import hashlib
import json
import re
import secrets
from datetime import UTC, datetime
from typing import Annotated

import typer

from pagewire_cli import terminal

KEY_BYTES = 32
PREFIX = "pw-"
"""Prefix by which leaked keys can be found, for example in a repository."""

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Check the name as frontends do: an entry with an invalid name makes the whole file invalid."""

key = typer.Typer(help="Make API keys.", no_args_is_help=True)


@key.callback()
def _commands() -> None:
    """Make API keys."""


def _named(tenant: str) -> str:
    if not _TENANT.fullmatch(tenant):
        raise typer.BadParameter("expected 1 to 64 characters of [A-Za-z0-9._-]")
    return tenant


def _not_empty(names: list[str] | None) -> list[str] | None:
    if names and not all(names):
        raise typer.BadParameter("expected a name, got an empty text")
    return names


def _future_time(text: str) -> datetime:
    """The time that `text` names, with its zone; UTC if it names none."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        example = "such as 2030-01-31 or 2030-01-31T12:00:00"
        raise typer.BadParameter(f"expected a date or a time, {example}, got {text!r}") from None
    time = time.replace(tzinfo=time.tzinfo or UTC)
    if time <= datetime.now(UTC):
        raise typer.BadParameter(f"expected a time in the future, got {text}")
    return time


@key.command()
def new(
    tenant: Annotated[
        str, typer.Option(callback=_named, help="Tenant of the requests that use the key.")
    ],
    model: Annotated[
        list[str] | None,
        typer.Option(
            callback=_not_empty,
            help="A model that the key may use; may be repeated.",
            show_default="all",
        ),
    ] = None,
    lora_module: Annotated[
        list[str] | None,
        typer.Option(
            callback=_not_empty,
            help="An adapter that the key may use; may be repeated.",
            show_default="all",
        ),
    ] = None,
    expires: Annotated[
        datetime | None,
        typer.Option(
            parser=_future_time,
            metavar="TIME",
            help="Date or time at which the key expires, as 2030-01-31T12:00:00; UTC.",
            show_default="never",
        ),
    ] = None,
    operator: Annotated[
        bool,
        typer.Option("--operator", help="Allow the key to see the state of the whole deployment."),
    ] = False,
) -> None:
    """Generate a key and print its entry for the file of keys.

    The key itself is printed once, on standard error; the entry contains only its hash:

    pagewire key new --tenant production >> keys.toml
    """
    drawn = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    terminal.write(_entry(drawn, tenant, model, lora_module, expires, operator=operator))
    typer.echo(drawn, err=True)


def _entry(
    drawn: str,
    tenant: str,
    models: list[str] | None,
    lora_modules: list[str] | None,
    expires: datetime | None,
    *,
    operator: bool,
) -> str:
    lines = ["[[key]]", f'sha256 = "{hashlib.sha256(drawn.encode()).hexdigest()}"']
    lines.append(f"tenant = {_quoted(tenant)}")
    if models:
        lines.append(f"models = [{', '.join(map(_quoted, models))}]")
    if lora_modules:
        lines.append(f"lora_modules = [{', '.join(map(_quoted, lora_modules))}]")
    if expires is not None:
        lines.append(f"expires = {expires.isoformat()}")
    if operator:
        lines.append("operator = true")
    return "\n".join([*lines, "", ""])


def _quoted(text: str) -> str:
    """Quoted as in JSON, which TOML reads too."""
    return json.dumps(text, ensure_ascii=False)
