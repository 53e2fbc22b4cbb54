"""What both commands share: flags, logging, and errors as one line and an exit code."""

import asyncio
import resource
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

import typer

from scheduler_service.errors import CannotRecord
from service_common.errors import CannotListen
from service_common.logging_config import LogFormat, LogLevel, configure_logging
from service_common.tracing import CannotTrace

Config = TypeVar("Config")

EXIT_FAILURE = 1
EXIT_BAD_CONFIG = 2


OtlpEndpoint: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="PAGEWIRE_OTLP_ENDPOINT",
        metavar="URL",
        help="Where requests' spans are exported to (OTLP over gRPC), as http://127.0.0.1:4317; "
        "without it as OpenTelemetry's own variables say.",
    ),
]
HealthListen: TypeAlias = Annotated[
    str | None,
    typer.Option(
        envvar="PAGEWIRE_HEALTH_LISTEN",
        metavar="HOST:PORT|unix:PATH",
        help="Answer health checks here besides, without TLS or credentials.",
    ),
]
ClusterTokenFile: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        envvar="PAGEWIRE_CLUSTER_TOKEN_FILE",
        metavar="FILE",
        help="The token that the services of the deployment show each other; see docs/security.md.",
    ),
]
ClusterCa: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        envvar="PAGEWIRE_CLUSTER_CA",
        metavar="FILE",
        help="Authority of the services' certificates (PEM), for TLS between them.",
    ),
]
ClusterCert: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        envvar="PAGEWIRE_CLUSTER_CERT", metavar="FILE", help="This service's certificate (PEM)."
    ),
]
ClusterKey: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        envvar="PAGEWIRE_CLUSTER_KEY", metavar="FILE", help="That certificate's key (PEM)."
    ),
]


def run_service(
    make_config: Callable[[], Config],
    serve: Callable[[Config], Coroutine[Any, Any, None]],
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    """Make the configuration and serve until told to end.

    Exits with 2 when `make_config` raises ValueError or a recording cannot be made, with 1 when the
    address cannot be used.
    """
    configure_logging(log_level, log_format)
    try:
        config = make_config()
    except ValueError as error:
        exit_with(error, EXIT_BAD_CONFIG)
    _allow_many_connections()
    try:
        asyncio.run(serve(config))
    except (CannotRecord, CannotTrace) as error:
        exit_with(error, EXIT_BAD_CONFIG)
    except CannotListen as error:
        exit_with(error, EXIT_FAILURE)


def _allow_many_connections() -> None:
    """As many open files as the system lets us have; the usual first limit is for `select`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def exit_with(error: Exception, code: int) -> NoReturn:
    """End the command with one line about what is wrong."""
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)
