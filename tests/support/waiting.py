"""Waiting for what must become true, without sleeping for what may not."""

import asyncio
import time
from collections.abc import Callable


async def until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """Return as soon as `condition()` is true; fail with `what` after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.002)


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60) -> None:
    """The same where there is no event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        time.sleep(0.02)
