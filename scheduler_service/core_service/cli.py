"""The flags of `python -m scheduler_service scheduler`."""

from pathlib import Path
from secrets import randbits

from scheduler_service.command_line import service_command
from scheduler_service.core.config import MoveKV, SchedulerConfig
from scheduler_service.core_service.config import NO_TENANTS, CoreServiceConfig, read_tenants
from scheduler_service.core_service.workers.step_watchdog import StepTimeout
from service_common.cluster import ClusterConfig
from service_common.config_flags import CLUSTER, COUNT, ConfigFlags, Flags, flag
from service_common.garbage import imports_exempted
from service_common.metrics_server import metrics_address

SERVICE = ConfigFlags(
    CoreServiceConfig,
    metrics="metrics_port",
    grace_period_s="grace_period",
    record_plans="record_plans!",
    cluster=None,
    step_timeout=None,
    scheduler=None,
)
SCHEDULER = ConfigFlags(
    SchedulerConfig,
    settings={"max_num_batched_tokens": COUNT, "max_queue_tokens": COUNT},
    max_outgrown_wait_s="max_outgrown_wait",
    queue_retry_delay_s=None,
    default_tenant=None,
    tenants=None,
    key_seed=None,
    lease_seed=None,
)
STEP_TIMEOUT = ConfigFlags(
    StepTimeout,
    floor_s="step_timeout",
    first_floor_s="first_step_timeout",
    factor="step_timeout_factor",
)
TENANTS = flag(
    "tenants",
    Path | None,
    None,
    "Weights and limits of tenants, as TOML; see docs/scheduling.md.",
)


async def _serve(config: CoreServiceConfig) -> None:
    with imports_exempted():
        from scheduler_service.core_service.service import serve

    await serve(config)


@service_command(
    _serve, SERVICE.parameters, SCHEDULER.parameters, [TENANTS], STEP_TIMEOUT.parameters
)
def scheduler(flags: Flags) -> CoreServiceConfig:
    """Run the scheduler core: the request queues, the KV blocks, and the plans for workers."""
    tenants = NO_TENANTS if flags["tenants"] is None else read_tenants(flags["tenants"])
    if flags["move_kv"] == MoveKV.ALWAYS and not flags["enable_prefix_caching"]:
        raise ValueError(
            "move_kv: expected auto or never with --no-enable-prefix-caching, got always"
        )
    timeout = STEP_TIMEOUT.fields_of(flags)
    if timeout["first_floor_s"] == StepTimeout().first_floor_s:  # the default
        timeout["first_floor_s"] = max(timeout["first_floor_s"], timeout["floor_s"])
    service = SERVICE.fields_of(flags) | {"metrics": metrics_address(flags["metrics_port"])}
    return CoreServiceConfig(
        **service,
        cluster=ClusterConfig(**CLUSTER.fields_of(flags)),
        step_timeout=StepTimeout(**timeout),
        scheduler=SchedulerConfig(
            **SCHEDULER.fields_of(flags),
            default_tenant=tenants.default,
            tenants=tenants.named,
            key_seed=randbits(64),
            lease_seed=randbits(64),
        ),
    )
