"""The page of all commands and flags, generated from the programs."""

import argparse
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import typer

from conformance.__main__ import main as run_conformance
from pagewire_cli import health
from pagewire_cli.app import app as pagewire
from scheduler_service.__main__ import make_app
from worker_service.__main__ import app as worker

HEAD = """\
# Command line

Every flag of `pagewire` and its services, with the text of `--help`. A flag overrides its
environment variable.
"""

conformance = typer.Typer()
conformance.command()(run_conformance)


def commands() -> Iterator[tuple[str, Any]]:
    """(name, click command), in the order of the page."""
    services = {
        "worker": typer.main.get_command(worker),
        "conformance": typer.main.get_command(conformance),
        **typer.main.get_command(make_app()).commands,  # type: ignore[attr-defined]
        "health": _as_click(health.parser()),
    }
    group = typer.main.get_command(pagewire)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        if inner := getattr(command, "commands", None):
            yield from ((f"{name} {of_group}", found) for of_group, found in inner.items())
        else:
            yield name, services.get(name, command)


def _as_click(parser: argparse.ArgumentParser) -> SimpleNamespace:
    """The attributes of a click command that the page needs, from an argparse parser."""
    params = [
        SimpleNamespace(
            name=action.dest,
            opts=action.option_strings,
            secondary_opts=[],
            param_type_name="option" if action.option_strings else "argument",
            help=action.help,
            envvar=re.findall(r"variable: (\w+)", action.help or ""),
            default=None,  # the help texts say it
        )
        for action in parser._actions
    ]
    return SimpleNamespace(params=params, help=parser.description)


def render() -> str:
    """The page as Markdown."""
    return HEAD + "".join(_command(name, command) for name, command in commands())


def _command(name: str, command: Any) -> str:
    rows = [_row(param) for param in command.params if param.name != "help"]
    help_text = (command.help or "").split("\n\n")[0]
    table = "| | meaning | default | variable |\n| --- | --- | --- | --- |\n" + "".join(rows)
    return f"\n## pagewire {name}\n\n{help_text}\n\n{table if rows else ''}"


def _row(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names = [parameter.name.upper()]
    words = ", ".join(f"`{name}`" for name in names)
    variables = parameter.envvar or []
    variable = ", ".join([variables] if isinstance(variables, str) else variables)
    help_text = (getattr(parameter, "help", "") or "").replace("|", "\\|").replace("\n", " ")
    return f"| {words} | {help_text} | {_default(parameter)} | {variable and f'`{variable}`'} |\n"


def _default(parameter: Any) -> str:
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str):
        return f"({shown})"
    default = parameter.default
    if default is None or callable(default) or not shown:
        return ""
    value = getattr(default, "value", default)
    if isinstance(value, bool):
        return "on" if value else "off"
    values = value if isinstance(value, list) else [value]
    return ", ".join(f"`{value}`" for value in values if value != "")
