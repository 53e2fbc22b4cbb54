"""What one caller can make a frontend hold is bounded, and nobody else notices."""

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc
import pytest

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import Client, SamplingParams
from scheduler_service.frontend import config
from scheduler_service.frontend.server import Frontend
from service_common import grpc_options, interceptors
from tests.support.fake_core import FakeCore
from tests.support.frontends import (
    client_of,
    error_info,
    error_of,
    generate_request,
    model_ready,
    read_all,
    running_frontend,
)
from tests.support.simulated_services import simulated_services

NUM_IDLE = 10_000
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""With which a connection becomes one of HTTP/2's: a client's first words and its settings."""


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[FakeCore, Frontend, Any]]:
    async with (
        FakeCore() as core,
        running_frontend(core.address, **settings) as frontend,
        client_of(frontend, ("grpc.max_send_message_length", -1)) as client,
    ):
        await model_ready(frontend)
        yield core, frontend, client


async def still_serves(core: FakeCore, client: Any) -> None:
    call = client.Generate(generate_request())
    request = await core.next_request()
    await request.complete([5])
    await read_all(call)


def connect(frontend: Frontend) -> socket.socket:
    host, _, port = frontend.runner.address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=30)
    connection.setblocking(False)
    return connection


async def closed_by_peer(connection: socket.socket) -> bool:
    """Wait until the other side has closed it."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(30):
            while await loop.sock_recv(connection, 4096):
                pass
    except ConnectionResetError:
        pass
    return True


async def test_a_message_that_is_too_long_is_refused() -> None:
    async with served() as (core, frontend, client):
        text = "x" * (config.MAX_PUBLIC_MESSAGE_BYTES + 1)
        error = await error_of(client.Generate(generate_request(text)))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(frontend.requests) == 0
        await still_serves(core, client)


async def test_metadata_that_is_too_long_is_refused() -> None:
    async with served() as (core, _, client):
        metadata = (("x-much", "y" * 2 * grpc_options.MAX_METADATA_BYTES),)
        error = await error_of(client.GetModel(pb.GetModelRequest(), metadata=metadata))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        await still_serves(core, client)


@pytest.mark.parametrize("rpc", ["Generate", "GenerateMany", "GetModel"])
async def test_bytes_that_are_no_message_are_refused(rpc: str) -> None:
    async with served() as (core, frontend, client):
        channel = grpc.aio.insecure_channel(frontend.runner.address)
        async with channel:
            call = channel.stream_stream(f"/pagewire.v1.InferenceService/{rpc}")()
            await call.write(b"\xff" * 100)
            assert (await error_of(call)).code() == grpc.StatusCode.INVALID_ARGUMENT
        await still_serves(core, client)


@pytest.mark.parametrize("rpc", ["Generate", "GetModel"])
async def test_a_call_that_never_says_what_it_wants_ends(
    rpc: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptors, "REQUEST_TIMEOUT_S", 0.1)
    async with served() as (core, frontend, client):
        async with grpc.aio.insecure_channel(frontend.runner.address) as channel:
            error = await error_of(channel.stream_stream(f"/pagewire.v1.InferenceService/{rpc}")())
            assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert error_info(error).reason == "REQUEST_TOO_SLOW"
            nothing = channel.stream_stream(f"/pagewire.v1.InferenceService/{rpc}")()
            await nothing.done_writing()
            assert (await error_of(nothing)).code() == grpc.StatusCode.INVALID_ARGUMENT
        await still_serves(core, client)


async def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_options, "HANDSHAKE_TIMEOUT_MS", 200)
    async with served() as (core, frontend, client):
        for said in (b"", PREFACE[:10]):
            with closing(connect(frontend)) as connection:
                await asyncio.get_running_loop().sock_sendall(connection, said)
                assert await closed_by_peer(connection)
        await still_serves(core, client)


async def test_a_connection_without_calls_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MAX_PUBLIC_IDLE_MS", 200)
    async with served() as (core, frontend, client):
        with closing(connect(frontend)) as connection:
            await asyncio.get_running_loop().sock_sendall(connection, PREFACE)
            assert await closed_by_peer(connection)
        await still_serves(core, client)  # through a new connection, if necessary


async def test_more_connections_than_allowed_are_refused() -> None:
    async with served(max_connections=2) as (core, frontend, client):
        await still_serves(core, client)
        with closing(connect(frontend)) as second, closing(connect(frontend)) as third:
            await asyncio.get_running_loop().sock_sendall(second, PREFACE)
            assert await asyncio.get_running_loop().sock_recv(second, 1)
            assert await closed_by_peer(third)
        await still_serves(core, client)


async def test_calls_beyond_a_connections_share_wait_at_their_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "MAX_PUBLIC_STREAMS", 4)
    async with served() as (core, frontend, client):
        calls = [client.Generate(generate_request()) for _ in range(6)]
        reading = [asyncio.create_task(read_all(call)) for call in calls]
        requests = [await core.next_request() for _ in range(4)]
        assert len(frontend.requests) == 4
        await requests.pop().complete([5])
        requests.append(await core.next_request())
        for request in requests:
            await request.complete([5])
        await (await core.next_request()).complete([5])
        await asyncio.gather(*reading)


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NUM_IDLE + 500:
        pytest.skip(f"the system lets a process have {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ten_thousand_idle_connections_disturb_nobody(many_files: None) -> None:
    """The frontend is a process of its own, and so has its own limit of files."""
    idle: list[socket.socket] = []
    with simulated_services() as services:
        address = services.addresses[0]
        host, _, port = address.rpartition(":")
        try:
            for _ in range(NUM_IDLE):
                idle.append(socket.create_connection((host, int(port)), timeout=30))
                idle[-1].sendall(PREFACE)
                if len(idle) % 100 == 0:  # the server has taken them in so far
                    assert idle[-1].recv(1)
            with Client(address) as client:
                assert client.generate([5, 6], SamplingParams(max_tokens=3)).finished
        finally:
            for connection in idle:
                connection.close()
        with Client(address) as client:
            assert client.generate([5, 6], SamplingParams(max_tokens=3)).finished
