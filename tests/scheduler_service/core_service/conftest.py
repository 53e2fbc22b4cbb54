"""A scheduler core on a free port, with workers and frontends that tests control."""

from collections.abc import AsyncIterator

import grpc
import pytest

from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from scheduler_service.core.config import SchedulerConfig
from scheduler_service.core_service.config import CoreServiceConfig
from scheduler_service.core_service.service import CoreService, make_core_service
from tests.support.fake_worker import FakeWorker
from tests.support.waiting import until


@pytest.fixture
def lease_ms() -> int:
    """So long that a machine that is busy loses no worker; tests of leases ask for less."""
    return 60_000


@pytest.fixture
async def service(lease_ms: int) -> AsyncIterator[CoreService]:
    config = CoreServiceConfig(
        listen="127.0.0.1:0",
        lease_ms=lease_ms,
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=16),
    )
    async with make_core_service(config) as service:
        yield service


@pytest.fixture
async def core(service: CoreService) -> AsyncIterator[SchedulerServiceStub]:
    """A stub for what operators call."""
    async with grpc.aio.insecure_channel(service.address) as channel:
        yield SchedulerServiceStub(channel)


class Fleet:
    """Starts fake workers for one core, and ends them."""

    def __init__(self, core_address: str) -> None:
        self._core_address = core_address
        self._workers: list[FakeWorker] = []

    async def start(self, worker: FakeWorker, *, last_epoch: int = 0) -> FakeWorker:
        """Start a worker and wait until the core welcomed or refused it."""
        self._workers.append(worker)
        await worker.start(self._core_address, last_epoch=last_epoch)
        await until(lambda: worker.directives, "the core answered the worker")
        return worker

    async def close(self) -> None:
        for worker in self._workers:
            await worker.kill()
        assert [worker.broken_promises for worker in self._workers] == [[]] * len(self._workers)


@pytest.fixture
async def fleet(service: CoreService) -> AsyncIterator[Fleet]:
    fleet = Fleet(service.address)
    yield fleet
    await fleet.close()
