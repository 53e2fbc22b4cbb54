"""One trace under several configurations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from scheduler_service.core import SchedulerConfig, SchedulerCore
from scheduler_service.replay.latencies import Latencies
from scheduler_service.replay.lives import Life
from tools.what_if.cost_model import Fit, fit_groups
from tools.what_if.simulation import simulate
from tools.what_if.trace import Trace

RECORDED = "recorded"
PREDICTED = "recorded, predicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """How the trace's requests fared under one configuration."""

    name: str
    latencies: Latencies
    by_tenant: dict[str, Latencies]
    """Empty if there is but one tenant."""
    num_preemptions: int | None
    """None: not known, of the recording itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows are of the same requests: those that ended well in the recording."""

    fits: dict[str, Fit]
    """By worker group."""
    rows: list[Row]
    num_requests: int
    num_assumed: int
    """Requests that are part of the load, but whose end was not recorded."""


def compare(
    trace: Trace, recorded: SchedulerConfig, others: Mapping[str, SchedulerConfig]
) -> Comparison:
    """The recording as it was, as the cost model predicts it, and as it would be with others.

    Raises ValueError if no step was recorded, or a worker group cannot work with a configuration.
    """
    fits = fit_groups(trace.steps)
    costs = {group_id: fit.model for group_id, fit in fits.items()}
    numbers = {life.number for life in trace.lives if life.is_finished}
    tenants = sorted({life.request.tenant for life in trace.lives if life.number in numbers})
    rows = [_row(RECORDED, trace.lives, numbers, tenants, None)]
    for name, config in {PREDICTED: recorded, **others}.items():
        went = simulate(trace, SchedulerCore(config), costs)
        rows.append(_row(name, went.lives, numbers, tenants, went.state.num_preemptions))
    return Comparison(
        fits=fits,
        rows=rows,
        num_requests=len(numbers),
        num_assumed=sum(script.is_assumed for script in trace.scripts),
    )


def _row(
    name: str,
    lives: Iterable[Life],
    numbers: set[int],
    tenants: Sequence[str],
    num_preemptions: int | None,
) -> Row:
    kept = [life for life in lives if life.number in numbers]
    by_tenant = {
        tenant: Latencies.of(life for life in kept if life.request.tenant == tenant)
        for tenant in tenants
    }
    return Row(
        name=name,
        latencies=Latencies.of(kept),
        by_tenant=by_tenant if len(tenants) > 1 else {},
        num_preemptions=num_preemptions,
    )
