"""What the scheduler core's service is told when it starts."""

from dataclasses import dataclass, field
from pathlib import Path

from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core_service.step_watchdog import StepTimeout
from service_common.addresses import check_addresses
from service_common.cluster import NO_CLUSTER, ClusterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreServiceConfig:
    """Address and patience of one scheduler core."""

    listen: str = "127.0.0.1:7610"
    """Where frontends and workers call. Loopback by default, as there are no credentials."""

    health_listen: str | None = None
    """Where to answer health checks besides, of anybody."""

    cluster: ClusterConfig = NO_CLUSTER
    """What members of the deployment show each other."""

    lease_ms: int = 2000
    """Time without a heartbeat after which a worker counts as lost."""

    step_timeout: StepTimeout = field(default_factory=StepTimeout)
    """When a step counts as hung, though its worker's heartbeats go on."""

    otlp_endpoint: str | None = None
    """Where requests' spans are exported to; None: as OpenTelemetry's variables say, if at all."""

    metrics: str | None = None
    """Where Prometheus asks, HOST:PORT; None: nowhere."""

    grace_period_s: float = 30.0
    """Seconds in which running requests may finish when the service is told to end."""

    record: Path | None = None
    """Where to record all that the core is told, prompts included; see docs/replay.md."""

    record_plans: bool = False
    """Whether a recording holds whole plans, and not only their hashes."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Sizes of batches and queues, and how far planning runs ahead."""

    def __post_init__(self) -> None:
        check_addresses(listen=self.listen, health_listen=self.health_listen)
        if self.record_plans and self.record is None:
            raise ValueError("record_plans: expected a file to record to, by --record")
        if not 100 <= self.lease_ms <= 600_000:
            raise ValueError("lease_ms: expected 100 to 600000")
        if not 0 <= self.grace_period_s < float("inf"):
            raise ValueError("grace_period: expected a number of seconds, at least 0")
