"""The span of a request in a trace."""

from typing import Any

from scheduler_service.frontend.metrics import CANCELLED, OK, RequestSummary
from scheduler_service.frontend.timings import PARTS, Stopwatch
from service_common.metadata import TRACEPARENT
from service_common.tracing import Tracing


class RequestSpan:
    """The span of a request, from its arrival to its end, below its client's span if it has one."""

    def __init__(self, tracing: Tracing, request_id: str, tenant: str, arrived: float) -> None:
        """`arrived` is on the monotonic clock."""
        self._tracing = tracing
        attributes = {"pagewire.request_id": request_id, "pagewire.tenant": tenant}
        self._span = tracing.start("pagewire.generate", TRACEPARENT.get(), arrived, attributes)
        self.traceparent = tracing.traceparent_of(self._span)
        """Passed to the core; empty if the trace is not recorded."""

    def end(self, request: RequestSummary) -> None:
        """End the span with the request's outcome."""
        if not self.traceparent:
            return
        span = self._span
        self._add_times(request.stopwatch, span)
        span.set_attribute("pagewire.outcome", request.outcome)
        if request.outcome not in (OK, CANCELLED):
            self._tracing.mark_failed(span)
        span.set_attribute("pagewire.num_worker_losses", request.num_worker_losses)
        if request.model_name is not None:
            span.set_attribute("gen_ai.request.model", request.model_name)
        if request.error is not None:
            span.set_attribute("error.type", request.error.reason)
        if request.usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", request.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", request.usage.completion_tokens)
        if request.timings is not None:
            for part in PARTS:
                name = f"{part}_us"
                span.set_attribute(f"pagewire.{name}", getattr(request.timings, name))
        span.end()

    def _add_times(self, watch: Stopwatch, span: Any) -> None:
        if watch.tokenize_s:
            began = watch.arrived + watch.model_wait_s
            self._tracing.add("tokenize", self.traceparent, began, began + watch.tokenize_s)
        if watch.first_token_at is not None:
            self._tracing.add_event(span, "first token", watch.first_token_at)
        for lost_at in watch.core_losses:
            self._tracing.add_event(span, "core lost", lost_at)
