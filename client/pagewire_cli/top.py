"""`pagewire top`: throughput, queues, memory block by block and requests, in a terminal."""

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from pagewire.status_rates import RecentStatuses
from pagewire_cli.options import (
    CONNECTION,
    MEMBERSHIP,
    Connection,
    CoreToQuery,
    Membership,
    with_options,
)
from pagewire_cli.status import watch_core
from pagewire_cli.top_screen import Screen
from pagewire_client.deployment import EngineStatus
from pagewire_client.retry import Deadline

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 60.0


def _a_number(interval: float) -> float:
    if math.isnan(interval):  # which click finds in any range
        raise typer.BadParameter(
            f"expected {_MIN_INTERVAL_S:g} to {_MAX_INTERVAL_S:g}, got {interval}"
        )
    return interval


@with_options(connection=CONNECTION, membership=MEMBERSHIP)
def top(
    connection: Connection,
    membership: Membership,
    core: CoreToQuery = None,
    interval: Annotated[
        float,
        typer.Option(
            min=_MIN_INTERVAL_S,
            max=_MAX_INTERVAL_S,
            callback=_a_number,
            help="Seconds between updates.",
        ),
    ] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Take two snapshots, print one screen, and exit.")
    ] = False,
) -> None:
    """Watch a deployment: throughput, queues, each worker's memory, requests.

    The map shows KV blocks in the colour of their request. If the output is not a terminal, one
    screen is printed, as with --once. Ctrl-C ends it.
    """
    console = Console()
    with _statuses(connection, membership, core, interval) as statuses:
        if once or not console.is_terminal:
            _print_once(console, statuses)
        else:
            _show_live(console, statuses)


def _print_once(console: Console, statuses: Iterator[EngineStatus]) -> None:
    """Print one screen; its rates are over the time between the first two snapshots."""
    rates = RecentStatuses()
    rates.add(next(statuses))
    status = next(statuses)
    rates.add(status)
    lines = Screen(console.width, 10_000, in_colour=_has_colours(console)).render(status, rates)
    console.print(lines)


def _show_live(console: Console, statuses: Iterator[EngineStatus]) -> None:
    rates = RecentStatuses()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for status in statuses:
            rates.add(status)
            screen = Screen(console.width, console.height, in_colour=_has_colours(console))
            live.update(screen.render(status, rates), refresh=True)


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


@contextmanager
def _statuses(
    connection: Connection, membership: Membership, core: str | None, interval_s: float
) -> Iterator[Iterator[EngineStatus]]:
    """Statuses from a frontend (over reconnects) or from a core."""
    if core is None:
        with connection.client() as client:
            yield client.watch_status(interval_s, include_requests=True, include_blocks=True)
    else:
        options = membership.connection_to(core)
        with closing(watch_core(options, interval_s, Deadline(None), in_detail=True)) as statuses:
            yield statuses
