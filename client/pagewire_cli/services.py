"""Pagewire's other programs: each command becomes `python -m …` with the same arguments, or reads
its arguments itself."""

import os
import sys
from typing import NoReturn

import typer

from pagewire_cli import health as health_check
from pagewire_cli import vllm_flags
from pagewire_cli.command import refuse
from pagewire_cli.local import service_commands


def worker(context: typer.Context) -> None:
    """Run a worker, which holds a model and executes steps."""
    service_commands.require(service_commands.kind_of_worker(simulate="--simulate" in context.args))
    _become("worker", _without_vllm_flags(context.args))


def scheduler(context: typer.Context) -> None:
    """Run the scheduler core, which decides what runs where."""
    service_commands.require("scheduler")
    _become("scheduler", _without_vllm_flags(context.args))


def frontend(context: typer.Context) -> None:
    """Run a frontend, which serves clients over gRPC and HTTP."""
    service_commands.require("frontend")
    _become("frontend", _without_vllm_flags(context.args))


def conformance(context: typer.Context) -> None:
    """Check whether a worker implements the contract."""
    _become("conformance", context.args)


def replay(context: typer.Context) -> None:
    """Replay a recorded schedule, without workers."""
    service_commands.require("replay")
    _become("replay", context.args)


def health(context: typer.Context) -> None:
    """Check whether a service can serve requests: exit code 0 if so, 1 if not."""
    raise typer.Exit(health_check.main(context.args))


def _without_vllm_flags(arguments: list[str]) -> list[str]:
    """The arguments for a service, which explains the unknown ones that are not vLLM's itself."""
    foreign = [arg for arg in arguments if vllm_flags.is_foreign(arg.partition("=")[0])]
    unknown = [arg for arg in foreign if not vllm_flags.is_always_on(arg)]
    if unknown:
        refuse([arg.partition("=")[0] for arg in unknown], vllm=True)
    return [arg for arg in arguments if arg not in foreign]


def _become(service: str, arguments: list[str]) -> NoReturn:
    """Replace this process, so that the service itself gets signals and sets the exit code."""
    command = [sys.executable, "-m", *service_commands.COMMANDS[service], *arguments]
    os.execve(sys.executable, command, service_commands.environment())
