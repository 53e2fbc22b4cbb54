"""Spans of requests, exported over OTLP if configured; otherwise nothing is imported.

Spans are made when their times are known, most of them at a request's end: tracing costs nothing
per step or token.
"""

import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""OpenTelemetry's own variables: each of them enables export without a flag."""

CLOSE_S = 2.0
"""Time in which a service that ends exports its last spans."""

Attributes = Mapping[str, str | int | float | bool]
Event = tuple[str, float, Attributes]
"""An event's name, time on the monotonic clock, and attributes."""


class CannotTrace(Exception):
    """Tracing is configured, but OpenTelemetry is not installed."""


class Tracing:
    """Makes one service's spans and exports them in batches on a separate thread."""

    def __init__(
        self, service: str, version: str, endpoint: str | None, instance: str | None = None
    ) -> None:
        """`endpoint`: such as http://127.0.0.1:4317; None: from the environment. `instance`:
        which of several processes of the service this is.

        Raises CannotTrace.
        """
        try:
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise CannotTrace(
                f"otlp_endpoint: {error.name} is missing, install pagewire[tracing]"
            ) from error
        facts = {"service.name": f"pagewire-{service}", "service.version": version}
        if instance is not None:
            facts["service.instance.id"] = instance
        # The environment (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES) takes precedence.
        resource = Resource.create(facts).merge(OTELResourceDetector().detect())
        # Nothing waits at the process's exit: services call `close`.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("pagewire", version)
        self._contexts = TraceContextTextMapPropagator()

    def start(
        self, name: str, traceparent: str | None, start_s: float, attributes: Attributes
    ) -> Any:
        """Start a child span of `traceparent`, or a root span; call `end` on it. `start_s` is on
        the monotonic clock."""
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
        events: Iterable[Event] = (),
    ) -> str:
        """Record a complete child span of `traceparent`; returns its own `traceparent`."""
        span = self._tracer.start_span(
            name,
            self._contexts.extract({"traceparent": traceparent}),
            attributes=attributes,
            start_time=to_ns(start_s),
        )
        for event, when_s, more in events:
            span.add_event(event, more, to_ns(when_s))
        span.end(to_ns(end_s))
        return self.traceparent_of(span)

    def add_event(
        self, span: Any, name: str, when_s: float, attributes: Attributes | None = None
    ) -> None:
        """Add an event to a span of `start`."""
        span.add_event(name, attributes, to_ns(when_s))

    def mark_failed(self, span: Any) -> None:
        """Mark a span of `start` as failed."""
        from opentelemetry.trace import StatusCode

        span.set_status(StatusCode.ERROR)

    def end(self, span: Any, end_s: float) -> None:
        """End a span of `start`."""
        span.end(to_ns(end_s))

    def traceparent_of(self, span: Any) -> str:
        """The span's `traceparent`, for child spans; empty if it is not recorded."""
        from opentelemetry.trace import set_span_in_context

        carrier: dict[str, str] = {}
        if span.is_recording() or span.get_span_context().trace_flags.sampled:
            self._contexts.inject(carrier, set_span_in_context(span))
        return carrier.get("traceparent", "")

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Export the remaining spans. Those that the collector has not received after `timeout_s`
        are lost: one that is down would hold the end of every service for ten seconds and more."""
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(timeout_s)


def make_tracing(
    service: str, version: str, endpoint: str | None, instance: str | None = None
) -> Tracing | None:
    """None if neither a flag nor the environment names an endpoint. Raises CannotTrace."""
    if endpoint is None and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return None
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        # Without a scheme the exporter uses TLS, which a collector at this port seldom does.
        raise CannotTrace(
            f"otlp_endpoint: expected http://HOST:PORT or https://HOST:PORT, got {endpoint!r}"
        )
    return Tracing(service, version, endpoint, instance)


def to_ns(monotonic_s: float) -> int:
    """An instant of the monotonic clock as nanoseconds since the epoch."""
    return time.time_ns() - round((time.monotonic() - monotonic_s) * 1e9)
