"""A model's files are asked of workers that may go meanwhile."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import pytest

from pagewire.v1 import model_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.core_service.model_assets import AssetCache
from scheduler_service.core_service.workers.worker import Worker
from scheduler_service.core_service.workers.worker_group import WorkerGroup
from scheduler_service.errors import Unavailable
from service_common.cluster import NO_CLUSTER, Cluster

REGISTRATION = pb.WorkerRegistration(
    worker_id="w0",
    group_id="g0",
    address="unix:/nowhere",
    model=model_pb2.ModelInfo(name="m", fingerprint="f"),
)


class OneGroup(list[WorkerGroup]):
    """What the cache asks of a registry."""

    reports: Sequence[status_pb2.WorkerLoading] = ()

    def groups_with(self, model: str) -> list[WorkerGroup]:
        """All that there are."""
        del model
        return list(self)

    def loading(self) -> Sequence[status_pb2.WorkerLoading]:
        """Reports of workers that load a model."""
        return self.reports


async def test_a_worker_that_goes_before_it_is_asked_is_one_that_does_not_answer() -> None:
    group = WorkerGroup(REGISTRATION, cast(Any, None))
    worker = Worker(REGISTRATION, lease_s=1.0, clock=time.monotonic)
    group.join(worker)
    dial = partial(Cluster(NO_CLUSTER).dial, WorkerServiceStub)
    cache = AssetCache(cast(Any, OneGroup([group])), dial)
    asking = asyncio.create_task(cache.get("m"))
    await asyncio.sleep(0)  # it has seen the group
    group.leave(worker)
    with pytest.raises(Unavailable):
        await asking
    await cache.close()


async def test_a_fetch_goes_on_when_its_worker_has_gone_and_another_model_is_asked_for() -> None:
    may_answer = asyncio.Event()

    class Stub:
        async def GetModelAssets(
            self, request: worker_pb.WorkerServiceGetModelAssetsRequest, **_: float
        ) -> AsyncIterator[worker_pb.WorkerServiceGetModelAssetsResponse]:
            await may_answer.wait()
            chunk = model_pb2.ModelAssetChunk(file_name="config.json", data=b"{}")
            yield worker_pb.WorkerServiceGetModelAssetsResponse(chunk=chunk)

    @asynccontextmanager
    async def dial(_address: str) -> AsyncIterator[Any]:
        yield Stub()

    registry = OneGroup()
    cache = AssetCache(cast(Any, registry), dial)
    asking = []
    for name in "mn":
        report = status_pb2.WorkerLoading(model=name, fingerprint=name, address=name)
        registry.reports = [report]
        asking.append(asyncio.create_task(cache.get(name)))
        await asyncio.sleep(0)  # it has begun
    may_answer.set()
    assert await asyncio.gather(*asking) == [{"config.json": b"{}"}] * 2
    await cache.close()
