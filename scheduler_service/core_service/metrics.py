"""How the metrics of `metrics.toml` are collected.

Read from the core when Prometheus scrapes, so that they cost a step nothing. `counters` keeps what
the core does not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics_core import Metric as Family

from pagewire.v1 import status_pb2
from scheduler_service.core.kv_cache.usage import CacheGroupUsage
from scheduler_service.core.scheduler_stats import WorkerGroupSnapshot
from scheduler_service.core_service.adapters.directory import AdapterDirectory
from scheduler_service.core_service.counters import CoreCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import FrontendStreams
from scheduler_service.core_service.workers.worker_group import WorkerGroup
from scheduler_service.core_service.workers.worker_registry import WorkerRegistry
from service_common.prometheus import BoundedLabel, LabelValues, families, read_metrics

METRICS = read_metrics(Path(__file__).with_suffix(".toml"))
ALL = tuple(metric for section in METRICS.values() for metric in section.values())
_COMPUTED = METRICS["computed"]

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
        yield _COMPUTED["uptime"].family(self.driver.clock() - self._started_at)
        yield _COMPUTED["frontends"].family(len(self.frontends))
        yield _COMPUTED["worker_losses"].family(self.registry.num_losses)
        yield from families(METRICS["service"], {(): self.counters.counts})
        snapshot = self.driver.core.snapshot()
        yield from families(METRICS["models"], {(model.name,): model for model in snapshot.models})
        yield _COMPUTED["accepted_by_position"].family(
            {
                (model.name, str(position)): count
                for model in snapshot.models
                for position, count in enumerate(model.totals.num_accepted_by_position())
            }
        )
        yield _COMPUTED["moved_requests"].family(
            {
                (model.name, reason.value): count
                for model in snapshot.models
                for reason, count in model.totals.num_moved.items()
            }
        )
        yield _COMPUTED["failed_fetches"].family(
            {
                (model.name, reason): count
                for model in snapshot.models
                for reason, count in model.totals.num_failed_fetches.items()
            }
        )
        yield self._tenants(snapshot.num_by_tenant)
        yield _COMPUTED["lora_requests"].family(
            {
                (model, adapter.name, adapter.digest.hex()[:12], state): number
                for model, adapter, state, number in self.adapters.usage()
            }
        )
        yield _COMPUTED["lora_changes"].family(self.adapters.num_changes)
        yield from self._groups(snapshot.worker_groups)
        yield from self._registered()
        yield from families(
            METRICS["steps"],
            {(model,): meter for model, meter in self.counters.by_model.items()},
        )

    def _tenants(self, num_requests: dict[str, int]) -> Family:
        counts: dict[tuple[str, ...], float] = {}
        for name, number in num_requests.items():
            label = (self._tenant.value(name),)
            counts[label] = counts.get(label, 0) + number
        return _COMPUTED["tenant_requests"].family(counts)

    def _groups(self, groups: list[WorkerGroupSnapshot]) -> Iterator[Family]:
        labels: dict[LabelValues, WorkerGroupSnapshot] = {
            (group.model, group.worker_group_id): group for group in groups
        }
        yield _COMPUTED["kv_usage"].family(
            {
                label: 1 - group.num_free_gpu_blocks / group.num_gpu_blocks
                for label, group in labels.items()
                if group.num_gpu_blocks
            }
        )
        facts = _COMPUTED["cache_config"].labels[1:]
        yield _COMPUTED["cache_config"].family(
            {
                (group.worker_group_id, *(str(getattr(group, fact)) for fact in facts)): 1
                for group in groups
            }
        )
        yield from families(METRICS["groups"], labels)
        usages: dict[LabelValues, CacheGroupUsage] = {
            (*label, str(number), usage.lifetime): usage
            for label, group in labels.items()
            for number, usage in enumerate(group.cache_groups)
        }
        yield from families(METRICS["cache_groups"], usages)
        yield _COMPUTED["group_time"].family(
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
        yield from families(METRICS["registered"], labels)
        yield _COMPUTED["group_state"].family(
            {
                (*label, name): group.state == state
                for label, group in labels.items()
                for state, name in STATES.items()
            }
        )
        now = self.driver.clock()
        yield _COMPUTED["heartbeat_age"].family(
            {label: now - group.last_heartbeat for label, group in labels.items()}
        )
