"""`pagewire serve`: a deployment on this machine, kept alive until it is asked to end."""

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from pagewire_cli import terminal
from pagewire_cli.local import LocalServices, service_commands
from pagewire_cli.local.services import MAX_SERVICES
from pagewire_cli.options import ENGINE, group_of, with_options
from pagewire_client.connection import DEFAULT_ADDRESS

_ENDED = b"\0"
"""No signal has this number."""
SAME_REQUEST_S = 0.5
"""Signals that follow the first one within this time are of the same request to end."""
DEFAULT_HTTP_ADDRESS = "127.0.0.1:8000"
"""The address that OpenAI clients of a local server commonly use."""
EMBEDDED = "embedded"
"""The model that comes with Pagewire."""


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The services to start."""

    model: str | None = None
    """Checkpoint directory, GGUF file, Hugging Face hub id (`owner/name`; of a GGUF file
    `owner/name:TYPE`), or `embedded`."""
    listen: str = DEFAULT_ADDRESS
    """HOST:PORT or unix:PATH for gRPC clients; further frontends use the next ports."""
    http: str = DEFAULT_HTTP_ADDRESS
    """Address of the OpenAI-compatible HTTP API, shared by all frontends."""
    host: str | None = None
    """Host of the HTTP API, in place of the one in --http."""
    port: int | None = None
    """Port of the HTTP API, in place of the one in --http."""
    api_key: list[str] = field(default_factory=list)
    """Key that clients must send; repeat it for further keys. Other users of this machine cannot
    read the variable, whose keys are separated by spaces. For keys of several tenants see
    --api-keys."""
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
        "model": {"show_default": EMBEDDED},
        "http": {"metavar": "HOST:PORT|off"},
        "host": {"envvar": None},
        "port": {"envvar": None, "min": 1, "max": 65535},
        "metrics_port": {"metavar": "[HOST:]PORT"},
        "frontends": {"min": 1, "max": MAX_SERVICES},
        "workers": {"min": 1, "max": MAX_SERVICES},
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

    A service that dies is restarted, and open streams continue. SIGTERM, ctrl-C and the terminal's
    end let running requests finish within the grace period; a second one stops everything at once.
    """
    given = (name for name in (checkpoint, deployment.model) if name is not None)
    model = next(given, EMBEDDED)
    if deployment.model not in (None, model):
        raise typer.BadParameter(
            f"--model (or PAGEWIRE_MODEL): expected one model, got {deployment.model} and {model}"
            " (MODEL); for several names of a model repeat --served-model-name"
        )
    if not all(key.strip() for key in deployment.api_key):
        raise typer.BadParameter("--api-key: expected a key, got an empty one")
    if (engine["log_format"] or os.environ.get("PAGEWIRE_LOG_FORMAT")) == "json":
        terminal.write_json()
    if (engine["log_level"] or os.environ.get("PAGEWIRE_LOG_LEVEL")) in ("warning", "error"):
        logging.getLogger("pagewire_cli").setLevel(logging.WARNING)

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
        api_keys=deployment.api_key,
        metrics_port=None if deployment.metrics_port == "off" else deployment.metrics_port,
        on_line=on_line,
    )
    errors: list[Exception] = []
    started = threading.Event()
    events, event_writer = _signal_pipe()

    def run() -> None:
        try:
            services.start()
            started.set()
            slow.cancel()
            _print_addresses(services, _served_names(model, engine), engine)
            services.wait_failed()
        except Exception as error:
            errors.append(error)
        finally:
            os.write(event_writer, _ENDED)

    with terminal.note_if_slow(still_checking(model)) as slow:
        threading.Thread(target=run, daemon=True).start()
        event = os.read(events, 1)
    if event != _ENDED:
        terminal.note(f"{_name(event)}: stopping when running requests are finished")
        threading.Thread(target=_kill_at_next_signal, args=(services, events), daemon=True).start()
        if started.is_set():
            services.stop()
            return
    services.kill()
    if event == _ENDED and (failure := errors[0] if errors else services.failure):
        raise failure


def _signal_pipe() -> tuple[int, int]:
    """A pipe to which SIGTERM, SIGINT and SIGHUP write their numbers, a byte each; SIGHUP stays
    ignored under `nohup`.

    Their handlers do nothing: an exception that one raises while another is handled can leave locks
    in a wrong state, and is lost in a destructor. Nor would a handler always interrupt a wait for a
    lock, if the signal comes just before it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return reader, writer


def _name(event: bytes) -> str:
    return signal.Signals(event[0]).name


def _kill_at_next_signal(services: LocalServices, events: int) -> None:
    # The end was asked for, and both the kernel and the shell signal that a terminal has ended;
    # `timeout` signals its child, and then the group that its child is in.
    first_s = time.monotonic()
    while (event := os.read(events, 1)) in (_ENDED, bytes([signal.SIGHUP])) or (
        time.monotonic() - first_s < SAME_REQUEST_S
    ):
        pass
    terminal.note(f"{_name(event)} again: stopping at once")
    services.kill()


def _served_names(model: str, engine: dict[str, Any]) -> list[str]:
    """The names that requests may give, as the worker derives them from its flags and variables."""
    if names := engine["served_model_name"]:
        return list(names)
    if names := os.environ.get("PAGEWIRE_SERVED_MODEL_NAME", "").split():
        return names
    worker = service_commands.kind_of_worker(simulate=bool(engine["simulate"]))
    return ["simulated" if worker == "simulated worker" else model]


def _print_addresses(services: LocalServices, names: list[str], engine: dict[str, Any]) -> None:
    where = ", ".join(services.addresses)
    terminal.note(f"serving {', '.join(names)} on {where}", style="bold")
    if services.http_address is not None:
        url = _url(services.http_address, engine)
        terminal.note(f"HTTP for OpenAI clients: {url}/v1")
        terminal.note(f"dashboard: {url}/")
    terminal.note(f"for `pagewire drain`: --core {services.core_address}")
    if services.metrics_addresses:
        terminal.note(f"metrics for Prometheus: {', '.join(services.metrics_addresses)}")


def still_checking(model: str) -> str:
    """What the services do before they listen and their output is shown."""
    if model == EMBEDDED or Path(model).exists():
        return f"still checking the flags and the model {model}"
    return f"still looking for {model} on the Hugging Face hub"


def _http_address(deployment: Deployment) -> str | None:
    if deployment.http == "off":
        if deployment.host is not None or deployment.port is not None:
            raise typer.BadParameter(
                "--http off serves no HTTP, for which there is --host or --port"
            )
        return None
    host, colon, port = deployment.http.rpartition(":")
    if not colon:
        raise typer.BadParameter(f"--http: expected HOST:PORT or off, got {deployment.http!r}")
    host = deployment.host or host
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{deployment.port or port}"


def _url(address: str, engine: dict[str, Any]) -> str:
    secure = engine["tls_cert"] or os.environ.get("PAGEWIRE_TLS_CERT")
    return f"{'https' if secure else 'http'}://{address}"
