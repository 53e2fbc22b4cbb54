"""Flags of the process as a service: name, addresses, shutdown, logs, TLS and cluster key."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from service_common.cluster import ClusterConfig
from service_common.logging_config import LogFormat, LogLevel
from service_common.metrics_server import metrics_address
from worker_service.cli.options import env
from worker_service.cli.ranks import RankAssignment
from worker_service.config import DEFAULT_LISTEN, NetworkConfig
from worker_service.errors import InvalidOption
from worker_service.launcher.launcher import address_of


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceFlags:
    """The process as a service: its name, addresses, end and log."""

    served_model_name: Annotated[
        str | None,
        Option(
            envvar=env("SERVED_MODEL_NAME"), help="Name clients use.", show_default="the model's"
        ),
    ] = None
    core: Annotated[
        str | None,
        Option(envvar=env("CORE"), help="Scheduler core to register with; none: only serve."),
    ] = None
    listen: Annotated[
        str | None,
        Option(
            envvar=env("LISTEN"),
            help="HOST:PORT or unix:PATH; port 0 takes a free one.",
            show_default="127.0.0.1:7620; with Ray the node's address and a free port",
        ),
    ] = None
    advertise: Annotated[
        str | None,
        Option(
            envvar=env("ADVERTISE"),
            help="Address the core is to dial.",
            show_default="where it listens",
        ),
    ] = None
    health_listen: Annotated[
        str | None,
        Option(
            envvar=env("HEALTH_LISTEN"),
            metavar="HOST:PORT|unix:PATH",
            help="Answer health checks here besides, without TLS or credentials.",
        ),
    ] = None
    metrics_port: Annotated[
        str | None,
        Option(
            envvar=env("METRICS_PORT"),
            metavar="[HOST:]PORT|off",
            help="Where Prometheus asks for /metrics; without a host on 127.0.0.1. The "
            "ranks that a machine starts take the following ports.",
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        Option(
            envvar=env("OTLP_ENDPOINT"),
            metavar="URL",
            help="Where requests' spans are exported to (OTLP over gRPC), as "
            "http://127.0.0.1:4317; without it as OpenTelemetry's own variables say.",
        ),
    ] = None
    grace_period: Annotated[
        float,
        Option(
            envvar=env("GRACE_PERIOD"),
            help="Seconds after SIGTERM in which what runs goes on at other workers, or else ends.",
        ),
    ] = 30.0
    profile_dir: Annotated[
        str, Option(envvar=env("PROFILE_DIR"), help="Directory for profiler traces.")
    ] = "."
    log_level: Annotated[LogLevel, Option(envvar=env("LOG_LEVEL"), help="How much to log.")] = (
        LogLevel.INFO
    )
    log_format: Annotated[
        LogFormat, Option(envvar=env("LOG_FORMAT"), help="Lines for people, or of JSON.")
    ] = LogFormat.TEXT
    launcher_pid: Annotated[
        int | None, Option(envvar=env("LAUNCHER_PID"), hidden=True, help="End with this process.")
    ] = None

    def network(self, assignment: RankAssignment, cluster: ClusterConfig) -> NetworkConfig:
        """Where one rank listens and whom it registers with. Raises InvalidOption."""
        advertise, health, offset = self.advertise, self.health_listen, assignment.address_offset
        return NetworkConfig(
            listen=address_of(self.listen or DEFAULT_LISTEN, offset, "listen"),
            advertise=None if advertise is None else address_of(advertise, offset, "advertise"),
            health_listen=None if health is None else address_of(health, offset, "health_listen"),
            core=self.core,
            cluster=cluster,
            metrics=self._metrics(assignment.metrics_offset),
            otlp_endpoint=self.otlp_endpoint,
            **({} if assignment.group_id is None else {"group_id": assignment.group_id}),
        )

    def _metrics(self, offset: int) -> str | None:
        try:
            first = metrics_address(self.metrics_port)
        except ValueError as error:
            raise InvalidOption(str(error)) from None
        return None if first is None else address_of(first, offset, "metrics_port")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterFlags:
    """What the services of one deployment show each other."""

    cluster_token_file: Annotated[
        Path | None,
        Option(
            envvar=env("CLUSTER_TOKEN_FILE"),
            metavar="FILE",
            help="The token that the services of the deployment show each other.",
        ),
    ] = None
    cluster_ca: Annotated[
        Path | None,
        Option(
            envvar=env("CLUSTER_CA"),
            metavar="FILE",
            help="Authority of the services' certificates (PEM), for TLS between them.",
        ),
    ] = None
    cluster_cert: Annotated[
        Path | None,
        Option(envvar=env("CLUSTER_CERT"), metavar="FILE", help="This service's certificate."),
    ] = None
    cluster_key: Annotated[
        Path | None,
        Option(envvar=env("CLUSTER_KEY"), metavar="FILE", help="That certificate's key (PEM)."),
    ] = None

    def config(self) -> ClusterConfig:
        """As settings. Raises InvalidOption."""
        try:
            return ClusterConfig(
                token_file=self.cluster_token_file,
                ca=self.cluster_ca,
                cert=self.cluster_cert,
                key=self.cluster_key,
            )
        except ValueError as error:
            raise InvalidOption(str(error)) from error
