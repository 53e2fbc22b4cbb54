"""Running several coroutines until the first one ends or fails."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, TypeVar

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
