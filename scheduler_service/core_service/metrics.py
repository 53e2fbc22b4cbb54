"""The scheduler core's metrics: names, meanings and buckets, and how they are collected.

Read from the core when Prometheus scrapes, so that they cost a step nothing. `counters` has what
would otherwise be gone by then.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.metrics_core import Metric as Family

from pagewire.v1 import status_pb2
from scheduler_service.core.stats.scheduler_stats import ModelSnapshot, WorkerGroupSnapshot
from scheduler_service.core_service.counters import CoreCounters, EventCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import FrontendStreams
from scheduler_service.core_service.worker_group import WorkerGroup
from scheduler_service.core_service.worker_registry import WorkerRegistry
from service_common.prometheus import BoundedLabel, Kind, Metric

MODEL = ("model_name",)
GROUP = ("model_name", "group")


OF_MODEL: Mapping[Metric, Callable[[ModelSnapshot], float]] = {
    Metric("vllm:num_requests_running", Kind.GAUGE, "Requests in a batch.", MODEL): lambda model: (
        model.num_running
    ),
    Metric(
        "vllm:num_requests_waiting",
        Kind.GAUGE,
        "Requests waiting for a first or renewed place in a batch.",
        MODEL,
    ): lambda model: model.num_waiting,
    Metric(
        "vllm:num_requests_swapped",
        Kind.GAUGE,
        "Requests whose KV blocks are in host memory.",
        MODEL,
    ): lambda model: model.num_swapped,
    Metric(
        "vllm:num_preemptions_total",
        Kind.COUNTER,
        "Times that a running request lost its place to others.",
        MODEL,
    ): lambda model: model.totals.num_preemptions,
    Metric(
        "vllm:prefix_cache_queries_total",
        Kind.COUNTER,
        "Prompt tokens looked up in the prefix cache, of requests that have ended.",
        MODEL,
    ): lambda model: model.totals.num_prefix_queries,
    Metric(
        "vllm:prefix_cache_hits_total",
        Kind.COUNTER,
        "Of these, tokens that were found.",
        MODEL,
    ): lambda model: model.totals.num_prefix_hits,
    Metric(
        "pagewire_prefill_tokens_total",
        Kind.COUNTER,
        "Tokens computed by prefills, including recomputation after preemptions and losses.",
        MODEL,
    ): lambda model: model.totals.num_prefill_tokens,
    Metric(
        "pagewire_delivered_tokens_total",
        Kind.COUNTER,
        "Output tokens delivered to frontends.",
        MODEL,
    ): lambda model: model.totals.num_generated_tokens,
    Metric(
        "pagewire_swapped_out_blocks_total",
        Kind.COUNTER,
        "KV blocks moved from devices to host memory.",
        MODEL,
    ): lambda model: model.totals.num_swapped_out_blocks,
    Metric(
        "pagewire_swapped_in_blocks_total",
        Kind.COUNTER,
        "KV blocks moved from host memory to devices.",
        MODEL,
    ): lambda model: model.totals.num_swapped_in_blocks,
    Metric(
        "pagewire_copied_blocks_total",
        Kind.COUNTER,
        "KV blocks copied because a sequence wrote to a block that it shared.",
        MODEL,
    ): lambda model: model.totals.num_copied_blocks,
    Metric(
        "pagewire_requests_recovered_total",
        Kind.COUNTER,
        "Requests that lost their worker group and were queued again with their tokens.",
        MODEL,
    ): lambda model: model.totals.num_recovered,
    Metric(
        "pagewire_inexact_recoveries_total",
        Kind.COUNTER,
        "Requests with output that were resumed on a worker group of another arithmetic.",
        MODEL,
    ): lambda model: model.totals.num_inexact_recoveries,
}

KV_USAGE = Metric(
    "vllm:kv_cache_usage_perc",
    Kind.GAUGE,
    "Share of a worker group's device KV blocks in use, 0 to 1.",
    ("model_name", "engine"),
)

OF_GROUP: Mapping[Metric, Callable[[WorkerGroupSnapshot], float]] = {
    Metric(
        "pagewire_group_running_sequences", Kind.GAUGE, "Sequences in a group's batch.", GROUP
    ): lambda group: group.num_running_sequences,
    Metric(
        "pagewire_group_gpu_blocks", Kind.GAUGE, "KV blocks on a group's device.", GROUP
    ): lambda group: group.num_gpu_blocks,
    Metric(
        "pagewire_group_free_gpu_blocks",
        Kind.GAUGE,
        "KV blocks on a group's device that are not in use.",
        GROUP,
    ): lambda group: group.num_free_gpu_blocks,
    Metric(
        "pagewire_group_cpu_blocks", Kind.GAUGE, "KV blocks in a group's host memory.", GROUP
    ): lambda group: group.num_cpu_blocks,
    Metric(
        "pagewire_group_free_cpu_blocks",
        Kind.GAUGE,
        "KV blocks in a group's host memory that are not in use.",
        GROUP,
    ): lambda group: group.num_free_cpu_blocks,
}

GROUP_TIME = Metric(
    "pagewire_group_time_seconds_total",
    Kind.COUNTER,
    "Seconds since a group became ready, by use: `forward`, `sample`, `plan` (time in which the "
    "worker waited for plans) and `wire` (the rest, idle time included).",
    (*GROUP, "part"),
)

OF_REGISTERED: Mapping[Metric, Callable[[WorkerGroup], float]] = {
    Metric(
        "pagewire_group_ranks", Kind.GAUGE, "Registered workers of a group.", GROUP
    ): lambda group: len(group.workers),
    Metric(
        "pagewire_group_world_size",
        Kind.GAUGE,
        "Number of workers that make a group complete.",
        GROUP,
    ): lambda group: group.world_size,
    Metric(
        "pagewire_group_epoch", Kind.GAUGE, "Epoch of a group's current step stream.", GROUP
    ): lambda group: group.epoch,
    Metric(
        "pagewire_group_steps_total", Kind.COUNTER, "Steps executed by a group.", GROUP
    ): lambda group: group.num_steps,
}

GROUP_STATE = Metric(
    "pagewire_group_state",
    Kind.GAUGE,
    "1 for the current state of a registered group: starting, ready, draining, lost or hung.",
    (*GROUP, "state"),
)
HEARTBEAT_AGE = Metric(
    "pagewire_group_heartbeat_age_seconds",
    Kind.GAUGE,
    "Seconds since the last heartbeat of the group's worker with the oldest one.",
    GROUP,
)

STEP_DURATION = Metric(
    "pagewire_step_duration_seconds",
    Kind.HISTOGRAM,
    "Duration of a step in seconds, from sending its plan, or the end of the step before, to its "
    "result.",
    MODEL,
)
STEP_TOKENS = Metric(
    "vllm:iteration_tokens_total",
    Kind.HISTOGRAM,
    "Tokens computed in a step, prefills and decodes together.",
    MODEL,
)
PLAN_BYTES = Metric(
    "pagewire_plan_bytes", Kind.HISTOGRAM, "Size of a step's plan on the wire, in bytes.", MODEL
)
PLANNING = Metric(
    "pagewire_planning_seconds_total",
    Kind.COUNTER,
    "Seconds that the core's thread spent on planning steps and applying their results.",
    MODEL,
)

OF_SERVICE: Mapping[Metric, Callable[[EventCounters], float]] = {
    Metric(
        "pagewire_worker_registrations_total", Kind.COUNTER, "Registrations of workers."
    ): lambda counts: counts.num_registrations,
    Metric(
        "pagewire_lease_expiries_total",
        Kind.COUNTER,
        "Leases that expired because no heartbeat arrived.",
    ): lambda counts: counts.num_lease_expiries,
    Metric(
        "pagewire_drains_total", Kind.COUNTER, "Worker groups that started to drain."
    ): lambda counts: counts.num_drains,
    Metric(
        "pagewire_link_failures_total",
        Kind.COUNTER,
        "Failed sessions with worker groups, which are retried.",
    ): lambda counts: counts.num_link_failures,
    Metric(
        "pagewire_steps_overdue_total",
        Kind.COUNTER,
        "Steps whose results were overdue although the workers sent heartbeats.",
    ): lambda counts: counts.num_steps_overdue,
    Metric(
        "pagewire_groups_hung_total",
        Kind.COUNTER,
        "Worker groups no longer used because several of their steps hung in a row.",
    ): lambda counts: counts.num_groups_hung,
    Metric(
        "pagewire_frontend_attaches_total", Kind.COUNTER, "Streams opened by frontends."
    ): lambda counts: counts.num_attaches,
}

UPTIME = Metric("pagewire_core_uptime_seconds", Kind.GAUGE, "Seconds since the core started.")
FRONTENDS = Metric("pagewire_frontends", Kind.GAUGE, "Attached frontends.")
WORKER_LOSSES = Metric(
    "pagewire_worker_losses_total",
    Kind.COUNTER,
    "Workers whose registration ended without a request to leave.",
)
TENANT_REQUESTS = Metric(
    "pagewire_tenant_requests",
    Kind.GAUGE,
    "Live requests, running or waiting.",
    ("tenant",),
)

ALL = (
    UPTIME,
    FRONTENDS,
    WORKER_LOSSES,
    *OF_SERVICE,
    *OF_MODEL,
    TENANT_REQUESTS,
    KV_USAGE,
    *OF_GROUP,
    GROUP_TIME,
    *OF_REGISTERED,
    GROUP_STATE,
    HEARTBEAT_AGE,
    STEP_DURATION,
    STEP_TOKENS,
    PLAN_BYTES,
    PLANNING,
)
"""All metrics, in the order in which they are exported."""


MAX_TENANTS = 100

STATES = {
    status_pb2.WORKER_STATE_STARTING: "starting",
    status_pb2.WORKER_STATE_READY: "ready",
    status_pb2.WORKER_STATE_DRAINING: "draining",
    status_pb2.WORKER_STATE_LOST: "lost",
    status_pb2.WORKER_STATE_HUNG: "hung",
}


class CoreMetrics:
    """Reads all parts of a core's service; uptime counts from when it was made."""

    def __init__(
        self,
        *,
        driver: CoreDriver,
        registry: WorkerRegistry,
        frontends: FrontendStreams,
        counters: CoreCounters,
    ) -> None:
        self._driver = driver
        self._registry = registry
        self._frontends = frontends
        self._counters = counters
        self._started_at = driver.clock()
        self._tenant = BoundedLabel(MAX_TENANTS)

    def collect(self) -> Iterator[Family]:
        """All samples as of now."""
        yield UPTIME.family(self._driver.clock() - self._started_at)
        yield FRONTENDS.family(len(self._frontends))
        yield WORKER_LOSSES.family(self._registry.num_losses)
        for each, count in OF_SERVICE.items():
            yield each.family(count(self._counters.counts))
        snapshot = self._driver.core.snapshot()
        for each, of_model in OF_MODEL.items():
            yield each.family({(model.name,): of_model(model) for model in snapshot.models})
        yield self._tenants(snapshot.num_by_tenant)
        yield from self._groups(snapshot.worker_groups)
        yield from self._registered()
        yield from self._steps()

    def _tenants(self, num_requests: dict[str, int]) -> Family:
        counts: dict[tuple[str, ...], float] = {}
        for name, number in num_requests.items():
            label = (self._tenant.value(name),)
            counts[label] = counts.get(label, 0) + number
        return TENANT_REQUESTS.family(counts)

    def _groups(self, groups: list[WorkerGroupSnapshot]) -> Iterator[Family]:
        labels = {(group.model, group.worker_group_id): group for group in groups}
        yield KV_USAGE.family(
            {
                label: 1 - group.num_free_gpu_blocks / group.num_gpu_blocks
                for label, group in labels.items()
            }
        )
        for each, of_group in OF_GROUP.items():
            yield each.family({label: of_group(group) for label, group in labels.items()})
        yield GROUP_TIME.family(
            {
                (*label, part): getattr(group, f"{part}_us") / 1e6
                for label, group in labels.items()
                for part in ("plan", "wire", "forward", "sample")
            }
        )

    def _registered(self) -> Iterator[Family]:
        labels = {
            (group.registration.model.name, group.group_id): group for group in self._registry
        }
        for each, of_group in OF_REGISTERED.items():
            yield each.family({label: of_group(group) for label, group in labels.items()})
        yield GROUP_STATE.family(
            {
                (*label, name): group.state == state
                for label, group in labels.items()
                for state, name in STATES.items()
            }
        )
        now = self._driver.clock()
        yield HEARTBEAT_AGE.family(
            {label: now - group.last_heartbeat for label, group in labels.items()}
        )

    def _steps(self) -> Iterator[Family]:
        counters = [((model,), meter) for model, meter in self._counters.by_model.items()]
        yield STEP_DURATION.histograms((label, meter.duration) for label, meter in counters)
        yield STEP_TOKENS.histograms((label, meter.tokens) for label, meter in counters)
        yield PLAN_BYTES.histograms((label, meter.plan_bytes) for label, meter in counters)
        yield PLANNING.family({label: meter.planning_s for label, meter in counters})
