"""The flags of `python -m scheduler_service scheduler`."""

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
from scheduler_service.core.config import PolicyName, PreemptionMode, SchedulerConfig
from scheduler_service.core_service.config import NO_TENANTS, CoreServiceConfig, read_tenants
from scheduler_service.core_service.service import serve
from scheduler_service.core_service.step_watchdog import StepTimeout
from service_common.cluster import ClusterConfig
from service_common.logging_config import LogFormat, LogLevel
from service_common.metrics_server import metrics_address

SERVICE = CoreServiceConfig()
CORE = SchedulerConfig()


def scheduler(
    listen: Annotated[
        str,
        typer.Option(
            envvar="PAGEWIRE_LISTEN",
            metavar="HOST:PORT|unix:PATH",
            help="Where frontends and workers call.",
        ),
    ] = SERVICE.listen,
    max_num_seqs: Annotated[
        int,
        typer.Option(envvar="PAGEWIRE_MAX_NUM_SEQS", help="Most sequences in a worker's batch."),
    ] = CORE.max_num_seqs,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_MAX_NUM_BATCHED_TOKENS", help="Most tokens computed in one step."
        ),
    ] = CORE.max_num_batched_tokens,
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(
            envvar="PAGEWIRE_ENABLE_CHUNKED_PREFILL",
            help="Compute long prompts in pieces, beside running sequences.",
        ),
    ] = CORE.enable_chunked_prefill,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            envvar="PAGEWIRE_ENABLE_PREFIX_CACHING",
            help="Reuse the KV blocks of prompts and answers that begin alike.",
        ),
    ] = CORE.enable_prefix_caching,
    preemption_mode: Annotated[
        PreemptionMode,
        typer.Option(
            envvar="PAGEWIRE_PREEMPTION_MODE",
            help="What becomes of a request's KV blocks when memory runs out: swap moves them to "
            "host memory, recompute drops them, auto does what costs less.",
        ),
    ] = CORE.preemption_mode,
    watermark: Annotated[
        float,
        typer.Option(
            envvar="PAGEWIRE_WATERMARK",
            help="Share of a worker's blocks kept free when admitting, so that what runs can grow.",
        ),
    ] = CORE.watermark,
    pipeline_depth: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_PIPELINE_DEPTH",
            help="Most steps planned before the first one's result is in.",
        ),
    ] = CORE.pipeline_depth,
    max_steps_together: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_MAX_STEPS_TOGETHER",
            help="Most steps whose plans and results travel together, where all requests of a "
            "batch let their tokens wait. 1: none do.",
        ),
    ] = CORE.max_steps_together,
    max_queue_requests: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_MAX_QUEUE_REQUESTS", help="Most waiting requests; more are refused."
        ),
    ] = CORE.max_queue_requests,
    max_queue_tokens: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_MAX_QUEUE_TOKENS",
            help="Most prompt tokens of waiting requests; more are refused.",
        ),
    ] = CORE.max_queue_tokens,
    policy: Annotated[
        PolicyName,
        typer.Option(
            envvar="PAGEWIRE_POLICY",
            help="Who is served first: in order of arrival, by priority, or fair shares for "
            "tenants.",
        ),
    ] = CORE.policy,
    tenants: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_TENANTS",
            metavar="FILE",
            help="Weights and limits of tenants, as TOML; see docs/scheduling.md.",
        ),
    ] = None,
    isolate_tenants: Annotated[
        bool,
        typer.Option(
            envvar="PAGEWIRE_ISOLATE_TENANTS",
            help="Share no KV blocks between tenants.",
        ),
    ] = CORE.isolate_tenants,
    max_worker_losses: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_MAX_WORKER_LOSSES",
            help="A request that was on a worker at its death so many times fails.",
        ),
    ] = CORE.max_worker_losses,
    lease_ms: Annotated[
        int,
        typer.Option(
            envvar="PAGEWIRE_LEASE_MS",
            help="Milliseconds without a heartbeat after which a worker counts as lost.",
        ),
    ] = SERVICE.lease_ms,
    step_timeout: Annotated[
        float,
        typer.Option(
            envvar="PAGEWIRE_STEP_TIMEOUT",
            help="Seconds that any step may take before its worker counts as hung, though its "
            "heartbeats go on; 0: for ever.",
        ),
    ] = SERVICE.step_timeout.floor_s,
    first_step_timeout: Annotated[
        float,
        typer.Option(
            envvar="PAGEWIRE_FIRST_STEP_TIMEOUT",
            help="The same for the first steps of each size, which may compile.",
        ),
    ] = SERVICE.step_timeout.first_floor_s,
    step_timeout_factor: Annotated[
        float,
        typer.Option(
            envvar="PAGEWIRE_STEP_TIMEOUT_FACTOR",
            help="How many times longer than expected, by those before it, a step may take.",
        ),
    ] = SERVICE.step_timeout.factor,
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
            help="Seconds in which running requests may finish after SIGTERM.",
        ),
    ] = SERVICE.grace_period_s,
    record: Annotated[
        Path | None,
        typer.Option(
            envvar="PAGEWIRE_RECORD",
            metavar="FILE",
            help="Record all that the core is told, prompts included, for `pagewire replay`; "
            "compressed if the name ends in .gz. A file that is there is kept: the next free "
            "number is put into the name.",
        ),
    ] = SERVICE.record,
    record_plans: Annotated[
        bool,
        typer.Option(
            "--record-plans",
            envvar="PAGEWIRE_RECORD_PLANS",
            help="Record whole plans, not only their hashes.",
        ),
    ] = SERVICE.record_plans,
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
    """Run the scheduler core: the request queues, the KV blocks, and the plans for workers."""

    def make_config() -> CoreServiceConfig:
        limits = NO_TENANTS if tenants is None else read_tenants(tenants)
        return CoreServiceConfig(
            listen=listen,
            health_listen=health_listen,
            cluster=ClusterConfig(
                token_file=cluster_token_file, ca=cluster_ca, cert=cluster_cert, key=cluster_key
            ),
            metrics=metrics_address(metrics_port),
            otlp_endpoint=otlp_endpoint,
            lease_ms=lease_ms,
            step_timeout=StepTimeout(
                floor_s=step_timeout,
                first_floor_s=max(first_step_timeout, step_timeout),
                factor=step_timeout_factor,
            ),
            grace_period_s=grace_period,
            record=record,
            record_plans=record_plans,
            scheduler=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                enable_chunked_prefill=enable_chunked_prefill,
                enable_prefix_caching=enable_prefix_caching,
                preemption_mode=preemption_mode,
                watermark=watermark,
                pipeline_depth=pipeline_depth,
                max_steps_together=max_steps_together,
                max_queue_requests=max_queue_requests,
                max_queue_tokens=max_queue_tokens,
                policy=policy,
                default_tenant=limits.default,
                tenants=limits.named,
                isolate_tenants=isolate_tenants,
                max_worker_losses=max_worker_losses,
            ),
        )

    run_service(make_config, serve, log_level, log_format)
