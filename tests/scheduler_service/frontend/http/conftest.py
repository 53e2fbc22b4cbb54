"""What the tests of the HTTP interface share."""

import gc
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.http_frontends import HttpServed, http_served


@pytest_asyncio.fixture
async def served() -> AsyncIterator[HttpServed]:
    """A frontend with HTTP, before a fake core."""
    async with http_served() as served:
        yield served


@pytest.fixture
def frozen_heap() -> None:
    """Keep garbage collections from traversing the objects of other tests and imported modules, as
    `serve` does in a frontend's own process. In a run of the whole suite there are millions, and a
    collection of all generations occupies the loop for half a second or more."""
    gc.freeze()
