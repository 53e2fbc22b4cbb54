"""Pagewire's other programs: each command becomes `python -m …` with the same arguments, or reads
its arguments itself."""

import os
import sys

import typer

from pagewire_cli import foreign_flags, health
from pagewire_cli.command import refuse
from pagewire_cli.local import service_commands

_PROGRAMS = {
    "frontend": "Run a frontend, which serves clients over gRPC and HTTP.",
    "scheduler": "Run the scheduler core, which decides what runs where.",
    "worker": "Run a worker, which holds a model and executes steps.",
    "conformance": "Check whether a worker implements the contract.",
    "replay": "Replay a recorded schedule, without workers.",
}
_WITH_FOREIGN_FLAGS = ("frontend", "scheduler", "worker")


def add_to(app: typer.Typer) -> None:
    """Add the commands, which leave their arguments to the programs."""
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    for name, text in _PROGRAMS.items():
        app.command(name, help=text, add_help_option=False, context_settings=settings)(_become)
    app.command("health", help=health.TEXT, add_help_option=False, context_settings=settings)(
        _check_health
    )


def _check_health(context: typer.Context) -> None:
    raise typer.Exit(health.main(context.args))


def _become(context: typer.Context) -> None:
    """Replace this process, so that the service itself gets signals and sets the exit code."""
    name, arguments = str(context.info_name), context.args
    needed = name
    if name == "worker":
        needed = service_commands.kind_of_worker(simulate="--simulate" in arguments)
    service_commands.require(needed)
    if name in _WITH_FOREIGN_FLAGS:
        arguments = _without_foreign_flags(arguments)
    command = [sys.executable, "-m", *service_commands.COMMANDS[name], *arguments]
    os.execve(sys.executable, command, service_commands.environment())


def _without_foreign_flags(arguments: list[str]) -> list[str]:
    """The arguments for a service, which explains the unknown ones that are not vLLM's itself."""
    foreign = [arg for arg in arguments if foreign_flags.is_foreign(arg.partition("=")[0])]
    unknown = [arg for arg in foreign if not foreign_flags.is_always_on(arg)]
    if unknown:
        refuse([arg.partition("=")[0] for arg in unknown], foreign=True)
    return [arg for arg in arguments if arg not in foreign]
