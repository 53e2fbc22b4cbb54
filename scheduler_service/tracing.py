"""Spans of requests, exported over OTLP where that is asked for; otherwise nothing is imported.

Spans are made when their times are known, most of them at a request's end: that a trace is recorded
costs a step and a token nothing.
"""

import os
import time
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from scheduler_service.version import VERSION

TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The `traceparent` that the call brings, as W3C Trace Context writes it."""

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own: either has spans exported without a flag."""

Attributes = Mapping[str, str | int | float | bool]


class CannotTrace(Exception):
    """Spans are asked for, and OpenTelemetry is not installed."""


class Tracing:
    """Makes one service's spans and exports them, in batches and on a thread of its own."""

    def __init__(self, service: str, endpoint: str | None) -> None:
        """`endpoint`: such as http://127.0.0.1:4317; None: as the environment says.

        Raises CannotTrace.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise CannotTrace(
                f"otlp_endpoint: {error.name} is missing, install pagewire[tracing]"
            ) from error
        facts = {"service.name": f"pagewire-{service}", "service.version": VERSION}
        self._provider = TracerProvider(resource=Resource.create(facts))
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pagewire", VERSION)
        self._contexts = TraceContextTextMapPropagator()

    def start(
        self, name: str, traceparent: str | None, start_s: float, attributes: Attributes
    ) -> Any:
        """A span under that of `traceparent`, or the first of its trace; to be ended. `start_s` is
        on the monotonic clock."""
        from opentelemetry.trace import SpanKind

        parent = self._contexts.extract({"traceparent": traceparent or ""})
        return self._tracer.start_span(
            name, parent, SpanKind.SERVER, attributes, start_time=to_ns(start_s)
        )

    def add(
        self,
        name: str,
        traceparent: str,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
    ) -> str:
        """A whole span under that of `traceparent`; its own `traceparent`."""
        span = self._tracer.start_span(
            name,
            self._contexts.extract({"traceparent": traceparent}),
            attributes=attributes,
            start_time=to_ns(start_s),
        )
        span.end(to_ns(end_s))
        return self.traceparent_of(span)

    def traceparent_of(self, span: Any) -> str:
        """What others put their spans under; empty for one that is not recorded."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        if span.is_recording() or span.get_span_context().trace_flags.sampled:
            self._contexts.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def close(self) -> None:
        """Export what is left; waits for it, but not for long."""
        self._provider.shutdown()


def make_tracing(service: str, endpoint: str | None) -> Tracing | None:
    """None where neither a flag nor the environment names an endpoint. Raises CannotTrace."""
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    return Tracing(service, endpoint)


def to_ns(monotonic_s: float) -> int:
    """An instant of the monotonic clock as nanoseconds since the epoch."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
