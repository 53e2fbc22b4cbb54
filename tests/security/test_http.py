"""HTTP by TLS, with keys, and with limits on what a connection may cost."""

import asyncio
import contextlib
import re
import socket
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler_service.frontend.http import connection, request_body, server
from scheduler_service.frontend.server import Frontend
from service_common.tls import TlsFiles
from tests.support.certificates import Authority, Issued
from tests.support.fake_core import FakeCore
from tests.support.http_frontends import (
    exchange,
    http_frontend,
    http_post,
    http_served,
    none_open,
    raw_connection,
)
from tests.support.tokenizers import letters

KEY = "pw-" + "k" * 40


def client(frontend: Frontend, ca: Path, issued: Issued | None = None) -> httpx.AsyncClient:
    assert frontend.http is not None
    context = ssl.create_default_context(cafile=ca)
    if issued is not None:
        context.load_cert_chain(issued.cert, issued.key)
    url = f"https://{frontend.http.address}"
    return httpx.AsyncClient(base_url=url, verify=context, timeout=60, trust_env=False)


async def test_http_speaks_tls_and_follows_the_certificate_on_disk(tmp_path: Path) -> None:
    one, two = Authority(tmp_path, "one"), Authority(tmp_path, "two")
    issued = one.issue("public", "127.0.0.1")
    tls = TlsFiles(cert=issued.cert, key=issued.key)
    async with FakeCore() as core, http_frontend(core.address, tls=tls) as frontend:
        async with client(frontend, one.cert) as https:
            await https.get("/health")
        later = two.issue("later", "127.0.0.1")
        for file, content in ((issued.key, later.key), (issued.cert, later.cert)):
            copy(content, file)
        async with client(frontend, two.cert) as https:
            await https.get("/health")
        async with client(frontend, one.cert) as https:
            with pytest.raises(httpx.ConnectError):
                await https.get("/health")


def copy(content: Path, file: Path) -> None:
    file.write_bytes(content.read_bytes())


