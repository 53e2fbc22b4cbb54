"""Prometheus metrics of the services: descriptions, histograms, labels, export.

Frontends and core keep counters and histograms on their event loop, which makes the samples at each
scrape: no locks, and almost no cost per token. The client library's own metrics take a lock for
each change, and search a histogram's buckets one by one.

The metrics of each service are a table in its own package, such as
`scheduler_service/frontend/metrics.toml`, and a module of the same name collects their samples.

Names: a metric with the meaning of one of vLLM's has its name (`vllm:…`), so that dashboards,
alerts and autoscalers made for vLLM work with a Pagewire deployment. All others begin with
`pagewire_`.
"""

import asyncio
import concurrent.futures
import threading
import tomllib
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, chain
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from service_common.metrics_server import MetricsServer


class Histogram:
    """The number of values in each bucket, and their sum.

    bounds: the buckets' upper bounds, inclusive; a last bucket has all greater values.
    """

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.sum = 0.0
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, count: int = 1) -> None:
        """Count a value, or `count` equal ones."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """Values observed."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """The buckets in Prometheus' form: (upper bound, number of values up to it)."""
        ends = [*map(floatToGoString, self._bounds), "+Inf"]
        return list(zip(ends, map(float, accumulate(self._counts)), strict=True))


LabelValues: TypeAlias = tuple[str, ...]


class Kind(StrEnum):
    """Prometheus' type of a metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric's description; it has a sample for each combination of its labels' values."""

    kind: Kind
    name: str
    """The name in queries; that of a counter ends with `_total`."""
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.endswith("_total") or self.kind is not Kind.COUNTER

    def family(self, values: Mapping[LabelValues, float] | float) -> Family:
        """The samples of a counter or gauge; a single number if it has no labels."""
        samples = values if isinstance(values, Mapping) else {(): values}
        kind = CounterMetricFamily if self.kind is Kind.COUNTER else GaugeMetricFamily
        family = kind(self.name, self.help, labels=self.labels)
        for labels, value in samples.items():
            family.add_metric(labels, value)
        return family

    def histograms(self, values: Iterable[tuple[LabelValues, Histogram]]) -> Family:
        """The samples of a histogram."""
        family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
        for labels, histogram in values:
            family.add_metric(labels, histogram.buckets(), histogram.sum)
        return family


Section: TypeAlias = dict[str, Metric]
"""Metrics by key."""


def read_metrics(path: Path) -> dict[str, Section]:
    """The metrics of a TOML file by section, in its order.

    An entry is a list of kind, name and meaning, and of the labels that the metric has besides the
    `labels` of its section.
    """
    sections = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: dict(_metrics_of(section)) for name, section in sections.items()}


def _metrics_of(section: dict[str, Any]) -> Iterator[tuple[str, Metric]]:
    shared = section.pop("labels", [])
    for key, (kind, name, text, *labels) in section.items():
        yield key, Metric(Kind(kind), name, text, (*shared, *chain(*labels)))


def families(
    metrics: Mapping[str, Metric], sources: Mapping[LabelValues, object]
) -> Iterator[Family]:
    """The samples of metrics that are named by the attribute of a source that each reads, such as
    `totals.num_preemptions`."""
    for path, metric in metrics.items():
        read = attrgetter(path)
        values = {labels: read(source) for labels, source in sources.items()}
        is_histogram = metric.kind is Kind.HISTOGRAM
        yield metric.histograms(values.items()) if is_histogram else metric.family(values)


OTHER = "other"
"""The label for all values beyond the maximum."""


class BoundedLabel:
    """Accepts the first `max_values` different values, and replaces others by `other`.

    Each value of a label is a time series in Prometheus and takes memory here as long as the
    process runs, and callers choose the values.
    """

    def __init__(self, max_values: int) -> None:
        self._max_values = max_values
        self._known: set[str] = set()

    def value(self, value: str) -> str:
        """The label for a value."""
        if value not in self._known:
            if len(self._known) >= self._max_values:
                return OTHER
            self._known.add(value)
        return value


TIMEOUT_S = 5.0
"""Limit for the event loop to answer; a scrape that takes longer fails."""


class LoopCollector(Collector):
    """Reads the metrics on the running event loop at each scrape, which may be on any thread.

    Services therefore need no locks, and a scrape costs their loop only the reading of numbers: the
    thread that serves the scrape formats them.
    """

    def __init__(self, collect: Callable[[], Iterable[Family]]) -> None:
        """Call this on the event loop."""
        self._collect = collect
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def describe(self) -> Iterable[Family]:
        """Nothing, so that its registration reads no numbers."""
        return ()

    def collect(self) -> Iterable[Family]:
        """The families. Raises TimeoutError if the loop is blocked, RuntimeError if closed."""
        if threading.get_ident() == self._thread:
            return list(self._collect())
        found: concurrent.futures.Future[list[Family]] = concurrent.futures.Future()

        def read() -> None:
            try:
                found.set_result(list(self._collect()))
            except Exception as error:
                found.set_exception(error)

        self._loop.call_soon_threadsafe(read)
        return found.result(TIMEOUT_S)


def make_registry(collector: Collector) -> CollectorRegistry:
    """A service's metrics, with those of the client library about the process: its memory, CPU
    time and open files."""
    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


@asynccontextmanager
async def published(
    registry: CollectorRegistry, address: str | None
) -> AsyncIterator[MetricsServer | None]:
    """Serve the registry at HOST:PORT, or nowhere, within the context.

    Raises CannotListen.
    """
    if address is None:
        yield None
        return
    server = MetricsServer(address, registry)
    try:
        yield server
    finally:  # off the loop, which a running scrape may be waiting for
        await asyncio.to_thread(server.close)
