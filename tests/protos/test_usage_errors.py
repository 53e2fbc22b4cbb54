"""What a command line says of wrong options: one line each, whatever is wrong."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from pagewire.usage_errors import OneLineCommand, OneLineGroup, spelled_as_options


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


app = typer.Typer(cls=OneLineGroup, no_args_is_help=True)


@app.command(cls=OneLineCommand)
def paint(
    file: Annotated[Path, typer.Argument()],
    colour: Colour = Colour.RED,
    coats: Annotated[int, typer.Option(min=1, envvar="COATS")] = 1,
    width: Annotated[float, typer.Option(min=0.5, max=2)] = 1,
    *,
    dry: Annotated[bool, typer.Option("--dry")] = False,
) -> None:
    """Paint."""
    if colour is Colour.BLUE and dry:
        raise typer.BadParameter("--dry: expected another colour, got blue")


@app.command("list")
def list_colours() -> None:
    """List."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("paint f --coats x", "--coats: expected a whole number of at least 1, got 'x'"),
        ("paint f --coats 0", "--coats: expected at least 1, got 0"),
        ("paint f --width x", "--width: expected a number from 0.5 to 2, got 'x'"),
        ("paint f --width 3", "--width: expected 0.5 to 2, got 3.0"),
        ("paint f --colour green", "--colour: expected one of 'red', 'blue', got 'green'"),
        ("paint f --coats", "--coats: expected a value"),
        ("paint f --dry=1", "--dry: expected no value"),
        ("paint f --dry --colour blue", "--dry: expected another colour, got blue"),
        ("paint", "FILE: expected a value"),
        ("paint f g", "g: expected no further argument"),
        ("paint f --coat 2", "--coat: no such option; did you mean --coats?"),
        ("pant", "pant: no such command; there are paint, list"),
    ],
)
def test_a_wrong_option_is_one_line_that_names_it_and_what_is_allowed(
    arguments: str, message: str
) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


def test_a_value_of_the_environment_names_its_variable() -> None:
    result = CliRunner().invoke(app, ["paint", "f"], env={"COATS": "0"})
    assert result.stderr == "error: --coats (COATS): expected at least 1, got 0\n"


def test_a_command_ends_with_its_own_exit_code() -> None:
    assert CliRunner().invoke(app, ["paint", "f"]).exit_code == 0
    assert "Paint." in CliRunner().invoke(app, []).output


def test_only_settings_that_are_options_are_spelled_as_such() -> None:
    options = {"max_num_seqs", "tls_cert", "tls_key"}
    for message, expected in (
        ("max_num_seqs: expected 1, got 0", "--max-num-seqs: expected 1, got 0"),
        ("tls_cert, tls_key: expected both", "--tls-cert, --tls-key: expected both"),
        ("vocab_size: expected 300", "vocab_size: expected 300"),
    ):
        assert spelled_as_options(message, options) == expected
