"""Jobs are done in order, and what follows them is done in order too, on a thread of its own."""

import asyncio
import threading

from worker_service.model_thread import ModelThread


async def test_what_follows_jobs_is_done_in_order_beside_them() -> None:
    thread = ModelThread()
    done: list[tuple[int, str]] = []
    ended = threading.Event()

    def job(number: int) -> None:
        thread.follow_up(lambda: done.append((number, threading.current_thread().name)))

    for number in range(100):
        thread.post(lambda number=number: job(number))
    thread.post(lambda: thread.follow_up(ended.set))
    assert await asyncio.to_thread(ended.wait, 10)
    thread.stop(wait=True)
    assert done == [(number, "model-sequels") for number in range(100)]


async def test_jobs_go_on_while_what_follows_one_waits() -> None:
    thread = ModelThread()
    may_end = threading.Event()
    order: list[str] = []

    def wait() -> None:
        assert may_end.wait(10)
        order.append("followed")

    thread.post(lambda: thread.follow_up(wait))
    await thread.run(lambda: order.append("next job"))
    may_end.set()
    ended = threading.Event()
    thread.post(lambda: thread.follow_up(ended.set))
    assert await asyncio.to_thread(ended.wait, 10)
    assert order == ["next job", "followed"]
    thread.stop(wait=True)


async def test_an_error_in_what_follows_stops_nothing() -> None:
    thread = ModelThread()
    ended = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    thread.post(lambda: thread.follow_up(fail))
    thread.post(lambda: thread.follow_up(ended.set))
    assert await asyncio.to_thread(ended.wait, 10)
    thread.stop(wait=True)
