from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest_asyncio

from scheduler_service.frontend.server import Frontend
from tests.support.fake_core import FakeCore
from tests.support.frontends import client_of, running_frontend


@dataclass
class Served:
    """A frontend between a client and a core that a test controls."""

    core: FakeCore
    frontend: Frontend
    client: Any


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Served]:
    async with (
        FakeCore() as core,
        running_frontend(core.address) as frontend,
        client_of(frontend) as client,
    ):
        yield Served(core, frontend, client)
