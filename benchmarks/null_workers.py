"""Many worker groups in one process that compute nothing.

They respond to each plan as soon as its step would have ended, with as many tokens as it samples,
and check nothing. They use a fraction of the processor time that the core spends on a step, so that
the core is the bottleneck.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from benchmarks.core_and_workers import MODEL
from pagewire.v1 import model_pb2, plan_pb2, status_pb2
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)

NUM_GPU_BLOCKS = 16384
_HEARTBEAT_S = 0.25
_INT32_BYTES = 4
_TOKENS = (7).to_bytes(_INT32_BYTES, "little") * 8192


class AnsweringWorker(WorkerServiceServicer):
    """One group."""

    def __init__(
        self, name: str, address: str, step_us: int, num_gpu_blocks: int = NUM_GPU_BLOCKS
    ) -> None:
        self.address = address
        self._name = name
        self._step_us = step_us
        self._num_gpu_blocks = num_gpu_blocks
        self._last_epoch = 0
        self._model = model_pb2.ModelInfo(
            name=MODEL,
            fingerprint="answering",
            architecture="None",
            max_model_len=32768,
            vocab_size=32000,
            dtype="float32",
            block_size=16,
        )

    async def register(self, core: str) -> None:
        """Stay registered until the core is gone."""
        async with grpc.aio.insecure_channel(core) as channel:
            call = SchedulerServiceStub(channel).RegisterWorker(wait_for_ready=True)
            registration = scheduler_pb.WorkerRegistration(
                worker_id=self._name,
                group_id=self._name,
                world_size=1,
                samples=True,
                address=self.address,
                model=self._model,
                version="benchmark",
            )
            while True:
                heartbeat = scheduler_pb.WorkerHeartbeat(
                    registration=registration, state=status_pb2.WORKER_STATE_READY
                )
                await call.write(scheduler_pb.RegisterWorkerRequest(heartbeat=heartbeat))
                registration = None
                await asyncio.sleep(_HEARTBEAT_S)

    async def GetInfo(self, request: object, context: object) -> pb.GetInfoResponse:
        """The worker's identity."""
        return pb.GetInfoResponse(
            worker_id=self._name, model=self._model, last_epoch=self._last_epoch
        )

    async def GetModelAssets(
        self, request: object, context: object
    ) -> AsyncIterator[pb.WorkerServiceGetModelAssetsResponse]:
        """A single file: the load has no text."""
        chunk = model_pb2.ModelAssetChunk(file_name="config.json", data=b"{}")
        yield pb.WorkerServiceGetModelAssetsResponse(chunk=chunk)

    async def ProfileBlocks(self, request: object, context: object) -> pb.ProfileBlocksResponse:
        """A fixed number of blocks, by default more than the load needs."""
        return pb.ProfileBlocksResponse(num_gpu_blocks=self._num_gpu_blocks)

    async def InitializeCache(
        self, request: pb.InitializeCacheRequest, context: object
    ) -> pb.InitializeCacheResponse:
        """Start a new epoch."""
        self._last_epoch = request.epoch
        return pb.InitializeCacheResponse()

    async def ExecuteSteps(self, _: object, context: Any) -> None:  # type: ignore[override]
        """Answer plans, one after the other."""
        finished_us = 0
        while (request := await context.read()) is not grpc.aio.EOF:
            received_us = _now_us()
            started_us = max(received_us, finished_us)
            finished_us = started_us + self._step_us
            if self._step_us:
                await asyncio.sleep(max(0, finished_us - _now_us()) / 1e6)
            await context.write(_answer(request.plan, received_us, started_us, finished_us))


def _answer(
    plan: plan_pb2.StepPlan, received_us: int, started_us: int, finished_us: int
) -> pb.ExecuteStepsResponse:
    num_sampled = sum(plan.sample) if plan.sample else len(plan.seq_ids) // _INT32_BYTES
    result = plan_pb2.StepResult(
        epoch=plan.epoch,
        step_id=plan.step_id,
        token_ids=_TOKENS[: num_sampled * _INT32_BYTES],
        timings=plan_pb2.StepTimings(
            received_us=received_us, started_us=started_us, finished_us=finished_us
        ),
    )
    return pb.ExecuteStepsResponse(result=result)


def _now_us() -> int:
    return time.monotonic_ns() // 1000


async def serve(core: str, workers: Sequence[AnsweringWorker]) -> None:
    """Run them all until the core is gone."""
    servers = [grpc.aio.server() for _ in workers]  # one without a reference to it would end
    for worker, server in zip(workers, servers, strict=True):
        add_WorkerServiceServicer_to_server(worker, server)
        server.add_insecure_port(worker.address)
        await server.start()
    await asyncio.gather(*(worker.register(core) for worker in workers))


def main() -> None:
    """Groups `first` to `first + groups - 1`, on unix sockets in a folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--core", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--groups", type=int, required=True)
    parser.add_argument("--step-us", type=int, required=True)
    parser.add_argument("--gpu-blocks", type=int, default=NUM_GPU_BLOCKS)
    args = parser.parse_args()
    names = [f"worker-{index:03}" for index in range(args.first, args.first + args.groups)]
    workers = [
        AnsweringWorker(name, f"unix:{args.folder}/{name}.sock", args.step_us, args.gpu_blocks)
        for name in names
    ]
    asyncio.run(serve(args.core, workers))


if __name__ == "__main__":
    main()
