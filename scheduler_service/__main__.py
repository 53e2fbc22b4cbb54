"""`python -m scheduler_service scheduler`, `… frontend` and `… replay FILE`."""

import typer

from scheduler_service.core_service.command import scheduler
from scheduler_service.frontend.command import frontend
from scheduler_service.replay.command import replay

app = typer.Typer(
    name="scheduler_service",
    help="The scheduling side of Pagewire: one scheduler core, any number of frontends.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(scheduler)
app.command()(frontend)
app.command()(replay)


def main() -> None:
    """Run the command that the arguments name."""
    app()


if __name__ == "__main__":
    main()
