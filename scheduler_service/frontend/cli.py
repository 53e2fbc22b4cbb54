"""The flags of `python -m scheduler_service frontend`."""

from pathlib import Path
from typing import Annotated

import typer

from scheduler_service.command_line import (
    ClusterCa,
    ClusterCert,
    ClusterKey,
    ClusterTokenFile,
    HealthListen,
    OtlpEndpoint,
    run_service,
)
from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.server import serve
from service_common.cluster import ClusterConfig
from service_common.logging_config import LogFormat, LogLevel
from service_common.metrics_server import metrics_address
from service_common.tls import tls_files

DEFAULTS = FrontendConfig()
HTTP_OFF = "off"


def frontend(
    core: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_CORE",
            metavar="HOST:PORT|unix:PATH",
            help="Where the scheduler core listens.",
        ),
    ] = DEFAULTS.core,
    listen: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_LISTEN",
            metavar="HOST:PORT|unix:PATH",
            help="Where clients call.",
        ),
    ] = DEFAULTS.listen,
    http: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_HTTP",
            metavar="HOST:PORT|off",
            help="Where HTTP clients call (OpenAI's interface), such as 127.0.0.1:8000.",
        ),
    ] = HTTP_OFF,
    http_share_port: Annotated[
        bool,
        typer.Option(
            "--http-share-port",
            envvar="PAGEWIRE_HTTP_SHARE_PORT",
            help="Let other frontends listen at the same HTTP address; connections are spread.",
        ),
    ] = DEFAULTS.http_share_port,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_API_KEYS",
            metavar="FILE",
            help="Keys that clients may bring, as TOML; see docs/security.md.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="PAGEWIRE_API_KEY",
            help="The one key that clients may bring. Other users of this machine can read it on "
            "a command line, but not in the environment.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_TLS_CERT", metavar="FILE", help="Certificate for clients (PEM)."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_TLS_KEY", metavar="FILE", help="That certificate's key (PEM)."
        ),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_TLS_CLIENT_CA",
            metavar="FILE",
            help="Authority of which clients must have a certificate (PEM).",
        ),
    ] = None,
    max_connections: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_MAX_CONNECTIONS",
            help="Most connections of clients; more are refused.",
        ),
    ] = DEFAULTS.max_connections,
    max_concurrent_requests: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_MAX_CONCURRENT_REQUESTS",
            help="Most open requests; more are refused.",
        ),
    ] = DEFAULTS.max_concurrent_requests,
    max_tenant_requests: Annotated[
        int | None,
        typer.Option(
            envvar="PAGEWIRE_MAX_TENANT_REQUESTS",
            help="Most open requests of one tenant, and of one call; by default half of "
            "--max-concurrent-requests.",
        ),
    ] = DEFAULTS.max_tenant_requests,
    default_timeout: Annotated[
        float | None,
        typer.Option(
            envvar="PAGEWIRE_DEFAULT_TIMEOUT",
            metavar="SECONDS",
            help="Deadline of requests that bring none; without it they have none.",
        ),
    ] = DEFAULTS.default_timeout_s,
    metrics_port: Annotated[
        str | None,
        typer.Option(
            envvar="PAGEWIRE_METRICS_PORT",
            metavar="[HOST:]PORT|off",
            help="Where Prometheus asks for /metrics; without a host on 127.0.0.1.",
        ),
    ] = None,
    grace_period: Annotated[
        float,
        typer.Option(
            envvar="PAGEWIRE_GRACE_PERIOD",
            metavar="SECONDS",
            help="Time in which open requests may finish after SIGTERM.",
        ),
    ] = DEFAULTS.grace_period_s,
    health_listen: HealthListen = None,
    cluster_token_file: ClusterTokenFile = None,
    cluster_ca: ClusterCa = None,
    cluster_cert: ClusterCert = None,
    cluster_key: ClusterKey = None,
    otlp_endpoint: OtlpEndpoint = None,
    log_level: Annotated[
        LogLevel, typer.Option(envvar="PAGEWIRE_LOG_LEVEL", help="Least severity logged.")
    ] = LogLevel.INFO,
    log_format: Annotated[
        LogFormat,
        typer.Option(envvar="PAGEWIRE_LOG_FORMAT", help="Lines for people, or of JSON."),
    ] = LogFormat.TEXT,
) -> None:
    """Run a frontend: what clients call, text on one side and tokens on the other."""

    def make_config() -> FrontendConfig:
        return FrontendConfig(
            core=core,
            listen=listen,
            metrics=metrics_address(metrics_port),
            otlp_endpoint=otlp_endpoint,
            http=None if http == HTTP_OFF else http,
            http_share_port=http_share_port,
            health_listen=health_listen,
            cluster=ClusterConfig(
                token_file=cluster_token_file, ca=cluster_ca, cert=cluster_cert, key=cluster_key
            ),
            api_keys=api_keys,
            api_key=api_key,
            tls=tls_files(tls_cert, tls_key, tls_client_ca),
            max_connections=max_connections,
            max_concurrent_requests=max_concurrent_requests,
            max_tenant_requests=max_tenant_requests,
            default_timeout_s=default_timeout,
            grace_period_s=grace_period,
        )

    run_service(make_config, serve, log_level, log_format)
