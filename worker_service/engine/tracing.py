"""Spans of what requests do on this worker, for those whose traces are recorded.

A span begins when the plan arrives that introduces the first of a request's sequences, and ends
with the last step before a plan forgets the last of them. A request that is preempted, swapped out
or moved, and comes back, has another span. The cost of its steps is read from the meter at both
ends, so a decoding request costs a step nothing.
"""

import asyncio
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service_common.tracing import Attributes, Tracing, make_tracing
from service_common.version import VERSION
from worker_service.array_types import BoolArray
from worker_service.config import WorkerConfig
from worker_service.engine.step_stats import StepMeter
from worker_service.plan import NewSequence, StepPlan, StepResult, monotonic_us

SPAN = "pagewire.execute"
IDLE_US = 1_000_000
"""A plan forgets what the core no longer wants, but where nobody asks for anything, none comes.
After this many microseconds without a step a stay ends without it."""

Totals = Mapping[str, int]


@dataclass(slots=True)
class _RequestSpan:
    """One request's sequences here."""

    traceparent: str
    seq_ids: set[int] = field(default_factory=set)
    span: Any = None
    """None while it is not recorded, and when the stay has ended because no steps came."""
    totals: Totals = field(default_factory=dict)
    """The meter's, when the span began."""
    num_prefill_tokens: int = 0


class StreamTraces:
    """Stays of one step stream, each under its request's span.

    `note` is called on the thread that collects steps, the others on any thread.
    """

    def __init__(self, tracing: Tracing, meter: StepMeter, attributes: Attributes) -> None:
        """`meter`: counts each step after it was noted here. `attributes`: every span's."""
        self._tracing = tracing
        self._meter = meter
        self._attributes = attributes
        self._lock = threading.Lock()
        self._is_closed = False
        self._stays: dict[int, _RequestSpan] = {}
        """By sequence."""
        self._by_request: dict[str, _RequestSpan] = {}
        """By `traceparent`."""
        self._prefilling: dict[str, _RequestSpan] = {}
        """Those that have no token yet."""
        self._last_finished_us = 0

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Take note of a step that is done."""
        with self._lock:
            if self._is_closed:
                return
            if self._stays:
                self._forget(plan.forget_seq_ids.tolist())
                self._resume_idle(plan)
            for new in plan.new_sequences:
                self._add(new, plan)
            if self._prefilling:
                self._follow_prefills(plan, result)
            if result.errors and self._stays:
                self._note_errors(plan, result)
            self._last_finished_us = result.timings.finished_us

    def end_idle(self) -> None:
        """End the spans of requests that have had no step for a while; to be called now and then
        while the model does nothing. A request that goes on after all gets another."""
        with self._lock:
            if monotonic_us() - self._last_finished_us >= IDLE_US:
                for stay in self._by_request.values():
                    self._end(stay, "idle")

    def close(self) -> None:
        """The stream has ended, and with it all stays."""
        with self._lock:
            self._is_closed = True
            for stay in self._by_request.values():
                self._end(stay, "stream ended")

    def _forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            stay = self._stays.pop(seq_id, None)
            if stay is None:
                continue
            stay.seq_ids.discard(seq_id)
            if not stay.seq_ids:
                self._end(stay, "forgotten")
                del self._by_request[stay.traceparent]
                self._prefilling.pop(stay.traceparent, None)

    def _add(self, new: NewSequence, plan: StepPlan) -> None:
        if new.parent_seq_id is not None:
            stay = self._stays.get(new.parent_seq_id)
        elif new.traceparent:
            stay = self._by_request.get(new.traceparent) or self._begin(new, plan)
        else:
            return
        if stay is not None:
            stay.seq_ids.add(new.seq_id)
            self._stays[new.seq_id] = stay

    def _begin(self, new: NewSequence, plan: StepPlan) -> _RequestSpan | None:
        """A new stay; None if the sampler does not want it recorded."""
        stay = _RequestSpan(new.traceparent)
        more = {"pagewire.num_cached_tokens": new.num_computed_tokens}
        if not self._start(stay, plan, more):
            return None
        self._by_request[stay.traceparent] = self._prefilling[stay.traceparent] = stay
        return stay

    def _start(self, stay: _RequestSpan, plan: StepPlan, more: Attributes) -> bool:
        """Begin a stay's span; whether it is recorded."""
        attributes = {**self._attributes, "pagewire.first_step_id": plan.step_id, **more}
        start_s = plan.received_us / 1e6
        span = self._tracing.start(SPAN, stay.traceparent, start_s, attributes)
        if not span.is_recording():
            return False
        stay.span, stay.totals = span, self._totals()
        return True

    def _resume_idle(self, plan: StepPlan) -> None:
        """Those that were given up, and that this plan has not forgotten, go on."""
        for stay in self._by_request.values():
            if stay.span is None:
                self._start(stay, plan, {})

    def _follow_prefills(self, plan: StepPlan, result: StepResult) -> None:
        timings = result.timings
        for stay in list(self._prefilling.values()):
            rows = _rows_of(stay, plan)
            if not rows.any():
                continue
            if not stay.num_prefill_tokens:
                self._tracing.add_event(stay.span, "started", timings.started_us / 1e6)
            stay.num_prefill_tokens += int(plan.num_tokens[rows].sum())
            if plan.sample[rows].any():
                self._tracing.add_event(stay.span, "first token", timings.finished_us / 1e6)
                del self._prefilling[stay.traceparent]

    def _note_errors(self, plan: StepPlan, result: StepResult) -> None:
        for row, reason in result.errors.items():
            stay = self._stays.get(int(plan.seq_ids[row]))
            if stay is not None:
                when_s = result.timings.finished_us / 1e6
                more = {"error.type": reason.name}
                self._tracing.add_event(stay.span, "row failed", when_s, more)

    def _end(self, stay: _RequestSpan, reason: str) -> None:
        """End a stay's span, if it has one, at the end of its last step."""
        span, stay.span = stay.span, None
        if span is None:
            return
        for name, total in self._totals().items():
            span.set_attribute(f"pagewire.{name}", total - stay.totals[name])
        span.set_attribute("pagewire.num_prefill_tokens", stay.num_prefill_tokens)
        span.set_attribute("pagewire.end", reason)
        self._tracing.end(span, self._last_finished_us / 1e6)

    def _totals(self) -> Totals:
        meter = self._meter
        return {
            "num_steps": meter.num_steps,
            "cache_ops_us": meter.cache_ops_us,
            "forward_us": meter.forward_us,
            "sample_us": meter.sample_us,
        }


