"""The scheduler core's metrics: names, meanings and buckets, and how they are collected.

Read from the core when Prometheus scrapes, so that they cost a step nothing. `counters` keeps what
the core does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family

from pagewire.v1 import status_pb2
from scheduler_service.core.kv_cache.usage import CacheGroupUsage
from scheduler_service.core.scheduler_stats import WorkerGroupSnapshot
from scheduler_service.core_service.adapters import AdapterDirectory
from scheduler_service.core_service.counters import CoreCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import FrontendStreams
from scheduler_service.core_service.worker_group import WorkerGroup
from scheduler_service.core_service.worker_registry import WorkerRegistry
from service_common.prometheus import (
    BoundedLabel,
    LabelValues,
    counter,
    families,
    gauge,
    histogram,
)

MODEL = ("model_name",)
GROUP = ("model_name", "group")

# Keys of tables are the attributes that the metrics are read from.

OF_MODEL = {
    "num_running": gauge("vllm:num_requests_running", "Requests in a batch.", MODEL),
    "num_waiting": gauge(
        "vllm:num_requests_waiting",
        "Requests waiting for a first or renewed place in a batch.",
        MODEL,
    ),
    "num_swapped": gauge(
        "vllm:num_requests_swapped", "Requests whose KV blocks are in host memory.", MODEL
    ),
    "totals.num_preemptions": counter(
        "vllm:num_preemptions_total",
        "Times that a running request lost its place to others.",
        MODEL,
    ),
    "totals.num_prefix_queries": counter(
        "vllm:prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache, of requests that have ended.",
        MODEL,
    ),
    "totals.num_prefix_hits": counter(
        "vllm:prefix_cache_hits_total", "Of these, tokens that were found.", MODEL
    ),
    "totals.num_prefill_tokens": counter(
        "pagewire_prefill_tokens_total",
        "Tokens computed by prefills, including recomputation after preemptions and losses.",
        MODEL,
    ),
    "totals.num_generated_tokens": counter(
        "pagewire_delivered_tokens_total", "Output tokens delivered to frontends.", MODEL
    ),
    "totals.num_swapped_out_blocks": counter(
        "pagewire_swapped_out_blocks_total", "KV blocks copied from devices to host memory.", MODEL
    ),
    "totals.num_swapped_in_blocks": counter(
        "pagewire_swapped_in_blocks_total", "KV blocks moved from host memory to devices.", MODEL
    ),
    "totals.num_fetches": counter(
        "pagewire_fetches_total", "Times that blocks of another worker group arrived.", MODEL
    ),
    "totals.num_fetched_blocks": counter(
        "pagewire_fetched_blocks_total", "KV blocks copied from other worker groups.", MODEL
    ),
    "totals.num_fetched_bytes": counter(
        "pagewire_fetched_bytes_total", "Bytes of these blocks, of all ranks.", MODEL
    ),
    "totals.fetch_s": counter(
        "pagewire_fetch_seconds_total", "Time from the beginnings of fetches to their ends.", MODEL
    ),
    "totals.num_copied_blocks": counter(
        "pagewire_copied_blocks_total",
        "KV blocks copied because a sequence wrote to a block that it shared.",
        MODEL,
    ),
    "totals.num_recovered": counter(
        "pagewire_requests_recovered_total",
        "Requests that lost their worker group and were queued again with their tokens.",
        MODEL,
    ),
    "totals.num_draft_rows": counter(
        "vllm:spec_decode_num_drafts_total",
        "Rows of steps that computed drafts (speculation).",
        MODEL,
    ),
    "totals.num_drafts": counter(
        "vllm:spec_decode_num_draft_tokens_total", "Drafts that these rows computed.", MODEL
    ),
    "totals.num_accepted_drafts": counter(
        "vllm:spec_decode_num_accepted_tokens_total", "Of these, drafts that became output.", MODEL
    ),
    "totals.num_inexact_recoveries": counter(
        "pagewire_inexact_recoveries_total",
        "Requests with output that were resumed on a worker group of another arithmetic.",
        MODEL,
    ),
}

ACCEPTED_BY_POSITION = counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "Drafts that became output by their position in the row, from 0.",
    (*MODEL, "position"),
)

KV_USAGE = gauge(
    "vllm:kv_cache_usage_perc",
    "Share of a worker group's device KV blocks in use, 0 to 1.",
    ("model_name", "engine"),
)

CACHE_CONFIG = gauge(
    "vllm:cache_config_info",
    "1; a worker group's block size in tokens, and its KV blocks on the device and in host memory.",
    ("engine", "block_size", "num_gpu_blocks", "num_cpu_blocks"),
)

OF_GROUP = {
    "num_running_sequences": gauge(
        "pagewire_group_running_sequences", "Sequences in a group's batch.", GROUP
    ),
    "num_gpu_blocks": gauge("pagewire_group_gpu_blocks", "KV blocks on a group's device.", GROUP),
    "num_free_gpu_blocks": gauge(
        "pagewire_group_free_gpu_blocks",
        "KV blocks on a group's device that are not in use.",
        GROUP,
    ),
    "num_cpu_blocks": gauge(
        "pagewire_group_cpu_blocks", "KV blocks in a group's host memory.", GROUP
    ),
    "num_free_cpu_blocks": gauge(
        "pagewire_group_free_cpu_blocks",
        "KV blocks in a group's host memory that are not in use.",
        GROUP,
    ),
}

CACHE_GROUP = (*GROUP, "cache_group", "lifetime")

OF_CACHE_GROUP = {
    "num_used_blocks": gauge(
        "pagewire_cache_group_used_blocks",
        "Device blocks of running sequences by cache group.",
        CACHE_GROUP,
    ),
    "num_cached": gauge(
        "pagewire_cache_group_cached_entries",
        "Entries of the prefix cache on the device: blocks, or saved states.",
        CACHE_GROUP,
    ),
    "num_host_cached": gauge(
        "pagewire_cache_group_host_cached_entries",
        "Entries of the prefix cache in host memory: blocks, or saved states.",
        CACHE_GROUP,
    ),
    "num_queried_tokens": counter(
        "pagewire_cache_group_queried_tokens_total",
        "Tokens looked up in the prefix cache when their sequences were admitted.",
        CACHE_GROUP,
    ),
    "num_found_tokens": counter(
        "pagewire_cache_group_found_tokens_total",
        "Of these, first tokens that the cache group had; only what all cache groups of a worker "
        "group have is used.",
        CACHE_GROUP,
    ),
}

GROUP_TIME = counter(
    "pagewire_group_time_seconds_total",
    "Seconds since a group became ready, by use: `forward`, `sample`, `plan` (time in which the "
    "worker waited for plans) and `wire` (the rest, idle time included).",
    (*GROUP, "part"),
)

OF_REGISTERED = {
    "num_workers": gauge("pagewire_group_ranks", "Registered workers of a group.", GROUP),
    "world_size": gauge(
        "pagewire_group_world_size", "Number of workers that make a group complete.", GROUP
    ),
    "epoch": gauge("pagewire_group_epoch", "Epoch of a group's current step stream.", GROUP),
    "num_steps": counter("pagewire_group_steps_total", "Steps executed by a group.", GROUP),
}

GROUP_STATE = gauge(
    "pagewire_group_state",
    "1 for the current state of a registered group: starting, ready, draining, lost or hung.",
    (*GROUP, "state"),
)
HEARTBEAT_AGE = gauge(
    "pagewire_group_heartbeat_age_seconds",
    "Seconds since the last heartbeat of the group's worker with the oldest one.",
    GROUP,
)

STEP_DURATION = histogram(
    "pagewire_step_duration_seconds",
    "Duration of a step in seconds, from sending its plan, or the end of the step before, to its "
    "result.",
    MODEL,
)
STEP_TOKENS = histogram(
    "vllm:iteration_tokens_total",
    "Tokens computed in a step, prefills and decodes together.",
    MODEL,
)
PLAN_BYTES = histogram("pagewire_plan_bytes", "Size of a step's plan on the wire, in bytes.", MODEL)
PLANNING = counter(
    "pagewire_planning_seconds_total",
    "Seconds that the core's thread spent on planning steps and applying their results.",
    MODEL,
)

OF_SERVICE = {
    "num_registrations": counter(
        "pagewire_worker_registrations_total", "Registrations of workers."
    ),
    "num_lease_expiries": counter(
        "pagewire_lease_expiries_total", "Leases that expired because no heartbeat arrived."
    ),
    "num_drains": counter("pagewire_drains_total", "Worker groups that started to drain."),
    "num_link_failures": counter(
        "pagewire_link_failures_total", "Failed sessions with worker groups, which are retried."
    ),
    "num_steps_overdue": counter(
        "pagewire_steps_overdue_total",
        "Steps whose results were overdue although the workers sent heartbeats.",
    ),
    "num_groups_hung": counter(
        "pagewire_groups_hung_total",
        "Worker groups no longer used because several of their steps hung in a row.",
    ),
    "num_attaches": counter("pagewire_frontend_attaches_total", "Streams opened by frontends."),
}

UPTIME = gauge("pagewire_core_uptime_seconds", "Seconds since the core started.")
FRONTENDS = gauge("pagewire_frontends", "Attached frontends.")
WORKER_LOSSES = counter(
    "pagewire_worker_losses_total", "Workers whose registration ended without a request to leave."
)
TENANT_REQUESTS = gauge(
    "pagewire_tenant_requests", "Live requests, running or waiting.", ("tenant",)
)
FAILED_FETCHES = counter(
    "pagewire_failed_fetches_total",
    "Times that blocks of another worker group did not arrive, and were computed.",
    (*MODEL, "reason"),
)
LORA_REQUESTS = gauge(
    "pagewire_lora_requests",
    "Live requests with an adapter that is loaded or retained; `state` is `running` or `waiting`.",
    ("model", "lora", "digest", "state"),
)
LORA_CHANGES = counter(
    "pagewire_lora_changes_total",
    "Adapters that were loaded or unloaded (`change`), and attempts that failed.",
    ("change", "outcome"),
)

ALL = (
    FAILED_FETCHES,
    LORA_REQUESTS,
    LORA_CHANGES,
    UPTIME,
    FRONTENDS,
    WORKER_LOSSES,
    *OF_SERVICE.values(),
    *OF_MODEL.values(),
    ACCEPTED_BY_POSITION,
    TENANT_REQUESTS,
    KV_USAGE,
    CACHE_CONFIG,
    *OF_GROUP.values(),
    *OF_CACHE_GROUP.values(),
    GROUP_TIME,
    *OF_REGISTERED.values(),
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


@dataclass(eq=False, kw_only=True)
class CoreMetrics:
    """Reads all parts of a core's service; uptime counts from its construction."""

    driver: CoreDriver
    registry: WorkerRegistry
    frontends: FrontendStreams
    counters: CoreCounters
    adapters: AdapterDirectory

    def __post_init__(self) -> None:
        self._started_at = self.driver.clock()
        self._tenant = BoundedLabel(MAX_TENANTS)

    def collect(self) -> Iterator[Family]:
        """All samples as of now."""
        yield UPTIME.family(self.driver.clock() - self._started_at)
        yield FRONTENDS.family(len(self.frontends))
        yield WORKER_LOSSES.family(self.registry.num_losses)
        yield from families(OF_SERVICE, {(): self.counters.counts})
        snapshot = self.driver.core.snapshot()
        yield from families(OF_MODEL, {(model.name,): model for model in snapshot.models})
        yield ACCEPTED_BY_POSITION.family(
            {
                (model.name, str(position)): count
                for model in snapshot.models
                for position, count in enumerate(model.totals.num_accepted_by_position())
            }
        )
        yield FAILED_FETCHES.family(
            {
                (model.name, reason): count
                for model in snapshot.models
                for reason, count in model.totals.num_failed_fetches.items()
            }
        )
        yield self._tenants(snapshot.num_by_tenant)
        yield LORA_REQUESTS.family(
            {
                (model, adapter.name, adapter.digest.hex()[:12], state): number
                for model, adapter, state, number in self.adapters.usage()
            }
        )
        yield LORA_CHANGES.family(self.adapters.num_changes)
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
        labels: dict[LabelValues, WorkerGroupSnapshot] = {
            (group.model, group.worker_group_id): group for group in groups
        }
        yield KV_USAGE.family(
            {
                label: 1 - group.num_free_gpu_blocks / group.num_gpu_blocks
                for label, group in labels.items()
                if group.num_gpu_blocks
            }
        )
        facts = CACHE_CONFIG.labels[1:]
        yield CACHE_CONFIG.family(
            {
                (group.worker_group_id, *(str(getattr(group, fact)) for fact in facts)): 1
                for group in groups
            }
        )
        yield from families(OF_GROUP, labels)
        usages: dict[LabelValues, CacheGroupUsage] = {
            (*label, str(number), usage.lifetime): usage
            for label, group in labels.items()
            for number, usage in enumerate(group.cache_groups)
        }
        yield from families(OF_CACHE_GROUP, usages)
        yield GROUP_TIME.family(
            {
                (*label, part): getattr(group, f"{part}_us") / 1e6
                for label, group in labels.items()
                for part in ("plan", "wire", "forward", "sample")
            }
        )

    def _registered(self) -> Iterator[Family]:
        labels: dict[LabelValues, WorkerGroup] = {
            (group.registration.model.name, group.group_id): group for group in self.registry
        }
        yield from families(OF_REGISTERED, labels)
        yield GROUP_STATE.family(
            {
                (*label, name): group.state == state
                for label, group in labels.items()
                for state, name in STATES.items()
            }
        )
        now = self.driver.clock()
        yield HEARTBEAT_AGE.family(
            {label: now - group.last_heartbeat for label, group in labels.items()}
        )

    def _steps(self) -> Iterator[Family]:
        counters = [((model,), meter) for model, meter in self.counters.by_model.items()]
        yield STEP_DURATION.histograms((label, meter.duration) for label, meter in counters)
        yield STEP_TOKENS.histograms((label, meter.tokens) for label, meter in counters)
        yield PLAN_BYTES.histograms((label, meter.plan_bytes) for label, meter in counters)
        yield PLANNING.family({label: meter.planning_s for label, meter in counters})
