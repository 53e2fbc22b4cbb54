"""Running several coroutines that stand and fall together."""

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

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


async def run_all(*coroutines: Coroutine[Any, Any, Result]) -> list[Result]:
    """What each returns, in order; if one raises, end the others and raise what it raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def to_its_end(work: Awaitable[Result], patience_s: float) -> Result:
    """What `work` returns; whoever is cancelled meanwhile first waits for its end, but not long.

    For writes to a stream of gRPC's: a call whose write was cut off cannot be given a status.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with suppress(Exception):
            async with asyncio.timeout(patience_s):
                await task
        raise
