"""Coroutines that stand and fall together."""

import asyncio
import gc

import pytest

from scheduler_service.tasks import (
    Interrupted,
    Interruptible,
    run_until_first,
    shielded,
    until_failure,
)


async def test_a_write_that_is_under_way_ends_before_what_cancels_it_goes_on() -> None:
    done: list[str] = []
    began, release = asyncio.Event(), asyncio.Event()

    async def write() -> None:
        began.set()
        await release.wait()
        done.append("written")

    async def read() -> None:
        await began.wait()
        asyncio.get_running_loop().call_soon(release.set)

    await run_until_first(read(), shielded(write(), timeout_s=30))
    assert done == ["written"]


async def test_a_write_that_does_not_end_is_given_up() -> None:
    gone = asyncio.Event()

    async def write() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            gone.set()

    async def read() -> None:
        await asyncio.sleep(0)

    await run_until_first(read(), shielded(write(), timeout_s=0.01))
    await gone.wait()


async def test_an_error_of_a_write_that_nobody_waits_for_any_more_is_no_error() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))

    async def write() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ConnectionError("gone")

    async def read() -> None:
        await asyncio.sleep(0)

    await run_until_first(read(), shielded(write(), timeout_s=0.01))
    gc.collect()
    assert complaints == []


async def test_what_a_write_raises_is_raised() -> None:
    async def write() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await shielded(write(), timeout_s=1)


async def test_the_failure_of_a_background_task_is_logged_and_raised(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    tasks = [asyncio.create_task(asyncio.Event().wait()), asyncio.create_task(fail())]
    with pytest.raises(RuntimeError, match="a bug"):
        await until_failure(tasks)
    tasks[0].cancel()
    [record] = caplog.records
    assert "background task failed" in record.message
    assert record.exc_info


async def test_an_interrupted_context_raises_and_its_task_continues() -> None:
    with pytest.raises(Interrupted), Interruptible() as context:  # noqa: PT012
        asyncio.get_running_loop().call_soon(context.interrupt)
        await asyncio.Event().wait()
    context.interrupt()
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancelled_task_ends_with_its_cancellation_in_an_interrupted_context() -> None:
    began = asyncio.Event()
    context = Interruptible()

    async def wait() -> None:
        with context:
            began.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(wait())
    await began.wait()
    task.cancel()
    context.interrupt()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_context_that_nothing_interrupts_passes_on_what_happens_in_it() -> None:
    with Interruptible() as context:
        await asyncio.sleep(0)
    context.interrupt()
    with pytest.raises(ZeroDivisionError), Interruptible():
        raise ZeroDivisionError
