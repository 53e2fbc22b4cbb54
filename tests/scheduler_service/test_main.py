"""One program, and each of its commands takes what it needs."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from scheduler_service.__main__ import MODULES, make_app

IMPORTED = """
import sys
from scheduler_service.__main__ import make_app
make_app(sys.argv[1:])
print(*sorted(sys.modules))
"""


def test_all_commands_are_listed() -> None:
    said = CliRunner().invoke(make_app(), ["--help"]).output
    assert all(command in said for command in MODULES)


@pytest.mark.parametrize("command", MODULES)
def test_a_command_alone_has_its_name_still(command: str) -> None:
    result = CliRunner().invoke(make_app([command]), [command, "--help"])
    assert result.exit_code == 0
    assert command in result.output


@pytest.mark.parametrize("command", ["scheduler", "frontend"])
def test_services_start_without_what_only_other_commands_need(command: str) -> None:
    environment = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    run = subprocess.run(
        [sys.executable, "-c", IMPORTED, command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "numpy" not in run.stdout.split()


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            "--first-step-timeout 0",
            "--first-step-timeout: expected at least --step-timeout (10), got 0",
        ),
        (
            "--first-step-timeout -1",
            "--first-step-timeout: expected 0 to 1000000000 seconds, got -1",
        ),
        # The default of the one follows the other.
        ("--step-timeout 400 --lease-ms 1", "--lease-ms: expected 100 to 600000, got 1"),
        ("--step-timeout nan", "--step-timeout: expected 0 to 1000000000 seconds, got nan"),
        ("--grace-period -1", "--grace-period: expected 0 to 1000000000 seconds, got -1"),
    ],
)
def test_a_number_out_of_range_is_refused_by_flag_with_the_range(flags: str, error: str) -> None:
    result = CliRunner().invoke(make_app(["scheduler"]), ["scheduler", *flags.split()])
    assert result.exit_code == 2
    assert f"error: {error}" in result.stderr
