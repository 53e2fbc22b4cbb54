"""What occupies an event loop."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_BUSY_S = 0.1


@asynccontextmanager
async def unoccupied_loop() -> AsyncIterator[None]:
    """Assert that no callback takes the loop's own thread long. Its processor time is measured, so
    neither other threads nor other processes count."""
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - began)

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
    assert longest < MAX_BUSY_S