def _rows_of(stay: _RequestSpan, plan: StepPlan) -> BoolArray:
    """Which of a plan's rows are a stay's. [num_rows]."""
    return np.isin(plan.seq_ids, np.fromiter(stay.seq_ids, np.int32))


class WorkerTraces:
    """Makes the traces of each step stream."""

    def __init__(self, tracing: Tracing, config: WorkerConfig) -> None:
        self._tracing = tracing
        self._group_id = config.network.group_id
        self._rank = config.group.layout.rank

    def of_stream(self, epoch: int, meter: StepMeter) -> StreamTraces:
        """Traces of an epoch's stream, whose steps `meter` counts."""
        attributes: Attributes = {
            "pagewire.group": self._group_id,
            "pagewire.rank": self._rank,
            "pagewire.epoch": epoch,
        }
        return StreamTraces(self._tracing, meter, attributes)

    async def close(self) -> None:
        """Export what is left; waits for it, but not for long."""
        await asyncio.to_thread(self._tracing.close)


def make_traces(config: WorkerConfig) -> WorkerTraces | None:
    """None where neither a flag nor the environment names an endpoint. Raises CannotTrace."""
    network = config.network
    tracing = make_tracing("worker", VERSION, network.otlp_endpoint, network.worker_id)
    return None if tracing is None else WorkerTraces(tracing, config)
