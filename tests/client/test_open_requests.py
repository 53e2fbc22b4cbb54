"""A client has as many open requests as its connections carry; further ones wait in it."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from pagewire_client import AsyncClient, Client, RetryPolicy, SamplingParams, errors
from pagewire_client.connection import OpenRequests
from tests.support.fake_frontend import Break, Failure, FakeFrontend
from tests.support.waiting import until, wait_until

FIVE = SamplingParams(max_tokens=5)
LIMIT = 2


@pytest.fixture(autouse=True)
def few_requests_per_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenRequests, "per_connection", LIMIT)


def prompts_of(frontend: FakeFrontend) -> list[str]:
    return [request.text for request in frontend.requests]


@pytest.mark.parametrize("max_connections", [1, 2])
async def test_requests_beyond_the_limit_wait_in_order(
    frontend: FakeFrontend, max_connections: int
) -> None:
    num_open = LIMIT * max_connections
    prompts = [f"prompt {index}" for index in range(num_open + 3)]
    frontend.hold.clear()
    async with AsyncClient(frontend.address, max_connections=max_connections) as client:
        running = [asyncio.create_task(client.generate(prompt, FIVE)) for prompt in prompts]
        await until(lambda: len(frontend.requests) == num_open, "requests up to the limit")
        await asyncio.sleep(0.1)
        assert sorted(prompts_of(frontend)) == prompts[:num_open]
        assert len(frontend.peers) == max_connections
        running[0].cancel()  # ends there, and one that waits is sent
        await until(lambda: len(frontend.requests) == num_open + 1, "the next request")
        assert prompts_of(frontend)[-1] == prompts[num_open]
        frontend.hold.set()
        outputs = await asyncio.gather(*running[1:])
    assert [output.prompt for output in outputs] == prompts[1:]
    assert all(output.finished for output in outputs)


async def test_a_request_that_waits_can_be_cancelled_closed_and_time_out(
    frontend: FakeFrontend,
) -> None:
    frontend.hold.clear()
    async with AsyncClient(frontend.address) as client:
        first = [asyncio.create_task(client.generate("first", FIVE)) for _ in range(LIMIT)]
        await until(lambda: len(frontend.requests) == LIMIT, "requests up to the limit")
        with pytest.raises(errors.DeadlineExceeded, match="maximum of open requests"):
            await client.generate("late", FIVE, timeout=0.05)
        cancelled = asyncio.create_task(client.generate("cancelled", FIVE))
        closed = client.stream("closed", FIVE)
        reading = asyncio.create_task(_collect(closed))
        last = asyncio.create_task(client.generate("last", FIVE))
        await asyncio.sleep(0)
        cancelled.cancel()
        await closed.aclose()
        assert await reading == []
        frontend.hold.set()
        await asyncio.gather(*first, last)
    assert prompts_of(frontend) == ["first"] * LIMIT + ["last"]


async def test_requests_that_wait_end_with_their_client(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    client = AsyncClient(frontend.address)
    running = [asyncio.create_task(client.generate("x", FIVE)) for _ in range(LIMIT + 2)]
    await until(lambda: len(frontend.requests) == LIMIT, "requests up to the limit")
    await client.close()
    ends = await asyncio.gather(*running, return_exceptions=True)
    assert [type(end) for end in ends] == [RuntimeError] * len(running)


def test_threads_wait_for_their_turn(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    with Client(frontend.address) as client, ThreadPoolExecutor(2 * LIMIT) as pool:
        running = [pool.submit(client.generate, "x", FIVE) for _ in range(2 * LIMIT)]
        wait_until(lambda: len(frontend.requests) == LIMIT, "requests up to the limit")
        waits = client.stream("closed", FIVE)
        closer = threading.Timer(0.1, waits.close)
        closer.start()
        assert list(waits) == []
        closer.join()
        assert len(frontend.requests) == LIMIT
        frontend.hold.set()
        assert all(future.result(60).finished for future in running)


def test_a_client_needs_a_connection() -> None:
    with pytest.raises(ValueError, match="max_connections: expected at least 1, got 0"):
        Client(max_connections=0)


async def _collect(stream: Any) -> list[object]:
    return [delta async for delta in stream]


async def test_a_client_waits_while_its_own_requests_fill_the_server(
    frontend: FakeFrontend,
) -> None:
    """For longer than the recovery timeout, as long as the others proceed."""
    full = Failure(code=grpc.StatusCode.RESOURCE_EXHAUSTED, retry_delay_ms=300)
    policy = RetryPolicy(recovery_timeout_s=2.0, initial_backoff_s=0.01)
    async with AsyncClient(frontend.address, retry=policy) as client:
        frontend.breaks.extend(Break(failure=full) for _ in range(8))
        waiting = asyncio.create_task(client.generate("waits", FIVE))
        while not waiting.done():
            await client.tokenize("others are answered")
            await asyncio.sleep(0.05)
        assert (await waiting).finished
    assert len(frontend.requests) == 9
