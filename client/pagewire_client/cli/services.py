"""Another program of ours: becomes `python -m …` with the same arguments, `--help` among them."""

import os
import sys
from typing import NoReturn

import typer

from pagewire_client.local import service_commands


def worker(context: typer.Context) -> None:
    """Run a worker: it holds a model and executes steps."""
    service_commands.require(service_commands.kind_of_worker(simulate="--simulate" in context.args))
    _become("worker", context.args)


def scheduler(context: typer.Context) -> None:
    """Run the scheduler core: it decides what runs where."""
    service_commands.require("scheduler")
    _become("scheduler", context.args)


def frontend(context: typer.Context) -> None:
    """Run a frontend: clients call it."""
    service_commands.require("frontend")
    _become("frontend", context.args)


def conformance(context: typer.Context) -> None:
    """Check whether a worker, of any make, keeps the contract."""
    _become("conformance", context.args)


def replay(context: typer.Context) -> None:
    """Run a recorded schedule again; needs no worker."""
    service_commands.require("replay")
    _become("replay", context.args)


def _become(service: str, arguments: list[str]) -> NoReturn:
    """The process stays the same, so that signals and exit code are the service's own."""
    command = [sys.executable, "-m", *service_commands.COMMANDS[service], *arguments]
    os.execve(sys.executable, command, service_commands.environment())
