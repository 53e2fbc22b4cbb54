"""What the scheduler core tells Prometheus: read from the core when somebody asks, so that it costs
a step nothing, and of each step a few numbers that would otherwise be gone."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family

from pagewire.v1 import status_pb2
from scheduler_service.core.stats.scheduler_stats import WorkerGroupSnapshot
from scheduler_service.core_service import metric_list as metric
from scheduler_service.core_service.counters import Meters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.frontend_streams import Attachments
from scheduler_service.core_service.worker_registry import WorkerRegistry
from scheduler_service.metrics.labels import BoundedLabel

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
        attachments: Attachments,
        meters: Meters,
    ) -> None:
        self._driver = driver
        self._registry = registry
        self._attachments = attachments
        self._meters = meters
        self._started_at = driver.clock()
        self._tenant = BoundedLabel(MAX_TENANTS)

    def collect(self) -> Iterator[Family]:
        """All samples as of now."""
        yield metric.UPTIME.family(self._driver.clock() - self._started_at)
        yield metric.FRONTENDS.family(len(self._attachments))
        yield metric.WORKER_LOSSES.family(self._registry.num_losses)
        for each, count in metric.OF_SERVICE.items():
            yield each.family(count(self._meters.counts))
        snapshot = self._driver.core.snapshot()
        for each, of_model in metric.OF_MODEL.items():
            yield each.family({(model.name,): of_model(model) for model in snapshot.models})
        yield self._tenants(snapshot.num_by_tenant)
        yield from self._groups(snapshot.groups)
        yield from self._registered()
        yield from self._steps()

    def _tenants(self, num_requests: dict[str, int]) -> Family:
        counts: dict[tuple[str, ...], float] = {}
        for name, number in num_requests.items():
            label = (self._tenant.value(name),)
            counts[label] = counts.get(label, 0) + number
        return metric.TENANT_REQUESTS.family(counts)

    def _groups(self, groups: list[WorkerGroupSnapshot]) -> Iterator[Family]:
        labels = {(group.model, group.group_id): group for group in groups}
        yield metric.KV_USAGE.family(
            {
                label: 1 - group.num_free_gpu_blocks / group.num_gpu_blocks
                for label, group in labels.items()
            }
        )
        for each, of_group in metric.OF_GROUP.items():
            yield each.family({label: of_group(group) for label, group in labels.items()})
        yield metric.GROUP_TIME.family(
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
        for each, of_group in metric.OF_REGISTERED.items():
            yield each.family({label: of_group(group) for label, group in labels.items()})
        yield metric.GROUP_STATE.family(
            {
                (*label, name): group.state == state
                for label, group in labels.items()
                for state, name in STATES.items()
            }
        )
        now = self._driver.clock()
        yield metric.HEARTBEAT_AGE.family(
            {label: now - group.last_heartbeat for label, group in labels.items()}
        )

    def _steps(self) -> Iterator[Family]:
        meters = [((model,), meter) for model, meter in self._meters.by_model.items()]
        yield metric.STEP_DURATION.histograms((label, meter.duration) for label, meter in meters)
        yield metric.STEP_TOKENS.histograms((label, meter.tokens) for label, meter in meters)
        yield metric.PLAN_BYTES.histograms((label, meter.plan_bytes) for label, meter in meters)
        yield metric.PLANNING.family({label: meter.planning_s for label, meter in meters})
