"""Flags that are derived from configuration are those that operators know."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from scheduler_service.__main__ import make_app

FLAGS = json.loads((Path(__file__).parent / "flags.json").read_text())
"""By command and flag: the environment variable and the default."""


def parameters(command: str) -> list[Any]:
    app = typer.main.get_command(make_app([command]))
    return [param for param in app.commands[command].params if param.name != "help"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", FLAGS)
def test_flags_variables_and_defaults_are_as_documented(command: str) -> None:
    assert FLAGS[command] == {
        "/".join([*parameter.opts, *parameter.secondary_opts]): [
            parameter.envvar,
            getattr(parameter.default, "value", parameter.default),
        ]
        for parameter in parameters(command)
    }


@pytest.mark.parametrize("command", FLAGS)
def test_each_flag_has_a_help_text_of_one_paragraph(command: str) -> None:
    for parameter in parameters(command):
        assert parameter.help.endswith("."), parameter.name
        assert "`" not in parameter.help.replace("`pagewire replay`", "").replace("None", ""), (
            parameter.help
        )
