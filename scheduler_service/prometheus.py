"""A metric's description, and the family of samples that is made of it when somebody asks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from scheduler_service.metrics.counts import Histogram

LabelValues: TypeAlias = tuple[str, ...]


class Kind(StrEnum):
    """How Prometheus is to take the values."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """What operators see: one name, and a sample for each combination of its labels' values."""

    name: str
    """As it is queried; a counter's ends with `_total`."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert self.name.endswith("_total") or self.kind is not Kind.COUNTER

    def family(self, values: Mapping[LabelValues, float] | float) -> Family:
        """The samples of a counter or gauge; a number is the only sample of one without labels."""
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
