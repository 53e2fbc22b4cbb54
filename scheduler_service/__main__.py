"""`python -m scheduler_service scheduler`, `… frontend` and `… replay FILE`."""

import sys
from collections.abc import Iterable
from importlib import import_module

import typer

from pagewire.usage_errors import OneLineCommand, OneLineGroup
from service_common.config_flags import CONTEXT, run_to_exit

MODULES = {
    "scheduler": "scheduler_service.core_service.cli",
    "frontend": "scheduler_service.frontend.cli",
    "replay": "scheduler_service.replay.cli",
}
"""By command, the module of the function with its name."""


def make_app(commands: Iterable[str] = MODULES) -> typer.Typer:
    """The command line, with these commands."""
    app = typer.Typer(
        name="scheduler_service",
        cls=OneLineGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=CONTEXT,
    )
    app.callback(
        help="The scheduling side of Pagewire: one scheduler core, any number of frontends."
    )(_no_options)
    for name in commands:
        app.command(cls=OneLineCommand)(getattr(import_module(MODULES[name]), name))
    return app


def _no_options() -> None:
    """Before any command; without it, a single one would have no name."""


def main() -> None:
    """Run the command that the arguments name, without importing the others."""
    named = [name for name in sys.argv[1:2] if name in MODULES]
    app = make_app(named or MODULES)
    run_to_exit(lambda: app(prog_name="pagewire"))


if __name__ == "__main__":
    main()
