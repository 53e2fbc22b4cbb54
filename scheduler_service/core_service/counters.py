"""What the core's service counts as it happens, because nobody could read it off later."""

from dataclasses import dataclass, field

from scheduler_service.core_service import metric_list as metric
from scheduler_service.metrics.counts import Histogram


@dataclass(slots=True)
class StepMeter:
    """The steps of one model's worker groups."""

    duration: Histogram = field(default_factory=lambda: Histogram(metric.STEP_BOUNDS))
    """Seconds."""
    tokens: Histogram = field(default_factory=lambda: Histogram(metric.STEP_TOKENS_BOUNDS))
    plan_bytes: Histogram = field(default_factory=lambda: Histogram(metric.PLAN_BYTES_BOUNDS))
    planning_s: float = 0.0


@dataclass(slots=True)
class ServiceCounts:
    """What has happened to workers and frontends since the core's start."""

    num_registrations: int = 0
    num_lease_expiries: int = 0
    num_drains: int = 0
    num_link_failures: int = 0
    num_steps_overdue: int = 0
    num_groups_hung: int = 0
    num_attaches: int = 0


@dataclass(frozen=True, slots=True)
class Meters:
    """All of one core's service."""

    counts: ServiceCounts = field(default_factory=ServiceCounts)
    by_model: dict[str, StepMeter] = field(default_factory=dict)

    def steps_of(self, model: str) -> StepMeter:
        """Of a model that a registered worker brings along."""
        return self.by_model.setdefault(model, StepMeter())
