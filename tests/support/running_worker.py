"""A whole worker on this event loop, on a free port, with a counting model in it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from pagewire.v1 import plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from service_common.cluster import NO_CLUSTER, Cluster, ClusterConfig
from service_common.grpc_options import channel_options
from tests.support.counting_model import CountingModel, loaded_counting_model
from worker_service.config import CacheConfig, ModelConfig, NetworkConfig, WorkerConfig
from worker_service.errors import WorkerError
from worker_service.load_progress import LoadProgress
from worker_service.loader import LoadedModel
from worker_service.runner.torch_executor import Profiler, TorchExecutor
from worker_service.service.lifecycle import Worker, make_worker

BLOCK_SIZE = 4
NUM_BLOCKS = 64


@dataclass
class RunningWorker:
    """A worker and a stub that reaches it."""

    worker: Worker
    stub: WorkerServiceStub
    channel: grpc.aio.Channel
    task: asyncio.Task[None]

    async def initialize(self, epoch: int, num_gpu_blocks: int = NUM_BLOCKS) -> None:
        """Make the caches."""
        await self.stub.InitializeCache(
            pb.InitializeCacheRequest(num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=4, epoch=epoch)
        )


class Steps:
    """A step stream, seen from the core's side."""

    def __init__(self, stub: WorkerServiceStub) -> None:
        self._call = stub.ExecuteSteps()

    async def send(self, *plans: plan_pb2.StepPlan) -> None:
        """Send plans without waiting for results."""
        for plan in plans:
            await self._call.write(pb.ExecuteStepsRequest(plans=[plan]))

    async def send_together(self, *plans: plan_pb2.StepPlan) -> None:
        """Send plans in one message."""
        await self._call.write(pb.ExecuteStepsRequest(plans=plans))

    async def result(self) -> plan_pb2.StepResult:
        """The next result, which comes alone."""
        (result,) = await self.results()
        return result

    async def results(self) -> list[plan_pb2.StepResult]:
        """Those of the next message."""
        response = await self._call.read()
        assert response is not grpc.aio.EOF, "the stream ended"
        return list(response.results)

    async def error(self) -> grpc.aio.AioRpcError:
        """The error that ends the stream, after any results still due."""
        try:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error
        raise AssertionError(f"the stream ended with {await self._call.code()}")

    async def finish(self) -> grpc.StatusCode:
        """Say that there are no more plans; the stream's status."""
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass
        code: grpc.StatusCode = await self._call.code()
        return code

    def cancel(self) -> None:
        """Break the stream off."""
        self._call.cancel()


@asynccontextmanager
async def running_worker(
    model: CountingModel | None = None,
    *,
    load: Callable[[], LoadedModel] | None = None,
    core: str | None = None,
    listen: str = "127.0.0.1:0",
    advertise: str | None = None,
    grace_period_s: float = 10.0,
    profile_dir: Path | None = None,
    executor: type[TorchExecutor] = TorchExecutor,
    progress: LoadProgress | None = None,
    cluster: ClusterConfig = NO_CLUSTER,
) -> AsyncIterator[RunningWorker]:
    """A worker that serves, or, with `load`, is about to load."""
    config = WorkerConfig(
        model=ModelConfig(model="counting"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        network=NetworkConfig(
            listen=listen, advertise=advertise, core=core, group_id="group", cluster=cluster
        ),
        grace_period_s=grace_period_s,
        profile_dir=None if profile_dir is None else str(profile_dir),
    )
    load_or_count = load or (lambda: loaded_counting_model(model, block_size=BLOCK_SIZE))
    worker = make_worker(
        config, executor(config.cache, Profiler(profile_dir), load_or_count), progress
    )
    task = asyncio.create_task(worker.run())
    waiting = asyncio.create_task((worker.listening if load else worker.ready).wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        await task
    member = Cluster(cluster)
    async with member.channel(str(worker.address), channel_options()) as channel:
        yield RunningWorker(worker, member.stub(WorkerServiceStub, channel), channel, task)
    if not task.done():
        worker.end_at_once()
        with suppress(WorkerError):
            await asyncio.wait_for(task, 60)
