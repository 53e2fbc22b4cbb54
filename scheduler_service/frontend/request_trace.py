"""One request's span at its frontend, whose parts core and worker add theirs to."""

from typing import TYPE_CHECKING, Any

from scheduler_service.frontend.timings import PARTS, Stopwatch
from service_common.metadata import TRACEPARENT
from service_common.tracing import Tracing

if TYPE_CHECKING:
    from scheduler_service.frontend.output.request_stream import RequestStream


GOOD_ENDS = ("ok", "cancelled")
"""Outcomes that are nobody's failure."""


class RequestTrace:
    """From the request's arrival to its end, under its client's span where it brings one."""

    def __init__(self, tracing: Tracing, stream: "RequestStream") -> None:
        self._tracing = tracing
        self._span = tracing.start(
            "pagewire.generate",
            TRACEPARENT.get(),
            stream.stopwatch.arrived,
            {"pagewire.request_id": stream.request_id, "pagewire.tenant": stream.tenant},
        )
        self.traceparent = tracing.traceparent_of(self._span)
        """For the core; empty if the trace is not recorded."""

    def end(self, stream: "RequestStream", outcome: str) -> None:
        """The request has ended, one way or another."""
        if not self.traceparent:
            return
        span = self._span
        self._tell_times(stream.stopwatch, span)
        span.set_attribute("pagewire.outcome", outcome)
        if outcome not in GOOD_ENDS:
            self._tracing.mark_failed(span)
        span.set_attribute("pagewire.num_worker_losses", stream.num_worker_losses)
        if stream.handle:  # it was settled
            span.set_attribute("gen_ai.request.model", stream.model_name)
        if stream.error is not None:
            span.set_attribute("error.type", stream.error.reason)
        if stream.usage is not None:
            span.set_attribute("gen_ai.usage.input_tokens", stream.usage.prompt_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", stream.usage.completion_tokens)
        if stream.timings is not None:
            for part in PARTS:
                name = f"{part}_us"
                span.set_attribute(f"pagewire.{name}", getattr(stream.timings, name))
        span.end()

    def _tell_times(self, watch: Stopwatch, span: Any) -> None:
        if watch.tokenize_s:
            began = watch.arrived + watch.model_wait_s
            self._tracing.add("tokenize", self.traceparent, began, began + watch.tokenize_s)
        if watch.first_token_at is not None:
            self._tracing.add_event(span, "first token", watch.first_token_at)
        for lost_at in watch.core_losses:
            self._tracing.add_event(span, "core lost", lost_at)
