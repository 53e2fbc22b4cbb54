"""Certificates of services."""

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from scheduler_service.frontend.config import FrontendConfig
from scheduler_service.frontend.server import make_frontend
from service_common.cluster import Cluster, ClusterConfig
from service_common.tls import TlsFiles, server_credentials
from tests.support.certificates import Authority


@pytest.mark.parametrize(
    ("begins", "days", "is_told"), [(-10, 1, False), (-10, -1, True), (1, 2, True)]
)
@pytest.mark.parametrize("use", ["a member's", "a frontend's"])
async def test_a_certificate_that_is_not_valid_now_is_told_at_start(
    use: str,
    begins: int,
    days: int,
    is_told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    authority = Authority(tmp_path, "authority")
    issued = authority.issue("own", "llm.example", begins=begins, days=days)
    issued.key.chmod(0o600)
    if use == "a member's":
        Cluster(ClusterConfig(ca=authority.cert, cert=issued.cert, key=issued.key))
    else:
        make_frontend(FrontendConfig(tls=TlsFiles(cert=issued.cert, key=issued.key)))
    told = [line for line in caplog.messages if line.startswith("certificate is not valid now")]
    assert len(told) == is_told
    for line in told:
        words = dict(word.split("=") for word in line.split()[5:])
        assert (words["file"], words["subject"]) == (str(issued.cert), "'llm.example'")
        now = datetime.now(UTC)
        for name, expected in (("not_before", begins), ("not_after", days)):
            distance = datetime.fromisoformat(words[name]) - now - timedelta(days=expected)
            assert abs(distance) < timedelta(minutes=10)


def test_a_key_of_another_certificate_is_an_error_that_names_both(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    one, other = authority.issue("one"), authority.issue("other")
    with pytest.raises(
        ValueError,
        match=f"^tls: {one.cert} and {other.key} are not a certificate and its key: .*MISMATCH",
    ):
        TlsFiles(cert=one.cert, key=other.key)


BROKEN_HANDSHAKES = """
import socket, sys, threading
from concurrent import futures
from pathlib import Path
import grpc
from service_common.tls import TlsFiles, server_credentials

names = dict(zip(("cert", "key", "ca"), map(Path, sys.argv[1:])))
server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_secure_port("127.0.0.1:0", server_credentials(TlsFiles(**names)))
server.start()

def begin_handshakes():
    for _ in range(4_000):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"\\x16\\x03\\x01")

threads = [threading.Thread(target=begin_handshakes) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
names["cert"].touch()  # new connections read it again, one by one
connection = socket.create_connection(("127.0.0.1", port))
server.stop(None).wait()
print("stopped")
"""


def test_connections_that_begin_at_once_do_not_end_the_process(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    own = authority.issue("own")
    command = [sys.executable, "-c", BROKEN_HANDSHAKES]
    command += map(str, (own.cert, own.key, authority.cert))
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_a_configuration_is_replaced_by_another_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda *args, **others: given.extend(args)
    )
    authority = Authority(tmp_path, "authority")
    own = authority.issue("own")
    server_credentials(TlsFiles(cert=own.cert, key=own.key))
    first, changed = given
    assert [changed(), changed()] == [None, None]
    authority.issue("own")
    second = changed()
    assert second not in (None, first)
    assert [changed(), changed()] == [None, None]
