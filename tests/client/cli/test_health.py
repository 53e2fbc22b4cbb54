"""`pagewire health`: the standard health protocol, of a whole server or of one service."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from typer.testing import CliRunner

from pagewire_cli.app import app
from tests.support.certificates import Authority
from tests.support.grpc_servers import grpc_server


@contextmanager
def server(credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """A server that lives, but has nothing to serve."""
    statuses = health_pb2.HealthCheckResponse
    servicer = health.HealthServicer()
    servicer.set("", statuses.NOT_SERVING)
    servicer.set("liveness", statuses.SERVING)
    add = partial(health_pb2_grpc.add_HealthServicer_to_server, servicer)
    with grpc_server(add, credentials) as address:
        yield address


@pytest.fixture
def address() -> Iterator[str]:
    with server() as address:
        yield address


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


def test_without_an_address_it_asks_at_that_of_all_commands(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_ADDRESS", address)
    run = CliRunner().invoke(app, ["health", "--service", "liveness"])
    assert (run.exit_code, run.output) == (0, "serving\n")
    monkeypatch.setenv("PAGEWIRE_ADDRESS", f"127.0.0.1:1,{address}")
    run = CliRunner().invoke(app, ["health"])
    assert run.exit_code == 1
    assert run.stderr == (
        f"error: ADDRESS: expected one of PAGEWIRE_ADDRESS, 127.0.0.1:1 or {address}\n"
    )


def test_a_timeout_of_ages_is_no_deadline(address: str) -> None:
    arguments = ["health", "--service", "liveness", "--timeout", "1e300", address]
    assert CliRunner().invoke(app, arguments).output == "serving\n"


@pytest.mark.parametrize("address", ["nonsense", "http://127.0.0.1:7600"])
def test_what_is_no_address_is_told_so(address: str) -> None:
    run = CliRunner().invoke(app, ["health", address])
    assert run.exit_code == 1
    assert "error: address: expected HOST:PORT or unix:PATH" in run.stderr


def test_a_service_with_tls_is_asked_with_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    issued = authority.issue("server", "127.0.0.1")
    pair = (issued.key.read_bytes(), issued.cert.read_bytes())
    roots = authority.cert.read_bytes()
    credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=True)
    client = ["--tls-ca", str(authority.cert), "--tls-cert", str(issued.cert)]
    client += ["--tls-key", str(issued.key), "--service", "liveness"]
    with server(credentials) as address:
        run = CliRunner().invoke(app, ["health", *client, address])
        assert (run.exit_code, run.output) == (0, "serving\n")
        run = CliRunner().invoke(app, ["health", "--service", "liveness", address])
        assert run.exit_code == 1
    run = CliRunner().invoke(app, ["health", "--tls-ca", "/nowhere.pem", address])
    assert run.exit_code == 1
    assert "/nowhere.pem" in run.stderr


def test_a_check_imports_no_other_command(address: str) -> None:
    script = (
        "import sys; sys.argv = ['pagewire', 'health', '--service', 'liveness', sys.argv[1]]\n"
        "from pagewire_cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'typer', 'rich', 'numpy', 'pagewire_client.client', 'pagewire_cli.app'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, address],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=30,
    )
    assert (done.stdout, done.stderr) == ("serving\n[]\n", "")


def test_the_exit_code_needs_nobody_who_reads_the_text(address: str) -> None:
    command = [sys.executable, "-m", "pagewire_cli", "health", "--service", "liveness", address]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            timeout=30,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
