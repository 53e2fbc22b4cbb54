"""Repeated health checks of a service that is starting."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pagewire_cli.local.health import serving_checks
from tests.support.waiting import wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def listening(address: str, servicer: health.HealthServicer) -> Iterator[None]:
    """A server at this address."""
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()


def test_checks_follow_a_service_from_before_it_listens_to_after_its_end() -> None:
    servicer = health.HealthServicer()
    servicer.set("", NOT_SERVING)
    # Not tmp_path: the path of a unix socket is limited to some hundred characters.
    with TemporaryDirectory(prefix="pw-") as folder:
        address = f"unix:{Path(folder) / 'health.sock'}"
        with serving_checks(address, interval_s=0.01) as is_serving:
            assert not is_serving()
            with listening(address, servicer):
                assert not is_serving()
                servicer.set("", SERVING)
                wait_until(is_serving, "the checks reach it")
                servicer.set("", NOT_SERVING)
                assert not is_serving()
                servicer.set("", SERVING)
                assert is_serving()
            assert not is_serving()
