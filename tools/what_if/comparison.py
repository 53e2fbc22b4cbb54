"""Comparison of the same requests under several configurations, given as text: latencies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

from pydantic import TypeAdapter

from scheduler_service.core import SchedulerConfig, SchedulerCore
from scheduler_service.replay.recording import validated
from tools.what_if.cost_model import Fit, fit_groups
from tools.what_if.simulation import simulate
from tools.what_if.trace import RequestHistory, Trace

RECORDED = "recorded"
PREDICTED = "recorded, predicted"


class Latencies(NamedTuple):
    """Latencies of requests that ended well, in seconds."""

    num_requests: int
    first_token: list[float]
    """From submission, per request."""
    between_tokens: list[float]
    """Per token of a choice beyond its first."""
    end_to_end: list[float]
    """From submission, per request."""
    tokens_per_s: float
    """Throughput of these requests, from the first submission to the last end."""

    @classmethod
    def of(cls, histories: Iterable[RequestHistory]) -> "Latencies":
        """The latencies of finished requests."""
        finished = [history for history in histories if history.is_finished]
        began = min((history.submitted for history in finished), default=0.0)
        span = max((history.ended for history in finished), default=0.0) - began
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
            end_to_end=[history.ended - history.submitted for history in finished],
            tokens_per_s=sum(history.num_tokens for history in finished) / span if span else 0.0,
        )


class Run(NamedTuple):
    """How the compared requests fared under one configuration."""

    name: str
    histories: Sequence[RequestHistory]
    num_preemptions: int | None
    """None for the recording itself, for which it is unknown."""

    def latencies(self, tenant: str | None = None) -> Latencies:
        """Latencies of all requests, or of one tenant's."""
        return Latencies.of(
            history for history in self.histories if tenant in (None, history.request.tenant)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All runs are of the same requests: those that ended well in the recording."""

    fits: Mapping[str, Fit]
    """Cost models by worker group."""
    runs: Sequence[Run]
    num_assumed: int
    """Requests that are part of the load, but whose end was not recorded."""

    @property
    def tenants(self) -> list[str]:
        """The tenants of the requests."""
        return sorted({history.request.tenant for history in self.runs[0].histories})


def compare(
    trace: Trace, recorded: SchedulerConfig, others: Mapping[str, SchedulerConfig]
) -> Comparison:
    """The recording as it was, as the cost model predicts it, and under other configurations.

    Raises ValueError if no step was recorded, or a worker group cannot work with a configuration.
    """
    fits = fit_groups(trace.steps)
    costs = {group_id: fit.model for group_id, fit in fits.items()}
    finished = [history for history in trace.histories if history.is_finished]
    numbers = {history.number for history in finished}
    runs = [Run(RECORDED, finished, None)]
    for name, config in {PREDICTED: recorded, **others}.items():
        core = SchedulerCore(config)
        histories = [h for h in simulate(trace, core, costs) if h.number in numbers]
        runs.append(Run(name, histories, core.snapshot().num_preemptions))
    num_assumed = sum(history.is_assumed for history in trace.histories)
    return Comparison(fits=fits, runs=runs, num_assumed=num_assumed)


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
