"""`pagewire serve`: a deployment on this machine, kept alive until it is asked to end."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from pagewire_cli import terminal
from pagewire_cli.local import LocalServices
from pagewire_cli.options import ENGINE, group_of, with_options
from pagewire_client.connection import DEFAULT_ADDRESS

DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"
"""The address that OpenAI clients of a local server commonly use."""
_WAIT_S = 3600.0
"""On some platforms a signal cannot interrupt a wait without a timeout."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The services to start."""

    model: str = "embedded"
    """Checkpoint directory, GGUF file, Hugging Face hub id, or `embedded`."""
    listen: str = DEFAULT_ADDRESS
    """HOST:PORT or unix:PATH for gRPC clients; further frontends use the next ports."""
    http: str = DEFAULT_HTTP_ADDRESS
    """Address of the OpenAI-compatible HTTP API, shared by all frontends."""
    host: str | None = None
    """Host of the HTTP API, in place of the one in --http."""
    port: int | None = None
    """Port of the HTTP API, in place of the one in --http."""
    api_key: str | None = None
    """The one key that clients must send. Other users of this machine cannot read the variable.
    For keys of several tenants see --api-keys."""
    metrics_port: str | None = None
    """Port of the core's /metrics for Prometheus; the frontends and then the workers use the next
    ports."""
    frontends: int = 1
    """Number of frontends."""
    workers: int = 1
    """Number of workers."""


DEPLOYMENT = group_of(
    Deployment,
    {
        "http": {"metavar": "HOST:PORT|off"},
        "host": {"envvar": None},
        "port": {"envvar": None, "min": 1, "max": 65535},
        "metrics_port": {"metavar": "[HOST:]PORT"},
        "frontends": {"min": 1},
        "workers": {"min": 1},
    },
)


@with_options(deployment=DEPLOYMENT, engine=ENGINE)
def serve(
    deployment: Deployment,
    engine: dict[str, Any],
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.")
    ] = None,
) -> None:
    """Serve a model: one scheduler core, frontends and workers on this machine.

    A service that dies is restarted, and open streams continue. SIGTERM and ctrl-C let running
    requests finish within the grace period; a second one stops everything at once.
    """
    model = checkpoint or deployment.model
    if deployment.model not in (Deployment.model, model):
        raise typer.BadParameter(
            f"--model (or PAGEWIRE_MODEL) names another model, {deployment.model}, than {model}"
        )

    def on_line(name: str, line: str) -> None:
        slow.cancel()
        terminal.log_line(name, line)

    services = LocalServices(
        model,
        engine_flags=engine,
        num_frontends=deployment.frontends,
        num_workers=deployment.workers,
        listen=deployment.listen,
        http=_http_address(deployment),
        api_key=deployment.api_key,
        metrics_port=None if deployment.metrics_port == "off" else deployment.metrics_port,
        on_line=on_line,
    )
    with _signals_raise():
        try:
            with terminal.note_if_slow(still_checking(model)) as slow:
                services.start()
            where = ", ".join(services.addresses)
            names = engine["served_model_name"] or [model]
            terminal.note(f"serving {', '.join(names)} on {where}", style="bold")
            if services.http_address is not None:
                url = _url(services.http_address, engine)
                terminal.note(f"HTTP for OpenAI clients: {url}/v1")
                terminal.note(f"dashboard: {url}/")
            terminal.note(f"for `pagewire drain`: --core {services.core_address}")
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


def still_checking(model: str) -> str:
    """What the services do before they listen and their output is shown."""
    if model == Deployment.model or Path(model).exists():
        return f"still checking the flags and {model}"
    return f"still looking for {model} on the Hugging Face hub"


def _http_address(deployment: Deployment) -> str | None:
    if deployment.http == "off":
        if deployment.host is not None or deployment.port is not None:
            raise typer.BadParameter(
                "--http off serves no HTTP, for which there is --host or --port"
            )
        return None
    host, _, port = deployment.http.rpartition(":")
    return f"{deployment.host or host}:{deployment.port or port}"


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
    """SIGTERM and SIGINT raise `_Signalled` in the main thread. Afterwards they do nothing, so that
    a late one does not replace the exit code."""

    def handle(number: int, _: FrameType | None) -> None:
        raise _Signalled(signal.Signals(number).name)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
