"""Counters and histograms of the core's service, updated on events; `metrics` reads them."""

from dataclasses import dataclass, field

from service_common.prometheus import Histogram

STEP_BOUNDS = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 60.0),
)
"""Seconds."""

STEP_TOKENS_BOUNDS = tuple(float(2**power) for power in (0, *range(3, 15)))

PLAN_BYTES_BOUNDS = tuple(float(4**power) for power in range(3, 13))


@dataclass(slots=True)
class StepCounters:
    """The steps of one model's worker groups."""

    duration: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS))
    """Seconds."""
    tokens: Histogram = field(default_factory=lambda: Histogram(STEP_TOKENS_BOUNDS))
    plan_bytes: Histogram = field(default_factory=lambda: Histogram(PLAN_BYTES_BOUNDS))
    planning_s: float = 0.0


@dataclass(slots=True)
class EventCounters:
    """Numbers of events of workers and frontends since the core's start."""

    num_registrations: int = 0
    num_lease_expiries: int = 0
    num_drains: int = 0
    num_link_failures: int = 0
    num_steps_overdue: int = 0
    num_groups_hung: int = 0
    num_attaches: int = 0


@dataclass(frozen=True, slots=True)
class CoreCounters:
    """All counters of one core's service."""

    counts: EventCounters = field(default_factory=EventCounters)
    by_model: dict[str, StepCounters] = field(default_factory=dict)

    def steps_of(self, model: str) -> StepCounters:
        """The counters of a model, created when its first worker registers."""
        return self.by_model.setdefault(model, StepCounters())
