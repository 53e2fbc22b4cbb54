"""HTTP/1 as clients and proxies send it."""

import asyncio
import re
from typing import Any

import pytest
from uvicorn.config import Config
from uvicorn.server import ServerState

from scheduler_service.frontend.http.connection import Connection
from tests.support.frontends import eventually
from tests.support.http_frontends import (
    HttpServed,
    exchange,
    http_post,
    http_served,
    none_open,
    raw_connection,
)
from tests.support.tokenizers import letters


class FakeTransport(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = b""
        self.num_writes = 0
        self._is_closing = False

    def write(self, data: Any) -> None:
        self.written += data
        self.num_writes += 1

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        self._is_closing = True

    abort = close

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class Exchange:
    """A connection whose bytes a test chooses, and what the application sees of them."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bytes]] = []
        """Method, path and body of every request."""
        self.headers: list[dict[bytes, bytes]] = []
        self.transport = FakeTransport()
        self.was_closed = False
        self.before_body: asyncio.Event | None = None
        """What the application awaits between the head and the body of its answers."""
        self._state = ServerState()
        self._connection = Connection(
            Config(self._app, interface="asgi3", lifespan="off", ws="none", log_config=None),
            self._state,
            {},
            max_connections=None,
            is_leaving=asyncio.Event(),
        )
        self._connection.connection_made(self.transport)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body, message = b"", {"more_body": True}
        while message["more_body"]:
            message = await receive()
            body += message["body"]
        self.seen.append((scope["method"], scope["path"], body))
        self.headers.append(dict(scope["headers"]))
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.before_body is not None:
            await self.before_body.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async def send(self, *pieces: bytes) -> None:
        """Receive the pieces one by one, and answer the requests in them."""
        for piece in pieces:
            self._connection.data_received(piece)
        while self._state.tasks:
            await asyncio.gather(*self._state.tasks)
            # From Python 3.12 on, what is done is returned without a turn of the loop, in which
            # the connection forgets its tasks.
            await asyncio.sleep(0)
        self.was_closed = self.transport.is_closing()
        self._connection.connection_lost(None)


H2C = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQ\r\n"
OFFERS = {
    "h2c": H2C + b"Upgrade: h2c\r\n",
    "h2c, any order and case": b"upgrade: H2C\r\nconnection: http2-settings ,UPGRADE\r\n",
    "websocket": b"Upgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
    b"Sec-WebSocket-Key: x3JJHMbDL1EzLkh9GBhXDw==\r\nSec-WebSocket-Version: 13\r\n",
    "TLS": b"Upgrade: TLS/1.0, HTTP/1.1\r\nConnection: Upgrade\r\n",
    "two headers": b"Upgrade: h2c\r\nUpgrade: IRC/6.9\r\nConnection: Upgrade\r\nConnection: x\r\n",
}
BODIES = {
    "length": b"Content-Length: 5\r\n\r\nhello",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;a=b\r\nllo\r\n0\r\n\r\n",
    "trailers": b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nA: b\r\n\r\n",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_offer_to_upgrade_is_ignored_wherever_the_bytes_are_cut(
    offer: bytes, body: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    request = b"POST /a?b=c HTTP/1.1\r\nHost: a\r\nX: y\r\n" + offer + body
    cuts = [[request[:at], request[at:]] for at in range(1, len(request))]
    bytewise = [request[at : at + 1] for at in range(len(request))]
    for pieces in ([request], [request + request], bytewise, *cuts):
        there = Exchange()
        await there.send(*pieces)
        assert set(there.seen) == {("POST", "/a", b"hello")}
        assert len(there.seen) == b"".join(pieces).count(b"POST")
        for headers in there.headers:
            assert headers.keys().isdisjoint({b"upgrade", b"http2-settings"})
            assert headers[b"x"] == b"y"
            assert b"upgrade" not in headers[b"connection"].lower()
        assert not there.was_closed
    assert not caplog.messages


async def test_an_answer_is_one_write_and_a_head_waits_for_nothing() -> None:
    there = Exchange()
    await there.send(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n" * 3)
    assert there.transport.written.endswith(b"\r\n\r\nok")
    assert there.transport.num_writes == 3
    there = Exchange()
    there.before_body = asyncio.Event()
    sending = asyncio.create_task(there.send(b"GET /a HTTP/1.1\r\nHost: a\r\n\r\n"))
    await eventually(lambda: there.transport.written.endswith(b"\r\n\r\n"))
    there.before_body.set()
    await sending
    assert there.transport.written.endswith(b"\r\n\r\nok")


async def test_offers_that_are_sent_ahead_do_not_nest() -> None:
    there = Exchange()
    await there.send(
        b"GET /a HTTP/1.1\r\nHost: a\r\nUpgrade: b\r\nConnection: Upgrade\r\n\r\n" * 2000
    )
    assert there.seen == [("GET", "/a", b"")] * 2000


async def test_an_offer_that_also_asks_to_close_is_answered_and_closed() -> None:
    there = Exchange()
    await there.send(
        b"GET /a HTTP/1.1\r\nHost: a\r\nUpgrade: b\r\nConnection: Upgrade, close\r\n\r\n"
    )
    assert there.seen == [("GET", "/a", b"")]
    assert b"connection: close" in there.transport.written
    assert there.was_closed


async def test_a_request_to_connect_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    there = Exchange()
    await there.send(b"CONNECT a.example:443 HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\n\r\n")
    assert not there.seen
    assert there.transport.written.startswith(b"HTTP/1.1 400")
    assert there.was_closed


WISH, STREAM = b'{"prompt": "hello"}', b'{"prompt": "hello", "stream": true}'


def request_1_0(body: bytes, *headers: bytes) -> bytes:
    lines = [b"POST /v1/completions HTTP/1.0", b"Content-Type: application/json", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""]) + body


@pytest.mark.parametrize("version", [b"1.0", b"0.9"])
@pytest.mark.parametrize("headers", [[], [b"Connection: keep-alive"], [b"Expect: 100-continue"]])
async def test_a_stream_over_http_1_0_has_no_chunk_sizes_and_ends_with_the_connection(
    served: HttpServed, version: bytes, headers: list[bytes]
) -> None:
    request = request_1_0(STREAM, *headers).replace(b"HTTP/1.0", b"HTTP/" + version)
    answer = asyncio.create_task(exchange(served.frontend, request))
    await (await served.core.next_request()).complete(letters("ok"))
    head, _, body = (await answer).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert body.startswith(b'data: {"id"')
    assert body.endswith(b"data: [DONE]\n\n")
    assert all(event.startswith(b"data: ") for event in body.split(b"\n\n")[:-1])


async def test_a_connection_of_http_1_0_is_kept_if_the_client_asks_for_it(
    served: HttpServed,
) -> None:
    kept = request_1_0(WISH, b"Connection: keep-alive")
    answers = asyncio.create_task(exchange(served.frontend, kept + kept + request_1_0(WISH)))
    for _ in range(3):
        await (await served.core.next_request()).complete(letters("ok"))
    told = await answers
    assert re.findall(rb"connection: [a-z-]+", told) == [
        *[b"connection: keep-alive"] * 2,
        b"connection: close",
    ]
    assert told.count(b'"text":"ok"') == 3


async def test_http_1_0_knows_no_chunks_so_what_follows_them_is_not_another_request(
    served: HttpServed,
) -> None:
    head = (
        b"POST /tokenize HTTP/1.0\r\nConnection: keep-alive\r\nContent-Type: application/json\r\n"
    )
    body = b'Transfer-Encoding: chunked\r\n\r\nf\r\n{"prompt": "a"}\r\n0\r\n\r\n'
    told = await exchange(served.frontend, head + body + b"GET /health HTTP/1.0\r\n\r\n")
    assert told.count(b"HTTP/1.1") == 1
    assert b"connection: close" in told


@pytest.mark.parametrize(
    "request_line", [b"GET /health HTTP/1.0", b"HEAD /health HTTP/1.0", b"GET / HTTP/1.0"]
)
async def test_http_1_0_needs_no_host(served: HttpServed, request_line: bytes) -> None:
    """HAProxy's checks have none by default."""
    told = await exchange(served.frontend, request_line + b"\r\n\r\n")
    assert told.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("hosts", "status"), [([b"a.example"], 403), ([b"localhost"], 200), ([b"localhost"] * 2, 400)]
)
async def test_a_host_counts_over_http_1_0_too(
    served: HttpServed, hosts: list[bytes], status: int
) -> None:
    lines = [b"GET /health HTTP/1.0", *(b"Host: " + host for host in hosts), b"", b""]
    told = await exchange(served.frontend, b"\r\n".join(lines))
    assert told.startswith(b"HTTP/1.1 %d" % status)


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("body", [WISH, STREAM])
async def test_a_client_that_half_closes_after_its_request_gets_the_answer(
    served: HttpServed, body: bytes, version: bytes
) -> None:
    request = http_post("/v1/completions", body).replace(b"HTTP/1.1", b"HTTP/" + version)
    answer = asyncio.create_task(exchange(served.frontend, request, half_close=True))
    at_core = await served.core.next_request()
    await at_core.accept()
    await at_core.complete(letters("ok"))
    told = await answer
    assert told.startswith(b"HTTP/1.1 200 OK\r\n")
    assert told.count(b"HTTP/1.1") == 1
    assert b"connection: close" in told.partition(b"\r\n\r\n")[0]
    assert b'"text":"ok"' in told


