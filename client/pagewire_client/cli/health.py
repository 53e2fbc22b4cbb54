"""`pagewire health`: whether a service serves, for container health checks."""

from typing import Annotated

import typer

from pagewire_client.cli import terminal
from pagewire_client.local.health import is_serving


def health(
    address: Annotated[str, typer.Argument(help="HOST:PORT or unix:PATH of any service.")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 3.0,
    service: Annotated[
        str, typer.Option(help="One of its services, or `liveness`: that the process answers.")
    ] = "",
) -> None:
    """Tell whether a service can do its work: exit code 0 if so, 1 if not."""
    serving = is_serving(address, timeout, service)
    terminal.write("serving\n" if serving else "not serving\n")
    raise typer.Exit(code=0 if serving else 1)
