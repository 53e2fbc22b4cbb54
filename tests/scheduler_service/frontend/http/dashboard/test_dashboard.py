"""The dashboard's files and its stream."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from prometheus_client import CollectorRegistry

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from scheduler_service.errors import Unauthenticated
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.core_client import CoreConnection
from scheduler_service.frontend.http.app import make_app
from scheduler_service.frontend.http.dashboard.hub import FILE_PATHS, Hub, _until_draining
from scheduler_service.frontend.http.middleware import HttpServices
from service_common.cluster import NO_CLUSTER, Cluster
from tests.support.fake_core import FakeCore
from tests.support.frontends import eventually
from tests.support.http_frontends import HttpServed, http_served


class WatchedCore(FakeCore):
    """A core that sends each status that a test has for it; None ends the watch."""

    def __init__(self) -> None:
        super().__init__()
        self.statuses: asyncio.Queue[status_pb2.EngineStatus | None] = asyncio.Queue()
        self.watches: list[pb.SchedulerServiceWatchStatusRequest] = []
        self.num_cancelled = 0
        self.cancelled = asyncio.Semaphore(0)

    async def WatchStatus(self, request: Any, context: Any) -> None:
        self.watches.append(request)
        try:
            while (status := await self.statuses.get()) is not None:
                await context.write(pb.SchedulerServiceWatchStatusResponse(status=status))
        except asyncio.CancelledError:
            self.num_cancelled += 1
            self.cancelled.release()
            raise


class Keys:
    """`Bearer operator` sees everything, `Bearer user` not."""

    asks_for_key = True

    def authenticate(self, authorization: str | None) -> Principal:
        if authorization not in ("Bearer operator", "Bearer user"):
            raise Unauthenticated("a key is needed")
        return Principal(name="t", is_operator=authorization == "Bearer operator")


@pytest.fixture
async def core() -> WatchedCore:
    return WatchedCore()


@pytest.fixture
async def served(core: WatchedCore) -> AsyncIterator[HttpServed]:
    async with http_served(core) as served:
        yield served


def make_status(uptime_s: float = 1.0, num_running: int = 1) -> status_pb2.EngineStatus:
    request = status_pb2.RequestStatus(
        request_id="r", number=5, group_id="g", state=status_pb2.REQUEST_STATE_DECODING
    )
    request.block_tables.append(b"\x01\0\0\0\x02\0\0\0")
    group = status_pb2.WorkerGroupStatus(group_id="g", num_gpu_blocks=4)
    group.gpu_blocks.owners = b"".join(n.to_bytes(4, "little") for n in (0, 5, 5, 0))
    group.gpu_blocks.num_references = bytes([0, 1, 1, 0])
    group.cache_groups.add(lifetime="state", num_state_blocks=2, num_used_blocks=2, num_cached=1)
    return status_pb2.EngineStatus(
        uptime_s=uptime_s, num_running=num_running, requests=[request], groups=[group]
    )


async def next_message(lines: AsyncIterator[str]) -> Any:
    async with asyncio.timeout(60):
        return json.loads(await anext(lines))


@pytest.mark.parametrize("path", FILE_PATHS)
async def test_the_page_loads_nothing_from_elsewhere(served: HttpServed, path: str) -> None:
    response = await served.client.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", response.text)


async def test_all_that_the_page_asks_for_is_there_below_any_path(served: HttpServed) -> None:
    wanted = set()
    for path in FILE_PATHS:
        text = (await served.client.get(path)).text
        links = re.findall(r'(?:(?:href|src)=|from |fetch\(|import\()"([^"#]+)"', text)
        wanted |= {urljoin(f"/below{path}", link) for link in links}
    assert wanted == {f"/below{path}" for path in FILE_PATHS} - {"/below/"}
    assert (await served.client.get("/dashboard/index.html")).status_code == 404
    assert (await served.client.get("/dashboard/..%2frouter.py")).status_code == 404
    assert (await served.client.get("/dashboard/none.js")).status_code == 404


async def test_a_browser_is_told_all_and_then_what_changes(
    core: WatchedCore, served: HttpServed
) -> None:
    async with served.client.stream("GET", "/dashboard/stream") as response:
        lines = aiter(response.aiter_lines())
        first = await next_message(lines)
        assert first["all"]
        assert first["lost"] == "connecting to the scheduler core"
        core.statuses.put_nowait(make_status())
        message = await next_message(lines)
        assert message["lost"] is None
        assert message["facts"]["requests"]["5"]["request_id"] == "r"
        assert message["facts"]["groups"]["g"]["cache_groups"] == [
            ["state, 2 blocks each", "1 in use, 1 saved, nothing looked up"]
        ]
        assert message["columns"]["g/gpu/owners"] == [4, 1, 2, 5]
        assert message["tables"] == {"5/gpu": [[0, 1, 2]]}
        core.statuses.put_nowait(make_status(uptime_s=2.0, num_running=3))
        message = await next_message(lines)
        assert message["facts"]["engine"] == {"num_running": 3}
        assert "columns" not in message
        assert "tables" not in message
    [watch] = core.watches
    assert watch.detail.include_requests
    assert watch.detail.include_blocks


async def test_browsers_share_one_watch_and_later_ones_are_told_all(
    core: WatchedCore, served: HttpServed
) -> None:
    async with served.client.stream("GET", "/dashboard/stream") as first:
        lines = aiter(first.aiter_lines())
        await next_message(lines)
        core.statuses.put_nowait(make_status())
        await next_message(lines)
        async with served.client.stream("GET", "/dashboard/stream") as second:
            message = await next_message(aiter(second.aiter_lines()))
            assert message["all"]
            assert len(message["points"]) == 1
            assert message["columns"]["g/gpu/owners"] == [4, 1, 2, 5]
    assert len(core.watches) == 1


async def test_the_cores_loss_is_told_and_the_next_core_is_followed(
    core: WatchedCore, served: HttpServed
) -> None:
    async with served.client.stream("GET", "/dashboard/stream") as response:
        lines = aiter(response.aiter_lines())
        await next_message(lines)
        core.statuses.put_nowait(make_status(uptime_s=50))
        await next_message(lines)
        core.statuses.put_nowait(None)
        assert (await next_message(lines))["lost"] == "the scheduler core has ended"
        core.statuses.put_nowait(make_status(uptime_s=1, num_running=0))
        message = await next_message(lines)
        assert (message["lost"], message["facts"]["engine"]) == (None, {"num_running": 0})
    assert len(core.watches) == 2


async def test_the_core_is_followed_over_a_new_channel_when_the_former_is_closed(
    core: WatchedCore,
) -> None:
    async with core, asyncio.timeout(60):
        connection = CoreConnection(Cluster(NO_CLUSTER), core.address)
        hub = Hub(connection)
        async with aclosing(hub.lines()) as lines:

            async def until(lost: str | None) -> None:
                """Read up to a line with this state; to a slow machine a core may seem silent."""
                while (state := json.loads(await anext(lines))["lost"]) != lost:
                    assert state in ("the scheduler core is silent", lost)

            await until("connecting to the scheduler core")
            core.statuses.put_nowait(make_status())
            await until(None)
            former, num_watches = connection._channel, len(core.watches)
            connection._open()
            await former.close()
            await until("the scheduler core cannot be reached")
            for _ in range(num_watches):
                await core.cancelled.acquire()  # a watch that goes on would take the next status
            core.statuses.put_nowait(make_status(uptime_s=2.0))
            await until(None)
        hub.close()
        await connection.close()


async def test_a_status_that_makes_no_sense_is_told_of_and_the_next_is_shown(
    core: WatchedCore, served: HttpServed
) -> None:
    torn = make_status()
    torn.groups[0].gpu_blocks.owners = b"\0\0\0"
    async with served.client.stream("GET", "/dashboard/stream") as response:
        lines = aiter(response.aiter_lines())
        await next_message(lines)
        core.statuses.put_nowait(torn)
        assert (await next_message(lines))["lost"] == "the frontend cannot read the core's status"
        await eventually(lambda: core.num_cancelled == 1)
        core.statuses.put_nowait(make_status(uptime_s=2.0))
        message = await next_message(lines)
        assert (message["lost"], message["facts"]["engine"]["num_running"]) == (None, 1)


async def test_the_stream_ends_when_the_frontend_does(
    core: WatchedCore, served: HttpServed
) -> None:
    async with served.client.stream("GET", "/dashboard/stream") as response:
        lines = aiter(response.aiter_lines())
        await next_message(lines)
        served.frontend.requests.capacity.is_draining.set()
        core.statuses.put_nowait(make_status())
        with pytest.raises(StopAsyncIteration):
            await next_message(lines)
        await eventually(lambda: core.num_cancelled == 1)
    assert len(core.watches) == 1


async def test_a_page_that_ends_at_a_shutdown_lets_the_others_end_too(
    core: WatchedCore, served: HttpServed
) -> None:
    """One may have read the last line before the shutdown began, another one reads it later."""
    services = served.frontend.http_services
    hub = Hub(services.core)
    async with (
        asyncio.timeout(60),
        aclosing(_until_draining(hub, services)) as prompt,
        aclosing(_until_draining(hub, services)) as slow,
    ):
        for lines in (prompt, slow):
            await anext(lines)
        core.statuses.put_nowait(make_status())
        await anext(prompt)
        served.frontend.requests.capacity.is_draining.set()
        with pytest.raises(StopAsyncIteration):
            await anext(slow)
        core.statuses.put_nowait(make_status(uptime_s=2.0))
        with pytest.raises(StopAsyncIteration):
            await anext(prompt)
    await eventually(lambda: core.num_cancelled == len(core.watches))


@pytest.mark.parametrize(("key", "status"), [(None, 401), ("wrong", 401), ("user", 403)])
async def test_only_operators_see_the_stream_and_anybody_the_page(
    key: str | None, status: int
) -> None:
    services = HttpServices(
        requests=None,
        pooling=None,
        adapters=None,
        models=None,
        core=None,
        authentication=Keys(),
        registry=CollectorRegistry(),
    )  # type: ignore[arg-type]
    transport = httpx.ASGITransport(make_app(services))
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://f", headers=headers
    ) as client:
        assert (await client.get("/")).status_code == 200
        refused = await client.get("/dashboard/stream")
        assert refused.status_code == status
        assert refused.json()["error"]["message"]
