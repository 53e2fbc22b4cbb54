"""What our own programs make of the command lines and variables that deployments give them."""

from collections.abc import Mapping
from typing import Any

import pytest
import typer

from scheduler_service.__main__ import make_app
from worker_service.__main__ import app as worker_app


def command_of(role: str) -> Any:
    """The command of a service."""
    if role == "worker":
        return typer.main.get_command(worker_app)
    return typer.main.get_command(make_app([role])).commands[role]  # type: ignore[attr-defined]


def variables_of(role: str) -> set[str]:
    """The environment variables that it reads."""
    known = (param.envvar or [] for param in command_of(role).params)
    return {name for names in known for name in ([names] if isinstance(names, str) else names)}


def parsed(arguments: list[str], variables: Mapping[str, str]) -> dict[str, Any]:
    """The values of a command line whose first word is the role, with these variables of ours and
    no others."""
    assert {name for name in variables if name.startswith("PAGEWIRE_")} <= variables_of(
        arguments[0]
    )
    with pytest.MonkeyPatch.context() as patch:
        for name in variables_of(arguments[0]):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        role, *rest = arguments
        params: dict[str, Any] = command_of(role).make_context(role, rest).params
    return params
