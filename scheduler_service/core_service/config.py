"""Configuration of the scheduler core's service, and the file of tenants' weights and limits.

The file is TOML: a table `default` for every tenant that is not named, and a table `tenants.NAME`
for each that is. See deploy/tenants.toml.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from scheduler_service.core.config import SchedulerConfig, TenantConfig
from scheduler_service.core_service.workers.step_watchdog import StepTimeout
from service_common.addresses import check_addresses
from service_common.cluster import NO_CLUSTER, ClusterConfig
from service_common.durations import check_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreServiceConfig:
    """Address and timeouts of one scheduler core."""

    listen: str = "127.0.0.1:7610"
    """Address for frontends and workers. Without credentials, keep it on loopback."""

    health_listen: str | None = None
    """Additional address for health checks, without TLS or credentials."""

    cluster: ClusterConfig = NO_CLUSTER
    """Credentials between the members of the deployment."""

    lease_ms: int = 2000
    """Milliseconds without a heartbeat after which a worker is considered lost."""

    step_timeout: StepTimeout = field(default_factory=StepTimeout)
    """When a step is considered hung although its worker's heartbeats continue."""

    otlp_endpoint: str | None = None
    """Address to which spans of requests are exported (OTLP over gRPC), such as
    http://127.0.0.1:4317; by default taken from OpenTelemetry's environment variables."""

    metrics: str | None = None
    """Address at which Prometheus scrapes /metrics; a port alone is on 127.0.0.1."""

    grace_period_s: float = 30.0
    """Seconds in which running requests may finish after SIGTERM."""

    record: Path | None = None
    """Record all input of the core, prompts included, for `pagewire replay`; compressed if the
    name ends in .gz. An existing file is kept: the next free number is inserted into the name. See
    docs/replay.md."""

    record_plans: bool = False
    """Record whole plans, not only their hashes."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """Limits of batches and queues, and how many steps are planned ahead."""

    def __post_init__(self) -> None:
        check_addresses(listen=self.listen, health_listen=self.health_listen)
        if self.record_plans and self.record is None:
            raise ValueError("record_plans: expected --record with it, the file to record to")
        if not 100 <= self.lease_ms <= 600_000:
            raise ValueError(f"lease_ms: expected 100 to 600000, got {self.lease_ms}")
        check_seconds(grace_period=self.grace_period_s)


_KEYS = [config_field.name for config_field in fields(TenantConfig)]


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantsFile:
    """The contents of a file of tenants."""

    default: TenantConfig = field(default_factory=TenantConfig)
    """Weight and limits of each tenant that is not named."""

    named: Mapping[str, TenantConfig] = field(default_factory=dict)
    """Weights and limits of tenants by name."""


NO_TENANTS = TenantsFile()


def read_tenants(path: Path) -> TenantsFile:
    """Parse the file. Raises ValueError that names the file, the tenant and the key."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"tenants: cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"tenants: {path} is not TOML: {error}") from error
    unknown = sorted(tables.keys() - {"default", "tenants"})
    if unknown:
        raise ValueError(f"tenants: {path}: {unknown[0]}: expected only default and tenants.NAME")
    named = tables.get("tenants", {})
    if not isinstance(named, dict):
        raise ValueError(f"tenants: {path}: tenants: expected tables tenants.NAME")
    default = _tenant(f"tenants: {path}: default", tables.get("default", {}), TenantConfig())
    return TenantsFile(
        default=default,
        named={
            name: _tenant(f"tenants: {path}: tenants.{name}", table, default)
            for name, table in named.items()
        },
    )


def _tenant(where: str, table: object, default: TenantConfig) -> TenantConfig:
    if not isinstance(table, dict):
        raise ValueError(f"{where}: expected a table")
    for key, value in table.items():
        if key not in _KEYS:
            raise ValueError(f"{where}.{key}: unknown; there are: {', '.join(_KEYS)}")
        kinds = (int, float) if key == "weight" else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds):
            expected = "a number" if key == "weight" else "a whole number"
            raise ValueError(f"{where}.{key}: expected {expected}, got {value!r}")
    try:
        return replace(default, **table)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
