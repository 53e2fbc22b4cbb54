"""A worker's numbers as Prometheus' samples."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from worker_service.engine.step_stats import StepMeter
from worker_service.service import metrics as metric

Samples = Mapping[tuple[str, ...], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """The worker's state of an instant."""

    is_registered: bool
    is_streaming: bool
    is_draining: bool
    last_epoch: int
    busy_s: float
    num_weight_loads: int
    labels: tuple[str, ...]
    """Of `pagewire_worker_info`."""


class WorkerCollector(Collector):
    """Reads meter and state whenever a scrape asks, on the scrape's thread."""

    def __init__(self, meter: StepMeter, facts: Callable[[], WorkerFacts]) -> None:
        self._meter = meter
        self._facts = facts

    def describe(self) -> list[Family]:
        """Nothing, so that registering it asks for no numbers."""
        return []

    def collect(self) -> Iterator[Family]:
        """All samples as of now."""
        facts, meter = self._facts(), self._meter
        yield _family(metric.INFO, {facts.labels: 1})
        for each, read in metric.GAUGES.items():
            yield _family(each, {(): read(facts)})
        for each, count in metric.COUNTERS.items():
            yield _family(each, {(): count(meter)})
        parts = {
            "cache_ops": meter.cache_ops_us,
            "forward": meter.forward_us,
            "sample": meter.sample_us,
            "other": meter.other_us,
        }
        yield _family(metric.STEP_TIME, {(part,): us / 1e6 for part, us in parts.items()})
        idle = {"no_plan": meter.idle_without_plan_us, "plan_ready": meter.idle_with_plan_us}
        yield _family(metric.IDLE, {(reason,): us / 1e6 for reason, us in idle.items()})
        durations = HistogramMetricFamily(metric.STEP_DURATION.name, metric.STEP_DURATION.help)
        durations.add_metric((), meter.durations(), meter.busy_sum_us / 1e6)
        yield durations


def make_registry(collector: WorkerCollector) -> CollectorRegistry:
    """What the worker tells, with what the client library tells of the process."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def _family(each: metric.Metric, samples: Samples) -> Family:
    kind = CounterMetricFamily if each.kind == "counter" else GaugeMetricFamily
    family = kind(each.name, each.help, labels=each.labels)
    for labels, value in samples.items():
        family.add_metric(labels, value)
    return family
