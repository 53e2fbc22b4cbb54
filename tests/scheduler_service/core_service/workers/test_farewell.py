"""Directives to a worker that must leave, on a stream that takes one message at a time."""

import asyncio
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

from pagewire.v1 import model_pb2
from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.core import SchedulerConfig, SchedulerCore
from scheduler_service.core_service.counters import CoreCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.workers.step_watchdog import StepTimeout
from scheduler_service.core_service.workers.worker_registry import WorkerRegistry
from service_common.cluster import NO_CLUSTER, Cluster
from tests.support.waiting import until

REGISTRATION = pb.WorkerRegistration(
    worker_id="w0",
    group_id="g0",
    world_size=1,
    address="unix:/nowhere",
    model=model_pb2.ModelInfo(
        name="m",
        fingerprint="f",
        max_model_len=8,
        vocab_size=8,
        cache_groups=[model_pb2.CacheGroup(lifetime="CACHE_LIFETIME_GROWING", block_tokens=4)],
    ),
)


class SlowStream:
    """A registration stream whose writes take a while; like gRPC's, a write that is cancelled
    is under way all the same."""

    def __init__(self) -> None:
        self.written: list[str | None] = []
        self._is_registered = False
        self._is_writing = False

    async def read(self) -> pb.RegisterWorkerRequest:
        """The registration, and then nothing."""
        if self._is_registered:
            await asyncio.Event().wait()
        self._is_registered = True
        return pb.RegisterWorkerRequest(heartbeat=pb.WorkerHeartbeat(registration=REGISTRATION))

    async def write(self, response: pb.RegisterWorkerResponse) -> None:
        """Take a directive."""
        assert not self._is_writing, "two writes at once"
        self._is_writing = True
        for _ in range(20):
            await asyncio.sleep(0)
        self._is_writing = False
        self.written.append(response.directive.WhichOneof("directive"))


async def test_a_drained_worker_is_asked_to_stop_after_it_was_asked_to_drain() -> None:
    driver = CoreDriver(SchedulerCore(SchedulerConfig()))
    registry = WorkerRegistry(
        driver,
        lease_s=60,
        scheduler_config=SchedulerConfig(),
        step_timeout=StepTimeout(),
        on_change=lambda: None,
        dial=partial(Cluster(NO_CLUSTER).dial, WorkerServiceStub),
        counters=CoreCounters(),
        joined=lambda ranks: nullcontext(),
    )
    stream = SlowStream()
    serving = asyncio.create_task(registry.serve(None, cast(Any, stream)))
    await until(lambda: stream.written == ["serve"], "it was welcomed")
    registry.drain("g0")
    await serving
    assert stream.written == ["serve", "drain", "stop"]
    driver.close()
