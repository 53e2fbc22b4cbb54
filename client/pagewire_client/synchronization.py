"""What calls wait for: tasks of an event loop, or threads.

Calls are written once, as coroutines. A blocking client runs them without an event loop, by `run`
and `iterate`: there, what they await blocks the thread, so that they are never suspended.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Event(Protocol):
    """An event that may be awaited."""

    def is_set(self) -> bool:
        """Whether it has happened."""

    def set(self) -> None:
        """Make it happen."""

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait until the event is set or `timeout_s` has passed; returns whether it is set."""


class TaskEvent:
    """An `Event` for the tasks of one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.is_set = self._event.is_set
        self.set = self._event.set

    async def wait(self, timeout_s: float | None) -> bool:
        """See `Event`."""
        if timeout_s is None or timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
        return self.is_set()


class ThreadEvent:
    """An `Event` for threads, which wait by blocking."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.is_set = self._event.is_set
        self.set = self._event.set

    async def wait(self, timeout_s: float | None) -> bool:
        """See `Event`."""
        return self._event.wait(timeout_s)


class ThreadQueue:
    """The part of `asyncio.Queue` that calls use, for threads, which wait by blocking."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.put_nowait = self._queue.put

    async def get(self) -> Any:
        """The next item."""
        return self._queue.get()


def run(awaitable: Awaitable[T]) -> T:
    """The result of an awaitable that is never suspended."""
    try:
        next(awaitable.__await__())
    except StopIteration as end:
        result: T = end.value
        return result
    raise RuntimeError("a call that blocks was suspended")


def iterate(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """The items of a generator that is never suspended; it is closed at the end."""
    try:
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield run(anext(items))
    finally:
        run(items.aclose())


def is_cancelled() -> bool:
    """Whether the current task itself is being cancelled, not only a call that it awaits."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() > 0
