"""`pagewire health`: the standard health protocol, of a whole server or of one service."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from pagewire_client.cli.app import app


@pytest.fixture
def address() -> Iterator[str]:
    """A server that lives, but has nothing to serve."""
    statuses = health_pb2.HealthCheckResponse
    servicer = health.HealthServicer()
    servicer.set("", statuses.NOT_SERVING)
    servicer.set("liveness", statuses.SERVING)
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        ([], 1, "not serving: it responds, but has nothing to serve (yet)\n"),
        (["--service", "liveness"], 0, "serving\n"),
        (["--service", "unheard-of"], 1, "not serving: it has no service 'unheard-of'\n"),
    ],
)
def test_the_exit_code_is_the_health(
    address: str, arguments: list[str], exit_code: int, words: str
) -> None:
    run = CliRunner().invoke(app, ["health", *arguments, address])
    assert (run.exit_code, run.output) == (exit_code, words)


@pytest.mark.parametrize(
    ("address", "where"),
    [("unix:/nowhere/at/all.sock", "unix:/nowhere/at/all.sock"), ("127.0.0.1:1", "127.0.0.1:1")],
)
def test_nobody_there_is_not_healthy(address: str, where: str) -> None:
    run = CliRunner().invoke(app, ["health", "--timeout", "0.5", address])
    assert run.exit_code == 1
    assert run.output.startswith(f"not serving: cannot connect to {where}: ")


def test_what_is_no_address_is_told_so() -> None:
    run = CliRunner().invoke(app, ["health", "nonsense"])
    assert run.exit_code == 1
    assert "address must be HOST:PORT or unix:PATH" in str(run.exception)
