"""The parts of asyncio that `async_calls` uses, and their counterparts for threads.

Each name `AsyncX` stands for `X` in the generated blocking modules.
"""

import asyncio
import contextlib
import queue
import threading

AsyncQueue = asyncio.Queue
Event = threading.Event
Queue = queue.SimpleQueue


class AsyncEvent:
    """`threading.Event` for the tasks of one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.is_set = self._event.is_set
        self.set = self._event.set

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait until the event is set or `timeout_s` has passed; returns whether it is set."""
        if timeout_s is None or timeout_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._event.wait()
        return self.is_set()


def is_cancelled() -> bool:
    """Whether the current task itself is being cancelled, not only a call that it awaits."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() > 0
