"""A frontend with HTTP in the test's own process, and an HTTP client of it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from scheduler_service.frontend.server import Frontend
from tests.support.fake_core import FakeCore
from tests.support.frontends import eventually, model_ready, running_frontend


@dataclass
class HttpServed:
    """A frontend between an HTTP client and a core that a test controls."""

    core: FakeCore
    frontend: Frontend
    client: httpx.AsyncClient


@asynccontextmanager
async def http_frontend(core: str, **settings: Any) -> AsyncIterator[Frontend]:
    """A frontend that answers HTTP on a port of its own."""
    async with running_frontend(core, **({"http": "127.0.0.1:0"} | settings)) as frontend:
        yield frontend


@asynccontextmanager
async def http_client(frontend: Frontend) -> AsyncIterator[httpx.AsyncClient]:
    """A client whose paths are relative to the frontend."""
    assert frontend.http is not None
    url = f"http://{frontend.http.address}"
    # Certificates, which plain HTTP does not use, would take longer to load than most requests.
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=False) as client:
        yield client


@asynccontextmanager
async def http_served(core: FakeCore | None = None, **settings: Any) -> AsyncIterator[HttpServed]:
    """All three, once the frontend has its model."""
    async with (
        core or FakeCore() as running_core,
        http_frontend(running_core.address, **settings) as frontend,
        http_client(frontend) as client,
    ):
        if running_core.models:
            await model_ready(frontend)
        yield HttpServed(running_core, frontend, client)


async def none_open(frontend: Frontend) -> None:
    """Wait until the frontend has let go of every request."""
    await eventually(lambda: len(frontend.requests) == 0)


@asynccontextmanager
async def raw_connection(
    frontend: Frontend,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection to a frontend for bytes that a test chooses."""
    assert frontend.http is not None
    host, _, port = frontend.http.address.rpartition(":")
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            yield reader, writer
        finally:
            writer.close()


async def exchange(frontend: Frontend, data: bytes, *, half_close: bool = False) -> bytes:
    """What a client receives, until the connection ends, that sends `data`."""
    async with raw_connection(frontend) as (reader, writer):
        writer.write(data)
        if half_close:
            writer.write_eof()
        return await reader.read()


def http_post(path: str, body: bytes, *headers: str) -> bytes:
    """A request as it travels."""
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body
