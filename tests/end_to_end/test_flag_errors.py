"""Every number among the flags of services, with values that are none or out of range."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from scheduler_service.__main__ import make_app
from worker_service.__main__ import app as worker

APPS = {"scheduler": make_app(["scheduler"]), "frontend": make_app(["frontend"]), "worker": worker}
TOO_SMALL = "-99"


def numbers(service: str) -> Iterator[str]:
    command: Any = typer.main.get_command(APPS[service])
    for param in getattr(command, "commands", {}).get(service, command).params:
        if param.type.name in ("int", "integer", "float") and not param.hidden:
            yield max(param.opts, key=len)


@pytest.mark.parametrize("service", APPS)
@pytest.mark.parametrize("value", ["x", "", TOO_SMALL])
def test_a_wrong_number_is_one_line_that_names_its_flag(service: str, value: str) -> None:
    arguments = [] if service == "worker" else [service]
    flags = list(numbers(service))
    assert len(flags) > 5
    for flag in flags:
        result = CliRunner().invoke(APPS[service], [*arguments, f"{flag}={value}"])
        assert result.exit_code == 2, (flag, result.output)
        line = result.stderr.strip()
        assert line.startswith(f"error: {flag}: expected "), line
        assert f"got {value if value == TOO_SMALL else repr(value)}" in line
        assert "\n" not in line
