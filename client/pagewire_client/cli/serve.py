"""`pagewire serve`: a deployment on this machine, kept alive until it is asked to end."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated, Any

import typer

from pagewire_client.cli import terminal
from pagewire_client.cli.options import ENGINE, with_options
from pagewire_client.connection import DEFAULT_ADDRESS
from pagewire_client.local import LocalServices

DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"
"""The address that OpenAI clients of a local server commonly use."""
_WAIT_S = 3600.0
"""On some platforms a signal cannot interrupt a wait without a timeout."""


@with_options(engine=ENGINE)
def serve(
    engine: dict[str, Any],
    checkpoint: Annotated[str | None, typer.Argument(hidden=True)] = None,
    *,
    model: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_MODEL",
            help="Checkpoint directory, Hugging Face hub id, or `embedded`.",
        ),
    ] = "embedded",
    listen: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_LISTEN",
            help="HOST:PORT or unix:PATH for gRPC clients; further frontends use the next ports.",
        ),
    ] = DEFAULT_ADDRESS,
    http: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_HTTP",
            metavar="HOST:PORT|off",
            help="Address of the OpenAI-compatible HTTP API, shared by all frontends.",
        ),
    ] = DEFAULT_HTTP_ADDRESS,
    metrics_port: Annotated[
        str | None,
        typer.Option(
            envvar="PAGEWIRE_METRICS_PORT",
            metavar="[HOST:]PORT",
            help="Port of the core's /metrics for Prometheus; the frontends and then the workers "
            "use the next ports.",
        ),
    ] = None,
    frontends: Annotated[
        int, typer.Option(min=1, envvar="PAGEWIRE_FRONTENDS", help="Number of frontends.")
    ] = 1,
    workers: Annotated[
        int, typer.Option(min=1, envvar="PAGEWIRE_WORKERS", help="Number of workers.")
    ] = 1,
) -> None:
    """Serve a model: one scheduler core, frontends and workers on this machine.

    A service that dies is restarted, and open streams continue. SIGTERM and ctrl-C let running
    requests finish within the grace period; a second one stops everything at once.
    """
    if checkpoint is not None:
        raise typer.BadParameter(f"--model names the model: pagewire serve --model {checkpoint}")
    services = LocalServices(
        model,
        engine_flags=engine,
        num_frontends=frontends,
        num_workers=workers,
        listen=listen,
        http=None if http == "off" else http,
        metrics_port=None if metrics_port == "off" else metrics_port,
        on_line=terminal.log_line,
    )
    with _signals_raise():
        try:
            services.start()
            terminal.note(f"serving {model} on {', '.join(services.addresses)}", style="bold")
            if services.http_address is not None:
                url = _url(services.http_address, engine)
                terminal.note(f"HTTP for OpenAI clients: {url}/v1")
                terminal.note(f"dashboard: {url}/")
            if services.metrics_addresses:
                terminal.note(f"metrics for Prometheus: {', '.join(services.metrics_addresses)}")
            while not services.wait_failed(_WAIT_S):
                pass
        except _Signalled as signalled:
            _stop(services, signalled)
        else:
            services.kill()
            if services.failure:
                raise services.failure


def _url(address: str, engine: dict[str, Any]) -> str:
    secure = engine["tls_cert"] or os.environ.get("PAGEWIRE_TLS_CERT")
    return f"{'https' if secure else 'http'}://{address}"


class _Signalled(Exception):
    """Raised by a signal that asks to stop; its argument is the signal's name."""


def _stop(services: LocalServices, first: _Signalled) -> None:
    try:
        # Within the try block: a user who reads it may send a second signal at once.
        terminal.note(f"{first}: stopping when running requests are finished")
        services.stop()
    except _Signalled as signalled:
        terminal.note(f"{signalled} again: stopping at once")
        services.kill()


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGTERM and SIGINT raise `_Signalled` in the main thread."""

    def handle(number: int, _: FrameType | None) -> None:
        raise _Signalled(signal.Signals(number).name)

    former = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
