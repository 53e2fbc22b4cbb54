"""Every Prometheus metric of a worker: its name and meaning, and the sample's source.

`scheduler_service/metrics` describes how metrics are named; it applies here, too.
"""

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


@dataclass(frozen=True, slots=True)
class Metric:
    """What operators see."""

    name: str
    """As it is queried."""
    kind: str
    """`counter`, `gauge` or `histogram`."""
    help: str
    labels: tuple[str, ...] = ()


def _counter(name: str, meaning: str) -> Metric:
    return Metric(name, "counter", meaning)


COUNTERS: Mapping[Metric, Callable[["StepMeter"], float]] = {
    _counter("pagewire_worker_steps_total", "Steps executed, of all step streams."): lambda meter: (
        meter.num_steps
    ),
    _counter(
        "pagewire_worker_tokens_total", "Tokens computed, of prefills and decodes."
    ): lambda meter: meter.num_tokens,
    _counter("pagewire_worker_sampled_tokens_total", "Tokens sampled."): lambda meter: (
        meter.num_sampled
    ),
    _counter(
        "pagewire_worker_row_errors_total",
        "Rows that could not be computed or sampled; each ended its request.",
    ): lambda meter: meter.num_row_errors,
    _counter(
        "pagewire_worker_swapped_out_blocks_total", "KV blocks copied from device to host."
    ): lambda meter: meter.num_swapped_out_blocks,
    _counter(
        "pagewire_worker_swapped_in_blocks_total", "KV blocks copied from host to device."
    ): lambda meter: meter.num_swapped_in_blocks,
    _counter(
        "pagewire_worker_copied_blocks_total", "KV blocks copied on the device."
    ): lambda meter: meter.num_copied_blocks,
}

STEP_TIME = Metric(
    "pagewire_worker_step_time_seconds_total",
    "counter",
    "Time of steps, by what it was spent on: `cache_ops`, `forward`, `sample` and `other`. Cache "
    "operations that ran beside the forward pass are in that, too.",
    ("part",),
)
IDLE = Metric(
    "pagewire_worker_idle_seconds_total",
    "counter",
    "Time between the steps of a stream: `no_plan` until the next plan had come, `plan_ready` from "
    "then on. While nobody asks for anything it is the former.",
    ("reason",),
)
STEP_DURATION = Metric(
    "pagewire_worker_step_seconds",
    "histogram",
    "From when work on a step began to when its result was ready.",
)

GAUGES: Mapping[Metric, Callable[["WorkerFacts"], float]] = {
    Metric(
        "pagewire_worker_registered", "gauge", "Whether a core has the worker registered."
    ): lambda facts: facts.is_registered,
    Metric("pagewire_worker_streaming", "gauge", "Whether a step stream is open."): lambda facts: (
        facts.is_streaming
    ),
    Metric(
        "pagewire_worker_draining", "gauge", "Whether the worker takes no new step streams."
    ): lambda facts: facts.is_draining,
    Metric(
        "pagewire_worker_epoch", "gauge", "The greatest epoch that the worker has seen."
    ): lambda facts: facts.last_epoch,
    Metric(
        "pagewire_worker_busy_seconds",
        "gauge",
        "How long the model has been at what it does now, such as one step; 0 when idle.",
    ): lambda facts: facts.busy_s,
    Metric(
        "pagewire_worker_weight_loads", "gauge", "Times that the process has loaded its weights."
    ): lambda facts: facts.num_weight_loads,
}

INFO = Metric(
    "pagewire_worker_info",
    "gauge",
    "1; its labels say which worker of which group this is, and what it runs.",
    ("worker_id", "group", "rank", "model_name", "device", "dtype", "attention_backend", "version"),
)

ALL = (INFO, *GAUGES, *COUNTERS, STEP_TIME, IDLE, STEP_DURATION)
"""In the order in which they are reported."""


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
    """The worker's metrics and those that the client library exports for the process."""
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
