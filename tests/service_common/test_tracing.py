"""Spans are exported, or lost; nothing waits for a collector."""

import logging
import socket
import threading
import time

import pytest

from service_common.tracing import CannotTrace, Tracing, make_tracing


def test_a_service_that_ends_leaves_a_silent_collector() -> None:
    # The export fails at some time after the test.
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter").disabled = True
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        tracing = Tracing("frontend", "1", f"http://127.0.0.1:{port}")
        tracing.add("span", "", time.monotonic(), time.monotonic())
        tracing.close(timeout_s=0.01)
        assert any(thread.name == "tracing" for thread in threading.enumerate())


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "collector", "grpc://collector:4317", ""])
def test_an_endpoint_without_its_scheme_is_refused(endpoint: str) -> None:
    with pytest.raises(CannotTrace, match="otlp_endpoint: expected http://HOST:PORT or https://"):
        make_tracing("frontend", "0", endpoint)
