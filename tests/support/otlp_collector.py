"""A collector of spans, as OpenTelemetry's exporters call it."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class CollectedEvent:
    """Something that happened within a span."""

    name: str
    time_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True)
class CollectedSpan:
    """One span, and the service that exported it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[CollectedEvent] = field(default_factory=list)
    is_error: bool = False
    instance: str = ""
    """`service.instance.id`, if the service reports one."""

    @property
    def event_names(self) -> list[str]:
        """In order."""
        return [event.name for event in self.events]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.endpoint = ""

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            facts = _attributes(resource.resource)
            for scope in resource.scope_spans:
                self.spans += [_collected(facts, span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, service: str, name: str) -> list[CollectedSpan]:
        """Spans of a service by their name."""
        return [span for span in self.spans if (span.service, span.name) == (service, name)]


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


def _collected(facts: dict[str, Any], span: Any) -> CollectedSpan:
    return CollectedSpan(
        service=facts["service.name"],
        instance=facts.get("service.instance.id", ""),
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span),
        events=[CollectedEvent(e.name, e.time_unix_nano, _attributes(e)) for e in span.events],
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
    )


def _attributes(of: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, str(pair.value.WhichOneof("value"))) for pair in of.attributes
    }
