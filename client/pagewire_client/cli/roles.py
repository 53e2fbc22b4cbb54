"""One service alone: becomes `python -m …` with the same arguments, `--help` among them."""

import os
import sys
from typing import NoReturn

import typer

from pagewire_client.local import programs


def worker(context: typer.Context) -> None:
    """Run a worker: it holds a model and executes steps."""
    _become("worker", context.args)


def scheduler(context: typer.Context) -> None:
    """Run the scheduler core: it decides what runs where."""
    _become("scheduler", context.args)


def frontend(context: typer.Context) -> None:
    """Run a frontend: clients call it."""
    _become("frontend", context.args)


def _become(service: str, arguments: list[str]) -> NoReturn:
    """The process stays the same, so that signals and exit code are the service's own."""
    programs.require(service)
    command = [sys.executable, "-m", *programs.COMMANDS[service], *arguments]
    os.execve(sys.executable, command, programs.environment())
