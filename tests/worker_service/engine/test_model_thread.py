"""Jobs are done in order, and what follows them is done in order too, on a thread of its own."""

import asyncio
import threading

import pytest

from tests.support.waiting import until
from worker_service.engine.executor import ModelThread


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
    thread.stop(wait_s=10)
    assert done == [(number, "model-sequels") for number in range(100)]


async def test_what_waits_for_nothing_is_done_at_once_if_nothing_else_is_queued() -> None:
    thread = ModelThread()
    done: list[tuple[str, str]] = []

    def follow_up(name: str, *, may_wait: bool = False) -> None:
        def sequel() -> None:
            done.append((name, threading.current_thread().name))

        thread.follow_up(sequel, may_wait=may_wait)

    await thread.run(lambda: follow_up("alone"))
    assert done == [("alone", "model")]
    began, may_post = threading.Event(), threading.Event()

    def before_another() -> None:
        began.set()
        assert may_post.wait(60)
        follow_up("before a job")

    thread.post(before_another)
    assert await asyncio.to_thread(began.wait, 60)
    thread.post(lambda: None)
    may_post.set()
    await until(lambda: len(done) == 2, "the second thread ran it")
    assert done[-1] == ("before a job", "model-sequels")
    may_end = threading.Event()

    def behind_another() -> None:
        thread.follow_up(lambda: may_end.wait(60))
        follow_up("behind one that waits")

    await thread.run(behind_another)
    assert len(done) == 2
    may_end.set()
    await until(lambda: len(done) == 3, "the second thread ran both")
    assert done[-1] == ("behind one that waits", "model-sequels")
    thread.stop(wait_s=10)


async def test_jobs_go_on_while_what_follows_one_waits() -> None:
    thread = ModelThread()
    may_end = threading.Event()
    order: list[str] = []

    def wait() -> None:
        assert may_end.wait(60)
        order.append("followed")

    thread.post(lambda: thread.follow_up(wait))
    await thread.run(lambda: order.append("next job"))
    may_end.set()
    ended = threading.Event()
    thread.post(lambda: thread.follow_up(ended.set))
    assert await asyncio.to_thread(ended.wait, 10)
    assert order == ["next job", "followed"]
    thread.stop(wait_s=10)


async def test_an_error_in_what_follows_stops_nothing() -> None:
    thread = ModelThread()
    ended = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    thread.post(lambda: thread.follow_up(fail))
    thread.post(lambda: thread.follow_up(ended.set))
    assert await asyncio.to_thread(ended.wait, 10)
    thread.stop(wait_s=10)


class Hang:
    """A job that lasts until it is let go."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)


@pytest.mark.parametrize("where", ["job", "sequel"])
async def test_it_tells_how_long_it_has_been_at_one_thing(where: str) -> None:
    thread, hang = ModelThread(), Hang()
    assert thread.busy_s == 0
    thread.post(hang if where == "job" else lambda: thread.follow_up(hang))
    assert await asyncio.to_thread(hang.begun.wait, 10)
    if where == "sequel":
        await thread.run(lambda: None)
    assert 0 < thread.busy_s <= thread.busy_s
    hang.may_end.set()
    await until(lambda: thread.busy_s == 0, "it is done")
    assert thread.stop(wait_s=10)


async def test_a_thread_that_is_stuck_is_not_waited_for() -> None:
    thread, hang = ModelThread(), Hang()
    thread.post(hang)
    assert not thread.stop(wait_s=0.01)
    hang.may_end.set()
    assert thread.stop(wait_s=10)


async def test_no_failure_of_a_job_ends_the_threads() -> None:
    class Panic(BaseException):
        """That of a library in Rust, which is no Exception."""

    def fail() -> None:
        raise Panic("oh")

    thread = ModelThread()
    with pytest.raises(RuntimeError, match=r"^Panic: oh$"):
        await thread.run(fail)
    thread.post(fail)
    thread.post(lambda: thread.follow_up(fail))
    done = threading.Event()
    thread.post(lambda: thread.follow_up(done.set))
    assert await asyncio.to_thread(done.wait, 10)
    assert thread.stop(wait_s=10)
