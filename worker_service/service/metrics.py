"""How the metrics of `metrics.toml` are collected."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from service_common.prometheus import families, read_metrics
from worker_service.engine.step_stats import StepMeter

METRICS = read_metrics(Path(__file__).with_suffix(".toml"))
ALL = tuple(metric for section in METRICS.values() for metric in section.values())
_COMPUTED = METRICS["computed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFacts:
    """The worker's state at one moment."""

    is_registered: bool
    is_streaming: bool
    is_draining: bool
    last_epoch: int
    busy_s: float
    num_weight_loads: int
    uses_cuda_graphs: bool
    drafter: str | None
    """Its name as the value of `--speculative`."""
    slot_changes: Mapping[str, int]
    """See `AdapterLoader.slot_changes`."""
    labels: tuple[str, ...]
    """Labels of `pagewire_worker_info`."""


class WorkerCollector(Collector):
    """Reads meter and state at each scrape, on the scrape's thread."""

    def __init__(self, meter: StepMeter, facts: Callable[[], WorkerFacts]) -> None:
        self._meter = meter
        self._facts = facts

    def describe(self) -> list[Family]:
        """Nothing, so that its registration reads no numbers."""
        return []

    def collect(self) -> Iterator[Family]:
        """All samples as of now."""
        facts, meter = self._facts(), self._meter
        yield _COMPUTED["info"].family({facts.labels: 1})
        yield from families(METRICS["facts"], {(): facts})
        parts = ("cache_ops", "forward", "sample", "other")
        yield _COMPUTED["step_time"].family(
            {(part,): getattr(meter, f"{part}_us") / 1e6 for part in parts}
        )
        idle = {"no_plan": meter.idle_without_plan_us, "plan_ready": meter.idle_with_plan_us}
        yield _COMPUTED["idle"].family({(reason,): us / 1e6 for reason, us in idle.items()})
        yield _COMPUTED["slot_changes"].family(
            {(change,): number for change, number in facts.slot_changes.items()}
        )
        yield from families(METRICS["steps"], {(): meter})
        drafters = [] if facts.drafter is None else [(facts.drafter,)]
        yield from families(METRICS["drafts"], dict.fromkeys(drafters, meter))
