"""Running several coroutines until the first one ends or fails, and ending a part of one."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


async def run_until_first(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Run all until the first returns or raises, end the others, and raise what it raised.

    Unlike a TaskGroup, one that returns ends the others too, and errors come bare: each coroutine
    is one way in which the same stream may end.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Interrupted(Exception):
    """`Interruptible.interrupt` was called."""


class Interruptible:
    """A context that others may end: it then raises Interrupted, as `asyncio.timeout` does when it
    is late. Without a task of its own for what runs in it, its end needs no further turns of the
    event loop."""

    _task: asyncio.Task[Any] | None = None
    _num_cancellations = 0
    _is_interrupted = False

    def __enter__(self) -> Self:
        self._task = task = asyncio.current_task()
        assert task is not None
        self._num_cancellations = task.cancelling()
        return self

    def interrupt(self) -> None:
        """End the context; no effect on one that has ended."""
        if self._task is not None and not self._is_interrupted:
            self._is_interrupted = True
            self._task.cancel()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if not self._is_interrupted or task is None:
            return
        is_only = task.uncancel() <= self._num_cancellations
        if is_only and kind is asyncio.CancelledError:
            raise Interrupted from None


async def until_failure(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait until one of the tasks ends that should run as long as their service; log and raise its
    error."""
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        if (error := task.exception()) is not None:
            logger.error("background task failed task=%s", task.get_coro(), exc_info=error)
        task.result()


async def run_all(*work: Awaitable[Result]) -> list[Result]:
    """Return the results in order; if one raises, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(part) for part in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def shielded(work: Awaitable[Result], timeout_s: float) -> Result:
    """Return the result of `work`; a caller that is cancelled meanwhile first waits for its
    end, up to `timeout_s`.

    For writes to a stream of gRPC's: a call whose write was cut off cannot be given a status.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            async with asyncio.timeout(timeout_s):
                await task
        raise
