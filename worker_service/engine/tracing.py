"""Spans of requests on this worker, for those whose traces are recorded.

A span begins when the plan arrives that introduces the first of a request's sequences, and ends
with the last step before a plan forgets the last of them. A request that is preempted, swapped out
or moved, and returns, has another span. The times of its steps are read from the meter at both
ends, so a decoding request adds no work to a step.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from service_common.tracing import Attributes, Tracing
from worker_service.config import WorkerConfig
from worker_service.engine.step_stats import StepMeter
from worker_service.plan import NewSequence, StepPlan, StepResult, monotonic_us

SPAN = "pagewire.execute"
IDLE_US = 1_000_000
"""Microseconds without a step after which a span ends even if no plan has forgotten its sequences,
since an idle core sends no plans."""

Totals = Mapping[str, int]


@dataclass(slots=True)
class _RequestSpan:
    """A request with sequences on this worker, and its span."""

    traceparent: str
    seq_ids: set[int] = field(default_factory=set)
    span: Any = None
    """None if it is not recorded, or has ended because there were no steps."""
    totals: Totals = field(default_factory=dict)
    """The meter's counters when the span began."""
    num_prefill_tokens: int = 0


class StreamTraces:
    """The spans of one step stream, each a child of its request's span.

    `note` is called on the thread that collects steps, the other methods on any thread.
    """

    def __init__(self, tracing: Tracing, meter: StepMeter, attributes: Attributes) -> None:
        """meter: counts each step after it was noted here. attributes: of every span."""
        self._tracing = tracing
        self._meter = meter
        self._attributes = attributes
        self._lock = threading.Lock()
        self._is_closed = False
        self._by_seq_id: dict[int, _RequestSpan] = {}
        self._by_request: dict[str, _RequestSpan] = {}
        """Spans by `traceparent`, as below."""
        self._prefilling: dict[str, _RequestSpan] = {}
        """Requests without a token so far."""
        self._last_finished_us = 0

    def record(self, plan: StepPlan, result: StepResult) -> None:
        """Update the spans after a step."""
        with self._lock:
            if self._is_closed:
                return
            if self._by_seq_id:
                self._forget(plan.forget_seq_ids.tolist())
                self._resume_idle(plan)
            for new in plan.new_sequences:
                self._add(new, plan)
            if self._prefilling:
                self._follow_prefills(plan, result)
            if result.errors and self._by_seq_id:
                self._record_errors(plan, result)
            self._last_finished_us = result.timings.finished_us

    def end_idle(self) -> None:
        """End the spans of requests that have had no step for a while; called periodically while
        the model is idle. A request that continues later gets another span."""
        with self._lock:
            if monotonic_us() - self._last_finished_us >= IDLE_US:
                for request in self._by_request.values():
                    self._end(request, "idle")

    def close(self) -> None:
        """End all spans, because the stream has ended."""
        with self._lock:
            self._is_closed = True
            for request in self._by_request.values():
                self._end(request, "stream ended")

    def _forget(self, seq_ids: list[int]) -> None:
        for seq_id in seq_ids:
            request = self._by_seq_id.pop(seq_id, None)
            if request is None:
                continue
            request.seq_ids.discard(seq_id)
            if not request.seq_ids:
                self._end(request, "forgotten")
                del self._by_request[request.traceparent]
                self._prefilling.pop(request.traceparent, None)

    def _add(self, new: NewSequence, plan: StepPlan) -> None:
        if new.parent_seq_id is not None:
            request = self._by_seq_id.get(new.parent_seq_id)
        elif new.traceparent:
            request = self._by_request.get(new.traceparent) or self._begin(new, plan)
        else:
            return
        if request is not None:
            request.seq_ids.add(new.seq_id)
            self._by_seq_id[new.seq_id] = request

    def _begin(self, new: NewSequence, plan: StepPlan) -> _RequestSpan | None:
        """A new request; None if its trace is not recorded."""
        request = _RequestSpan(new.traceparent)
        more = {"pagewire.num_cached_tokens": new.num_computed_tokens}
        if not self._start(request, plan, more):
            return None
        self._by_request[request.traceparent] = self._prefilling[request.traceparent] = request
        return request

    def _start(self, request: _RequestSpan, plan: StepPlan, more: Attributes) -> bool:
        """Start a request's span. Returns whether it is recorded."""
        attributes = {**self._attributes, "pagewire.first_step_id": plan.step_id, **more}
        start_s = plan.received_us / 1e6
        span = self._tracing.start(SPAN, request.traceparent, start_s, attributes)
        if not span.is_recording():
            return False
        request.span, request.totals = span, self._totals()
        return True

    def _resume_idle(self, plan: StepPlan) -> None:
        """Start new spans for requests whose spans ended as idle and that this plan keeps."""
        for request in self._by_request.values():
            if request.span is None:
                self._start(request, plan, {})

    def _follow_prefills(self, plan: StepPlan, result: StepResult) -> None:
        timings = result.timings
        for request in list(self._prefilling.values()):
            rows = np.isin(plan.seq_ids, np.fromiter(request.seq_ids, np.int32))
            if not rows.any():
                continue
            if not request.num_prefill_tokens:
                self._tracing.add_event(request.span, "started", timings.started_us / 1e6)
            request.num_prefill_tokens += int(plan.num_tokens[rows].sum())
            if plan.output[rows].any():
                self._tracing.add_event(request.span, "first token", timings.finished_us / 1e6)
                del self._prefilling[request.traceparent]

    def _record_errors(self, plan: StepPlan, result: StepResult) -> None:
        for row, reason in result.errors.items():
            request = self._by_seq_id.get(int(plan.seq_ids[row]))
            if request is not None:
                when_s = result.timings.finished_us / 1e6
                more = {"error.type": reason.name}
                self._tracing.add_event(request.span, "row failed", when_s, more)

    def _end(self, request: _RequestSpan, reason: str) -> None:
        """End a request's span, if it has one, at the end of its last step."""
        span, request.span = request.span, None
        if span is None:
            return
        for name, total in self._totals().items():
            span.set_attribute(f"pagewire.{name}", total - request.totals[name])
        span.set_attribute("pagewire.num_prefill_tokens", request.num_prefill_tokens)
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


MakeTraces = Callable[[int, StepMeter], StreamTraces]
"""Makes the traces of an epoch's stream, whose steps the meter counts."""


def traces_of_streams(tracing: Tracing, config: WorkerConfig) -> MakeTraces:
    """Makes the traces of this worker's streams."""

    def make(epoch: int, meter: StepMeter) -> StreamTraces:
        attributes: Attributes = {
            "pagewire.group": config.network.group_id,
            "pagewire.rank": config.group.layout.rank,
            "pagewire.epoch": epoch,
        }
        return StreamTraces(tracing, meter, attributes)

    return make