async def test_http_asks_for_certificates_where_clients_must_have_them(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    issued = ours.issue("public", "127.0.0.1")
    tls = TlsFiles(cert=issued.cert, key=issued.key, ca=ours.cert)
    async with FakeCore() as core, http_frontend(core.address, tls=tls) as frontend:
        async with client(frontend, ours.cert, ours.issue("friend", "friend")) as https:
            await https.get("/health")
        for stranger in (None, theirs.issue("stranger", "stranger")):
            async with client(frontend, ours.cert, stranger) as https:
                with pytest.raises(httpx.TransportError):
                    await https.get("/health")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_whom_http_lets_in_follows_the_authority_on_disk(
    tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Nor does a session that was begun before get a client of the former authority in."""
    ours, later = Authority(tmp_path, "ours"), Authority(tmp_path, "later")
    issued = ours.issue("public", "127.0.0.1")
    ca = tmp_path / "clients.pem"
    copy(ours.cert, ca)
    tls = TlsFiles(cert=issued.cert, key=issued.key, ca=ca)
    former = client_context(ours.cert, ours.issue("former", "former"), version)
    newer = client_context(ours.cert, later.issue("newer", "newer"), version)
    async with FakeCore() as core, http_frontend(core.address, tls=tls) as frontend:
        assert frontend.http is not None
        address = frontend.http.address
        session = await asyncio.to_thread(get_health, address, former)
        await is_cut_off(address, newer)
        copy(later.cert, ca)
        await asyncio.to_thread(get_health, address, newer)
        await is_cut_off(address, former)
        await is_cut_off(address, former, session)


async def is_cut_off(address: str, *shown: Any) -> None:
    """With TLS 1.3 a client hears of it only when it reads."""
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.to_thread(get_health, address, *shown)


def client_context(ca: Path, issued: Issued, version: ssl.TLSVersion) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=ca)
    context.load_cert_chain(issued.cert, issued.key)
    context.minimum_version = context.maximum_version = version
    return context


def get_health(
    address: str, context: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> ssl.SSLSession | None:
    """The session after an answer. Raises OSError unless there is one."""
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname=host, session=session) as secured,
    ):
        secured.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        if not secured.recv(1):
            raise ConnectionError("closed without an answer")
        with contextlib.suppress(OSError):  # a session that does not end in order cannot be resumed
            secured.unwrap()
        return secured.session


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_http_asks_for_the_same_keys(header: str) -> None:
    async with http_served(api_key=[KEY]) as served:
        for path in ("/v1/models", "/nowhere"):
            assert (await served.client.get(path)).status_code == 401
            value = f"Bearer {KEY}" if header == "authorization" else KEY
            known = await served.client.get(path, headers={header: value})
            assert known.status_code in (200, 404)
        assert (await served.client.get("/health")).status_code == 200


async def test_the_document_tells_where_a_key_is_asked_for() -> None:
    async with http_served(api_key=[KEY]) as served:
        document = (await served.client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            for method, operation in operations.items():
                answer = await served.client.request(method, path)
                assert (answer.status_code == 401) == bool(operation["security"]), path
        (wanted,) = document["paths"]["/v1/models"]["get"]["security"]
        schemes = document["components"]["securitySchemes"]
        assert [schemes[name]["scheme"] for name in wanted] == ["bearer"]
    async with http_served() as served:
        assert "securitySchemes" not in (await served.client.get("/openapi.json")).text


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "0.0.0.0:0"])
async def test_who_listens_to_other_machines_unguarded_says_so(
    listen: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with FakeCore() as core, http_frontend(core.address, http=listen):
        pass
    told = [line for line in caplog.messages if "listening to other machines" in line]
    assert len([line for line in told if f"address={listen[:-1]}" in line]) == (
        0 if listen.startswith("127") else 2
    )


async def raw(frontend: Frontend, data: bytes) -> bytes:
    """What a client gets that sends this and waits; nothing of a connection that was reset."""
    try:
        return await exchange(frontend, data)
    except ConnectionResetError:
        return b""


SLOW = [b"", b"GET /health HTTP/1.1\r\nhost: localhost\r\nx-", b"G"]


@pytest.mark.parametrize("data", SLOW)
async def test_a_head_that_does_not_come_in_time_costs_its_sender_the_connection(
    data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    async with http_served() as served:
        assert await raw(served.frontend, data) == b""


@pytest.mark.parametrize("data", [b"", b"\x16\x03\x01\x02", b"GET / HTTP/1.1\r\n\r\n"])
async def test_a_handshake_that_does_not_come_in_time_costs_its_sender_the_connection(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_TIMEOUT_S", 0.2)
    authority = Authority(tmp_path, "authority")
    issued = authority.issue("public", "127.0.0.1")
    tls = TlsFiles(cert=issued.cert, key=issued.key)
    async with FakeCore() as core, http_frontend(core.address, tls=tls) as frontend:
        async with client(frontend, authority.cert) as https:
            await https.get("/health")  # it has started
        assert b"HTTP" not in await raw(frontend, data)


async def test_a_head_without_end_costs_its_sender_the_connection() -> None:
    async with http_served() as served:
        head = b"GET /health HTTP/1.1\r\n" + b"x: " + b"y" * 2 * connection.MAX_HEAD_BYTES
        assert await raw(served.frontend, head) == b""
        assert (await served.client.get("/health")).status_code == 200


async def test_a_head_without_end_that_is_sent_ahead_costs_its_sender_the_connection() -> None:
    """While the request before it is being answered."""
    async with http_served() as served:
        async with raw_connection(served.frontend) as (_, writer):
            writer.write(http_post("/v1/completions", b'{"prompt": "hello", "stream": true}'))
            await (await served.core.next_request()).accept()
            writer.write(b"GET /health HTTP/1.1\r\nx: " + b"y" * 2 * connection.MAX_HEAD_BYTES)
            await none_open(served.frontend)
        assert (await served.client.get("/health")).status_code == 200


async def test_requests_that_are_sent_ahead_are_answered_in_their_order() -> None:
    text = b"hello " * connection.MAX_HEAD_BYTES
    ahead = http_post("/tokenize", b'{"prompt": "%b"}' % text)
    last = http_post("/tokenize", b'{"prompt": "a"}', "connection: close")
    async with http_served() as served:
        first = http_post("/v1/completions", b'{"prompt": "hello"}')
        answers = asyncio.create_task(raw(served.frontend, first + ahead + ahead + last))
        await (await served.core.next_request()).complete(letters("ok"))
        told = await answers
    assert told.count(b"HTTP/1.1 200") == 4
    counts = re.findall(rb'"text":"ok"|"count":(\d+)', told)
    assert [int(count or 0) > 1000 for count in counts] == [False, True, True, False]


AMBIGUOUS = [
    b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"content-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
    b"content-length: 2, 2\r\n\r\n{}",
    b"content-length: +2\r\n\r\n{}",
    b"content-length: 0x2\r\n\r\n{}",
    b"content-length : 2\r\n\r\n{}",
    b"content-length: 2\r\n 9\r\n\r\n{}",
    b"transfer-encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding: xchunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding : chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n2 \r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n-2\r\n{}\r\n0\r\n\r\n",
    b"transfer-encoding: chunked\r\n\r\n2\n{}\n0\n\n",
]
"""Heads and bodies whose end two servers may find in different places."""


async def test_what_follows_a_body_of_uncertain_length_is_not_another_request() -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    hidden = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with http_served() as served:
        for rest in AMBIGUOUS:
            for offer in (b"", b"connection: upgrade\r\nupgrade: h2c\r\n"):
                told = await raw(served.frontend, head + offer + rest + hidden)
                assert re.findall(rb"HTTP/1.1 (\d+)", told) in ([], [b"400"]), rest


TRAILERS = [b"a: b\r\n" * connection.MAX_HEAD_BYTES, b"a: " + b"b" * 4 * connection.MAX_HEAD_BYTES]


@pytest.mark.parametrize("trailers", TRAILERS)
async def test_trailers_without_end_cost_their_sender_the_connection(
    trailers: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_PUBLIC_MESSAGE_BYTES", connection.MAX_HEAD_BYTES)
    async with http_served() as served:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"transfer-encoding: chunked\r\n\r\n"
        assert await raw(served.frontend, head + b"2\r\n{}\r\n0\r\n" + trailers) == b""
        assert (await served.client.get("/health")).status_code == 200


async def test_a_head_behind_a_refused_body_may_be_no_longer_than_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 600)
    async with (
        http_served(api_key=[KEY]) as served,
        raw_connection(served.frontend) as (reader, writer),
    ):
        head, body = http_post("/v1/completions", b"{}")[:-2], b"{}"
        for _ in range(2):
            writer.write(head)
            assert (await reader.readline()).startswith(b"HTTP/1.1 401")
            await reader.readuntil(b"}}")
            writer.write(body)
        writer.write(b"GET /health HTTP/1.1\r\nx: " + b"y" * 8 * connection.MAX_HEAD_BYTES)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


async def test_a_body_that_does_not_come_in_time_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(request_body, "BODY_TIMEOUT_S", 0.2)
    async with http_served() as served:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += b"content-type: application/json\r\n"
        answer = await raw(served.frontend, head + b"content-length: 100\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 408")
        assert len(served.frontend.requests) == 0


async def test_more_connections_than_allowed_are_closed() -> None:
    async with http_served(max_connections=2) as served:
        await served.client.get("/health")  # keeps one
        health = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        async with raw_connection(served.frontend):
            assert await raw(served.frontend, health) == b""
        assert (await served.client.get("/health")).status_code == 200


DEEP = "[" * 100_000
NESTED = "[" * 900 + "]" * 900
BODIES = [
    DEEP,
    NESTED,
    '{"model": "m", "prompt": ' + NESTED + "}",
    '{"model": "m", "messages": [{"role": "user", "content": ' + NESTED + "}]}",
    '{"model": "m", "messages": [], "chat_template_kwargs": {"a": ' + NESTED + "}}",
    '{"model": "m", "messages": [], "tools": [{"function": {"name": "f", "parameters": {"a": '
    + NESTED
    + "}}}]}",
    '{"model": "m", "messages": [], "response_format": {"type": "json_schema", "json_schema": '
    '{"name": "a", "schema": {"a": ' + NESTED + "}}}}",
    '{"model": "m", "prompt": "a", "max_tokens": ' + "9" * 5000 + "}",
    '{"model": "m", "prompt": "a", "temperature": 1e999}',
    '{"prompt": "\\ud800"}',
    '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    '{"model": "\\ud800", "prompt": "a"}',
    '{"model": "' + "m" * 100_000 + '", "prompt": "a"}',
    '{"model": "' + "m" * 100_000 + '", "messages": [{"role": "user", "content": "a"}]}',
    '{"prompt": "a", "' + "x" * 100_000 + '": 1}',
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_nested_or_long_beyond_sense_is_refused(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with http_served() as served:
        for body in BODIES:
            answer = await served.client.post(
                path, content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code in (400, 404), (body[:100], answer.text[:300])
            assert len(answer.content) < 4096
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
