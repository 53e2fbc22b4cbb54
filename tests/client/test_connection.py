"""TLS, client certificates, and warnings about what is not encrypted."""

import asyncio
import logging
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire_client import NO_RETRIES, AsyncClient, SamplingParams, TlsOptions, errors
from pagewire_client.connection import ConnectionOptions, connection_options
from tests.support.fake_frontend import FakeFrontend

ONE = SamplingParams(max_tokens=1)


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for `name` and its key, as PEM files."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    how = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    name_fields = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", *how.split(), *name_fields, *files], check=True, capture_output=True)
    return certificate, key


@pytest.fixture(scope="module")
def server_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "localhost")


@pytest.fixture(scope="module")
def client_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "somebody")


def server_credentials(
    pair: tuple[Path, Path], client_root: Path | None = None
) -> grpc.ServerCredentials:
    certificate, key = pair
    return grpc.ssl_server_credentials(
        [(key.read_bytes(), certificate.read_bytes())],
        root_certificates=client_root.read_bytes() if client_root else None,
        require_client_auth=client_root is not None,
    )


def test_a_server_is_verified_by_the_given_root(
    make_client: Any, server_pair: tuple[Path, Path]
) -> None:
    with FakeFrontend("localhost:0", server_credentials(server_pair)) as frontend:
        tls = TlsOptions(root_certificates=server_pair[0])
        assert make_client(frontend.address, tls=tls, api_key="t").generate("Hi", ONE).finished


def test_a_server_with_another_name_is_reached_by_naming_it(
    make_client: Any, server_pair: tuple[Path, Path]
) -> None:
    with FakeFrontend("127.0.0.1:0", server_credentials(server_pair)) as frontend:
        tls = TlsOptions(root_certificates=server_pair[0], server_name="localhost")
        assert make_client(frontend.address, tls=tls).generate("Hi", ONE).finished


def test_a_server_the_root_did_not_sign_is_refused(
    make_client: Any, server_pair: tuple[Path, Path], client_pair: tuple[Path, Path]
) -> None:
    with FakeFrontend("localhost:0", server_credentials(server_pair)) as frontend:
        tls = TlsOptions(root_certificates=client_pair[0])
        client = make_client(frontend.address, tls=tls, retry=NO_RETRIES)
        with pytest.raises(errors.Unavailable, match="no known authority has signed"):
            client.generate("Hi", ONE)


def test_a_server_without_tls_and_a_missing_file_are_named(
    make_client: Any, server_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    with FakeFrontend("localhost:0") as frontend:
        tls = TlsOptions(root_certificates=server_pair[0])
        client = make_client(frontend.address, tls=tls, retry=NO_RETRIES)
        with pytest.raises(errors.Unavailable, match="the server does not speak TLS"):
            client.generate("Hi", ONE)
        missing = TlsOptions(root_certificates=tmp_path / "no.pem")
        with pytest.raises(ValueError, match=r"cannot read .*no\.pem: No such file"):
            make_client(frontend.address, tls=missing).generate("Hi", ONE)


def test_a_server_with_tls_is_named_to_a_client_without(
    make_client: Any, server_pair: tuple[Path, Path]
) -> None:
    with FakeFrontend("localhost:0", server_credentials(server_pair)) as frontend:
        client = make_client(frontend.address, retry=NO_RETRIES)
        with pytest.raises(errors.Unavailable, match="it may expect TLS"):
            client.generate("Hi", ONE)


def test_a_client_proves_itself_with_a_certificate(
    make_client: Any, server_pair: tuple[Path, Path], client_pair: tuple[Path, Path]
) -> None:
    credentials = server_credentials(server_pair, client_root=client_pair[0])
    with FakeFrontend("localhost:0", credentials) as frontend:
        own = TlsOptions(
            root_certificates=server_pair[0],
            certificate_chain=client_pair[0],
            private_key=client_pair[1],
        )
        assert make_client(frontend.address, tls=own).generate("Hi", ONE).finished
        nobody = TlsOptions(root_certificates=server_pair[0])
        client = make_client(frontend.address, tls=nobody, retry=NO_RETRIES)
        with pytest.raises(errors.Unavailable):
            client.generate("Hi", ONE)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("", "holds no certificate; expected one in PEM, got an empty file"),
        ("hello", "holds no certificate; expected one in PEM, got something else"),
        ("-----BEGIN PRIVATE KEY-----", "holds no certificate; expected one in PEM, got a private"),
        ("\ufeff-----BEGIN CERTIFICATE-----", "begins with a byte order mark"),
        ("-----BEGIN CERTIFICATE-----", "holds no valid certificates"),
    ],
)
def test_a_file_of_authorities_that_holds_none_is_named(
    tmp_path: Path, content: str, fault: str
) -> None:
    path = tmp_path / "ca.pem"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=f"{path} {fault}"):
        TlsOptions(root_certificates=path).credentials()