async def test_a_client_that_half_closes_within_a_stream_gets_the_rest(served: HttpServed) -> None:
    async with raw_connection(served.frontend) as (reader, writer):
        writer.write(http_post("/v1/completions", STREAM))
        at_core = await served.core.next_request()
        await at_core.accept()
        await reader.readuntil(b"\r\n\r\n")
        writer.write_eof()
        assert await reader.readexactly(1) == b"0"  # of the next chunk's size
        await at_core.complete(letters("ok"))
        body = b"0" + await reader.read()
    content = b""
    while size := int(body[: body.index(b"\r\n")], 16):
        chunk = body[body.index(b"\r\n") + 2 :]
        content, body = content + chunk[:size], chunk[size + 2 :]
    assert content.startswith(b"data: {")
    assert content.endswith(b"data: [DONE]\n\n")


async def test_all_requests_that_were_sent_before_a_half_close_are_answered(
    served: HttpServed,
) -> None:
    requests = (
        http_post("/v1/completions", WISH) * 2 + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    )
    answer = asyncio.create_task(exchange(served.frontend, requests, half_close=True))
    for _ in range(2):
        await (await served.core.next_request()).complete(letters("ok"))
    told = await answer
    assert told.count(b"HTTP/1.1 200 OK") == 3
    assert told.count(b'"text":"ok"') == 2


