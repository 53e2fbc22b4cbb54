"""What only asyncio can do: cancel a task, and run many requests in one."""

import asyncio

import pytest

from pagewire_client import AsyncClient, SamplingParams
from tests.support.fake_frontend import FakeFrontend

TEN = SamplingParams(max_tokens=10)


async def ended(frontend: FakeFrontend) -> bool:
    return await asyncio.to_thread(frontend.ended_early.wait, 5)


async def test_cancelling_the_task_cancels_the_request(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    async with AsyncClient(frontend.address) as client:
        task = asyncio.create_task(client.generate("Hello", TEN))
        assert await asyncio.to_thread(frontend.first_token_sent.wait, 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await ended(frontend)


def test_a_client_of_another_event_loop_says_so(frontend: FakeFrontend) -> None:
    client = AsyncClient(frontend.address)

    async def generate() -> None:
        await client.generate("Hello", TEN)

    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(generate())
        with pytest.raises(RuntimeError, match="another event loop"):
            second.run(generate())
        first.run(client.close())


async def test_another_task_may_close_a_stream_that_waits(frontend: FakeFrontend) -> None:
    frontend.hold.clear()
    async with AsyncClient(frontend.address) as client, client.stream("Hello", TEN) as stream:
        await anext(stream)
        await anext(stream)
        rest = asyncio.create_task(_collect(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        assert await rest == []
        assert await ended(frontend)


async def test_a_stream_whose_client_is_closed_does_not_look_complete(
    frontend: FakeFrontend,
) -> None:
    """It must not seem cancelled: a task group would ignore a cancelled task."""
    frontend.hold.clear()
    client = AsyncClient(frontend.address)
    stream = client.stream("Hello", TEN)
    await anext(stream)
    await anext(stream)
    rest = asyncio.create_task(_collect(stream))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await rest
    assert await ended(frontend)


async def test_many_requests_whose_client_is_closed_end_with_an_error(
    frontend: FakeFrontend,
) -> None:
    frontend.hold.clear()
    client = AsyncClient(frontend.address)
    many = asyncio.create_task(client.generate_many(["one", "two"], TEN))
    assert await asyncio.to_thread(frontend.first_token_sent.wait, 5)
    await client.close()
    with pytest.raises(RuntimeError, match="closed"):
        await asyncio.wait_for(many, 60)  # long before the server would end it


async def _collect(stream: object) -> list[object]:
    return [delta async for delta in stream]  # type: ignore[attr-defined]
