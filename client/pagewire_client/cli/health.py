"""`pagewire health`: whether a service serves, for container health checks."""

from typing import Annotated

import typer

from pagewire_client.cli import terminal
from pagewire_client.connection import check_address
from pagewire_client.local.health import why_not_serving


def health(
    address: Annotated[str, typer.Argument(help="HOST:PORT or unix:PATH of any service.")],
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 3.0,
    service: Annotated[
        str, typer.Option(help="One of its services, or `liveness`: that the process answers.")
    ] = "",
) -> None:
    """Tell whether a service can do its work: exit code 0 if so, 1 if not."""
    check_address(address)
    reason = why_not_serving(address, timeout, service)
    terminal.write("serving\n" if reason is None else f"not serving: {reason}\n")
    raise typer.Exit(code=0 if reason is None else 1)
