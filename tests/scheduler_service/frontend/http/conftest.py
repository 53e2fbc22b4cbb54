"""What the tests of the HTTP interface share."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.http_frontends import HttpServed, http_served


@pytest_asyncio.fixture
async def served() -> AsyncIterator[HttpServed]:
    """A frontend with HTTP, before a fake core."""
    async with http_served() as served:
        yield served
