"""Comparison of the same requests under several configurations, given as text: latencies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import numpy as np
from pydantic import TypeAdapter

from scheduler_service.core import SchedulerConfig, SchedulerCore
from scheduler_service.replay.recording import validated
from tools.what_if.cost_model import Fit, fit_groups
from tools.what_if.simulation import simulate
from tools.what_if.trace import RequestHistory, Trace

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """Latencies of requests that ended well, in seconds."""

    num_requests: int
    first_token: list[float]
    """Seconds from submission, per request."""
    between_tokens: list[float]
    """Per token of a choice beyond its first."""
    end_to_end: list[float]
    """Seconds from submission, per request."""
    tokens_per_s: float
    """Throughput of these requests, from the first submission to the last end."""

    @classmethod
    def of(cls, histories: Iterable[RequestHistory]) -> "Latencies":
        """The latencies of finished requests."""
        finished = [history for history in histories if history.is_finished]
        ends = [history.ended for history in finished if history.ended is not None]
        span = max(ends) - min(history.submitted for history in finished) if finished else 0.0
        return cls(
            num_requests=len(finished),
            first_token=[
                history.first_token - history.submitted
                for history in finished
                if history.first_token is not None
            ],
            between_tokens=[
                later - earlier
                for history in finished
                for choice in history.choices
                for earlier, later in pairwise(choice.times)
            ],
            end_to_end=[
                end - history.submitted for history, end in zip(finished, ends, strict=True)
            ],
            tokens_per_s=sum(history.num_tokens for history in finished) / span if span else 0.0,
        )


def percentiles(values: Sequence[float]) -> list[float] | None:
    """The values at PERCENTILES; None without values."""
    return np.percentile(values, PERCENTILES).tolist() if values else None


RECORDED = "recorded"
PREDICTED = "recorded, predicted"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """How the trace's requests fared under one configuration."""

    name: str
    latencies: Latencies
    by_tenant: dict[str, Latencies]
    """Empty if there is only one tenant."""
    num_preemptions: int | None
    """None for the recording itself, for which it is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All rows are of the same requests: those that ended well in the recording."""

    fits: dict[str, Fit]
    """Cost models by worker group."""
    rows: list[Row]
    num_requests: int
    num_assumed: int
    """Requests that are part of the load, but whose end was not recorded."""


def compare(
    trace: Trace, recorded: SchedulerConfig, others: Mapping[str, SchedulerConfig]
) -> Comparison:
    """The recording as it was, as the cost model predicts it, and under other configurations.

    Raises ValueError if no step was recorded, or a worker group cannot work with a configuration.
    """
    fits = fit_groups(trace.steps)
    costs = {group_id: fit.model for group_id, fit in fits.items()}
    numbers = {history.number for history in trace.histories if history.is_finished}
    tenants = sorted(
        {history.request.tenant for history in trace.histories if history.number in numbers}
    )
    rows = [_row(RECORDED, trace.histories, numbers, tenants, None)]
    for name, config in {PREDICTED: recorded, **others}.items():
        went = simulate(trace, SchedulerCore(config), costs)
        rows.append(_row(name, went.histories, numbers, tenants, went.state.num_preemptions))
    return Comparison(
        fits=fits,
        rows=rows,
        num_requests=len(numbers),
        num_assumed=sum(history.is_assumed for history in trace.histories),
    )


def _row(
    name: str,
    histories: Iterable[RequestHistory],
    numbers: set[int],
    tenants: Sequence[str],
    num_preemptions: int | None,
) -> Row:
    kept = [history for history in histories if history.number in numbers]
    by_tenant = {
        tenant: Latencies.of(history for history in kept if history.request.tenant == tenant)
        for tenant in tenants
    }
    return Row(
        name=name,
        latencies=Latencies.of(kept),
        by_tenant=by_tenant if len(tenants) > 1 else {},
        num_preemptions=num_preemptions,
    )


_CONFIG = TypeAdapter(SchedulerConfig)


def apply_overrides(config: SchedulerConfig, text: str) -> SchedulerConfig:
    """The configuration with the fields that `text` names; raises ValueError, naming the field."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    for part in text.split(","):
        name, separator, value = part.partition("=")
        name, value = name.strip().replace("-", "_"), value.strip()
        if not separator:
            raise ValueError(f"{part!r}: expected FIELD=VALUE")
        if name not in values:
            raise ValueError(f"{name}: no such field; there are {', '.join(sorted(values))}")
        values[name] = None if value.lower() == "none" else value
    return validated(_CONFIG.validate_python, values)
