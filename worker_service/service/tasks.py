"""Waiting for the first of several events."""

import asyncio
from collections.abc import Coroutine


async def until_first(*waits: Coroutine[None, None, object]) -> None:
    """Wait until one of several is done and cancel the others; raises its exception."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
