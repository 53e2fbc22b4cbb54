"""Jobs are done in order, and what they have to tell reaches the event loop in order."""

import asyncio
import threading

from worker_service.model_thread import ModelThread


async def test_what_jobs_tell_arrives_in_order() -> None:
    thread = ModelThread()
    loop = asyncio.get_running_loop()
    told: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()

    def job(number: int) -> None:
        thread.tell(
            loop, lambda: told.put_nowait((number, threading.current_thread().name == "MainThread"))
        )

    for number in range(100):
        thread.post(lambda number=number: job(number))
    assert [await told.get() for _ in range(100)] == [(number, True) for number in range(100)]
    thread.stop(wait=True)


async def test_a_loop_that_is_closed_stops_nobody() -> None:
    thread = ModelThread()
    closed = asyncio.new_event_loop()
    closed.close()
    heard = asyncio.Event()
    loop = asyncio.get_running_loop()
    await thread.run(lambda: thread.tell(closed, heard.clear))
    await thread.run(lambda: thread.tell(loop, heard.set))
    await asyncio.wait_for(heard.wait(), 10)
    thread.stop(wait=True)
