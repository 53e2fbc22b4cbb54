"""What HTTP clients see of a frontend that stops."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from scheduler_service.frontend.http.server import bind, has_handshakes, ignore_handshakes
from scheduler_service.frontend.server import Frontend
from tests.support.fake_core import FakeCore
from tests.support.frontends import eventually, model_ready
from tests.support.http_frontends import (
    HttpServed,
    exchange,
    http_frontend,
    http_post,
    http_served,
    raw_connection,
)
from tests.support.tokenizers import letters

MODELS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
COMPLETION = http_post("/v1/completions", b'{"prompt": "hello"}')
STREAM = http_post("/v1/completions", b'{"prompt": "hello", "stream": true}')


@asynccontextmanager
async def stopping(served: HttpServed) -> AsyncIterator[None]:
    """Stop the frontend, whose end is awaited at last."""
    stop = asyncio.create_task(served.frontend.stop())
    await served.frontend.requests.capacity.is_draining.wait()
    yield
    await stop


@asynccontextmanager
async def connected() -> AsyncIterator[
    tuple[HttpServed, asyncio.StreamReader, asyncio.StreamWriter]
]:
    async with (
        http_served(grace_period_s=20) as served,
        raw_connection(served.frontend) as (reader, writer),
    ):
        yield served, reader, writer


async def answer_head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def test_it_listens_no_longer_while_its_streams_go_on() -> None:
    async with connected() as (served, reader, writer):
        writer.write(STREAM)
        request = await served.core.next_request()
        await request.accept()
        async with stopping(served):
            with pytest.raises(ConnectionRefusedError):
                await exchange(served.frontend, MODELS)
            await request.complete(letters("ok"))
            assert (await reader.read()).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_an_answer_that_begins_after_the_signal_says_that_it_is_the_last() -> None:
    async with connected() as (served, reader, writer):
        writer.write(COMPLETION)
        request = await served.core.next_request()
        async with stopping(served):
            await request.complete(letters("ok"))
            answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\nconnection: close\r\n" in answer
    assert b'"text":"ok"' in answer


@pytest.mark.parametrize("first", [b"", MODELS], ids=["new", "kept"])
async def test_a_request_on_a_connection_made_before_is_served(first: bytes) -> None:
    async with connected() as (served, reader, writer):
        writer.write(first)
        if first:
            head = await answer_head(reader)
            assert b"connection: close" not in head
            await reader.readuntil(b"]}")
        else:
            await eventually(lambda: served.frontend.http.num_connections == 1)  # type: ignore[union-attr]
        async with stopping(served):
            writer.write(COMPLETION)
            await (await served.core.next_request()).complete(letters("ok"))
            answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 OK")
    assert b"\r\nconnection: close\r\n" in answer


async def test_a_stream_that_had_begun_is_followed_by_one_more_answer() -> None:
    async with connected() as (served, reader, writer):
        writer.write(STREAM)
        request = await served.core.next_request()
        await request.accept()
        assert b"connection: close" not in await answer_head(reader)
        async with stopping(served):
            await request.complete(letters("ok"))
            await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.write(MODELS)
            assert b"connection: close" in await answer_head(reader)


async def test_health_says_that_it_stops_on_a_kept_connection() -> None:
    async with connected() as (served, reader, writer):
        writer.write(MODELS)
        await reader.readuntil(b"]}")
        async with stopping(served):
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await answer_head(reader)).startswith(b"HTTP/1.1 503")


async def test_what_comes_after_the_grace_period_is_refused() -> None:
    async with http_served() as served:
        await served.frontend.requests.drain(0, asyncio.sleep(0))
        refused = await served.client.post("/v1/completions", json={"prompt": "hello"})
        assert refused.status_code == 503
        assert "retry-after" in refused.headers


async def test_connections_that_wait_to_be_accepted_are_served_although_the_port_is_left() -> None:
    """Closing a listening socket resets the connections that wait there."""
    async with (
        FakeCore() as core,
        http_frontend(core.address, http_share_port=True, grace_period_s=20) as leaving,
        second_at_the_port(core, leaving) as staying,
    ):
        assert leaving.http is not None
        host, _, port = leaving.http.address.rpartition(":")
        # The loop does not run meanwhile, so none is accepted.
        waiting = [socket.create_connection((host, int(port))) for _ in range(64)]
        stop = asyncio.create_task(leaving.stop())
        answers = []
        for connection in waiting:
            reader, writer = await asyncio.open_connection(sock=connection)
            writer.write(MODELS)
            answers.append(await answer_head(reader))
            writer.close()
        await stop
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert 0 < sum(b"connection: close" in answer for answer in answers) < 64
        assert (await exchange(staying, MODELS, half_close=True)).startswith(b"HTTP/1.1 200")


def test_the_system_sends_new_connections_to_the_others_at_a_port_before_one_is_closed() -> None:
    (leaving,) = bind("127.0.0.1:0", share_port=True)
    (staying,) = bind(f"127.0.0.1:{leaving.getsockname()[1]}", share_port=True)
    clients = [socket.socket() for _ in range(64)]
    ignore_handshakes(leaving)
    for client in clients:
        client.setblocking(False)
        client.connect_ex(leaving.getsockname())
    with pytest.raises(BlockingIOError):
        leaving.accept()
    accepted, _ = staying.accept()
    for opened in (*clients, accepted, leaving, staying):
        opened.close()


def test_a_handshake_is_under_way_until_the_client_has_confirmed_it() -> None:
    only_syn = ((0x30, 0, 0, 13), (0x45, 1, 0, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
    (listening,) = bind("127.0.0.1:0", share_port=True)
    port = listening.getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):
        assert not has_handshakes(port)
    ignore_handshakes(listening, only_syn)
    with socket.create_connection(("127.0.0.1", port)):  # its confirmation is dropped
        assert has_handshakes(port)
    listening.close()


@asynccontextmanager
async def second_at_the_port(core: FakeCore, first: Frontend) -> AsyncIterator[Frontend]:
    """Another frontend at the first one's HTTP address; both serve."""
    assert first.http is not None
    async with http_frontend(core.address, http=first.http.address, http_share_port=True) as second:
        assert second.http is not None
        for frontend in (first, second):
            await model_ready(frontend)
        await eventually(lambda: second.http.is_started and first.http.is_started)  # type: ignore[union-attr]
        yield second
