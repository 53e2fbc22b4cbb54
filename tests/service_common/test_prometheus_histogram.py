from bisect import bisect_left

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as LibrarysHistogram
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from service_common.prometheus import OTHER, BoundedLabel, Histogram, Kind, Metric

BOUNDS = (0.001, 0.5, 1.0, 2.5, 1000.0)


class Told(Collector):
    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> list[Family]:
        return [self._family]


def text_of(collector: Collector) -> str:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


@given(st.lists(st.tuples(st.sampled_from([0.0, *BOUNDS, 0.7, 3000.0]), st.integers(1, 3))))
def test_a_histogram_reads_as_the_client_librarys_own(values: list[tuple[float, int]]) -> None:
    ours, theirs = (
        Histogram(BOUNDS),
        LibrarysHistogram("h", "What.", ["m"], buckets=BOUNDS, registry=None),
    )
    child = theirs.labels("x")
    theirs_sum = 0.0
    for value, count in values:
        ours.observe(value, count)
        theirs_sum += value * count
        for _ in range(count):
            child.observe(value)
    family = Metric(Kind.HISTOGRAM, "h", "What.", ("m",)).histograms([(("x",), ours)])
    lines = text_of(theirs).splitlines()
    counts = [line for line in lines if "_sum" not in line and "_created" not in line]
    assert [line for line in text_of(Told(family)).splitlines() if "_sum" not in line] == counts
    assert ours.sum == theirs_sum
    assert ours.count == sum(count for _, count in values)


@given(st.floats(0, 2000))
def test_a_bucket_has_its_upper_end(value: float) -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(value)
    reached = [end for end, number in histogram.buckets() if number]
    assert len(reached) == len(BOUNDS) + 1 - bisect_left(BOUNDS, value)


def test_a_label_has_a_bounded_number_of_values() -> None:
    label = BoundedLabel(2)
    assert [label.value(name) for name in ("a", "b", "c", "a", "d")] == [
        "a",
        "b",
        OTHER,
        "a",
        OTHER,
    ]