@pytest.mark.parametrize("body", [WISH, STREAM])
@pytest.mark.parametrize("is_begun", [False, True])
async def test_the_request_of_a_client_that_goes_away_is_cancelled(
    served: HttpServed, body: bytes, is_begun: bool
) -> None:
    async with raw_connection(served.frontend) as (reader, writer):
        writer.write(http_post("/v1/completions", body))
        at_core = await served.core.next_request()
        if is_begun:
            await at_core.accept()
        if is_begun and body == STREAM:
            await at_core.send_tokens(letters("o"))
            await reader.readuntil(b"\n\n")
    await at_core.cancelled()
    await none_open(served.frontend)


async def test_a_client_that_goes_away_has_its_request_cancelled_though_it_sent_another() -> None:
    """What was sent ahead is not read yet, so only a write shows that the client has gone."""
    async with http_served(sse_keep_alive_s=0.05) as served:
        async with raw_connection(served.frontend) as (reader, writer):
            writer.write(http_post("/v1/completions", STREAM) * 2)
            at_core = await served.core.next_request()
            await at_core.accept()
            await reader.readuntil(b"\n\n")
        await at_core.cancelled()
        await none_open(served.frontend)
        assert len(served.core.requests) == 1


@pytest.mark.parametrize(
    "request_",
    [b"", b"GET /hea", b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"],
)
async def test_half_a_request_before_a_half_close_is_not_answered(
    served: HttpServed, request_: bytes
) -> None:
    assert await exchange(served.frontend, request_, half_close=True) == b""
    await eventually(lambda: len(served.frontend.requests) == 0)
