"""Clients that survive all disturbances of a cluster."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pagewire_client import AsyncClient, RetryPolicy

PATIENCE = RetryPolicy(max_retries=1_000_000, recovery_timeout_s=600.0)
"""A client that keeps retrying while a frontend restarts on a busy machine."""


@asynccontextmanager
async def clients(frontends: Sequence[str]) -> AsyncIterator[list[AsyncClient]]:
    """One for each frontend, which falls back to the others."""
    each = [
        AsyncClient([*frontends[first:], *frontends[:first]], retry=PATIENCE)
        for first in range(len(frontends))
    ]
    try:
        yield each
    finally:
        for client in each:
            await client.close()
