"""The caller's span goes along with its requests, where the caller uses OpenTelemetry."""

import sys


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """What tells a frontend of the span that is current now; nothing without OpenTelemetry, which
    is never imported for it."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
