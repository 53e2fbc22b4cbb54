"""Polling of what cannot be waited for: processes, sockets, clocks."""

import asyncio
from collections.abc import AsyncIterator


async def ticks(period_s: float) -> AsyncIterator[None]:
    """Yield now, and then every `period_s` seconds."""
    while True:
        yield
        await asyncio.sleep(period_s)