def test_an_exchanged_or_a_wrong_key_is_named(
    server_pair: tuple[Path, Path], client_pair: tuple[Path, Path]
) -> None:
    (cert, key), (_, other_key) = server_pair, client_pair
    with pytest.raises(ValueError, match=f"{key} holds no certificate.*, got a private key"):
        TlsOptions(certificate_chain=key, private_key=cert).credentials()
    with pytest.raises(ValueError, match=f"{cert} and {other_key} are not a certificate and its"):
        TlsOptions(certificate_chain=cert, private_key=other_key).credentials()


def test_this_machine_is_reached_without_the_environments_proxy(
    make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with FakeFrontend("127.0.0.1:0") as frontend:
        client = make_client(frontend.address, retry=NO_RETRIES)
        assert client.generate("Hi", ONE).finished


def test_an_ipv6_host_without_brackets_is_refused() -> None:
    connection_options("[::1]:7600", None, None)
    with pytest.raises(ValueError, match=r"brackets, \[HOST\]:PORT, got '::1:7600'"):
        connection_options("::1:7600", None, None)


@pytest.mark.parametrize("api_key", ["ключ" * 5, "\ufeffkey", "key\x01"])
def test_a_key_that_cannot_be_sent_is_refused(api_key: str) -> None:
    with pytest.raises(ValueError, match="api_key: expected visible ASCII characters"):
        connection_options("127.0.0.1:7600", None, api_key)


def test_a_certificate_without_its_key_is_refused(client_pair: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match="certificate_chain, private_key: expected both"):
        TlsOptions(certificate_chain=client_pair[0])


@pytest.mark.parametrize(
    ("address", "is_warned"),
    [("example.org:7600", True), ("127.0.0.1:7600", False), ("unix:/x", False)],
)
def test_a_token_in_the_clear_is_warned_of(
    address: str, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        ConnectionOptions(addresses=(address,), api_key="secret")
    assert ("unencrypted" in caplog.text) == is_warned
    assert "secret" not in caplog.text


class FarServer:
    """Passes connections on, and what they send `delay_s` later, in either direction."""

    def __init__(self, target: str, delay_s: float) -> None:
        self._target = target
        self._delay_s = delay_s
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_connections(self) -> int:
        return len(self._tasks)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.create_task(self._connect(reader, writer)))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, _, port = self._target.rpartition(":")
        back, there = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(self._pass_on(reader, there), self._pass_on(back, writer))
        finally:
            there.close()
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await reader.read(65536):
            loop.call_later(self._delay_s, writer.write, data)


async def test_a_far_server_is_reached_by_one_connection(frontend: FakeFrontend) -> None:
    """gRPC waits `min_reconnect_backoff` for a connection, TLS and the first frame included."""
    far = FarServer(frontend.address, delay_s=0.3)
    async with far.listening() as address, AsyncClient(address) as client:
        assert (await client.generate("Hi")).finished
    assert far.num_connections == 1
