"""A worker process driven by the core service's own step stream, with the worker's timestamps kept.

The benchmark replaces the core's process: the real driver and the real step stream, over
gRPC on a unix socket. Registration is left out; the only addition is the call that keeps
the timestamps of the results.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from pagewire.v1 import plan_pb2, sampling_pb2
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.core import (
    EngineOutputs,
    Request,
    SchedulerConfig,
    SchedulerCore,
    WorkerGroupCapacity,
)
from scheduler_service.core_service.counters import StepCounters
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.step_stream import StepStream
from scheduler_service.core_service.step_watchdog import StepTimeout, StepTimes
from scheduler_service.tasks import run_until_first
from service_common.grpc_options import channel_options
from tools.launch import Service, module

GROUP = "g"
FRONTEND = "f"
START_TIMEOUT_S = 60.0
END_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Sequences that run together, all of one shape."""

    num_seqs: int
    prompt_tokens: int
    output_tokens: int

    def request(self, index: int, model: str) -> Request:
        """One of them; nothing but its length ends it."""
        return Request(
            frontend_id=FRONTEND,
            handle=index + 1,
            request_id=str(index),
            model=model,
            prompt_token_ids=[10 + index] * self.prompt_tokens,
            max_tokens=self.output_tokens,
            sampling=sampling_pb2.SamplerParams(top_p=1.0, repetition_penalty=1.0),
        )


class ObservedCall:
    """An `ExecuteSteps` call that keeps the timings of all results."""

    def __init__(self, call: Any) -> None:
        self.timings: list[plan_pb2.StepTimings] = []
        self.num_written_at_result: list[int] = []
        """Plans that had left when each result came in."""
        self._call = call
        self._num_written = 0

    async def write(self, request: worker_pb.ExecuteStepsRequest) -> None:
        """Send a plan."""
        self._num_written += 1
        await self._call.write(request)

    async def read(self) -> Any:
        """The next result, or EOF."""
        response = await self._call.read()
        if response is not grpc.aio.EOF:
            self.timings.append(response.result.timings)
            self.num_written_at_result.append(self._num_written)
        return response

    async def code(self) -> grpc.StatusCode:
        """The status of a call that has ended."""
        code: grpc.StatusCode = await self._call.code()
        return code

    async def details(self) -> str:
        """What is said about it."""
        details: str = await self._call.details()
        return details


class Ends:
    """A frontend that only waits until all of its requests have ended."""

    def __init__(self, num_requests: int) -> None:
        self.all_ended = asyncio.Event()
        self._num_left = num_requests

    def deliver(self, outbox: EngineOutputs) -> None:
        """Count the ends."""
        for _, error in outbox.requests_failed:
            raise error
        self._num_left -= len(outbox.requests_finished)
        if self._num_left == 0:
            self.all_ended.set()


class ObservedWorker:
    """A worker process on a unix socket; an asynchronous context manager."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self._address = f"unix:{folder}/worker.sock"
        command = module("worker_service", "--listen", self._address, *flags)
        self._service = Service("worker", command, folder / "worker.log")
        self._epoch = 0

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address, options=channel_options())
        self._stub = WorkerServiceStub(self._channel)
        async with asyncio.timeout(START_TIMEOUT_S):
            self._info = await self._wait_loaded()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()
        await asyncio.to_thread(self._service.end, END_TIMEOUT_S)

    async def _wait_loaded(self) -> worker_pb.GetInfoResponse:
        while True:
            try:
                return await self._stub.GetInfo(worker_pb.GetInfoRequest(), wait_for_ready=True)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.05)

    async def run(self, load: Load, *, pipeline_depth: int) -> ObservedCall:
        """Run all sequences from first to last token, together; what was observed."""
        self._epoch += 1
        capacity = self._capacity(load)
        await self._stub.InitializeCache(
            worker_pb.InitializeCacheRequest(
                num_gpu_blocks=capacity.num_gpu_blocks, num_cpu_blocks=0, epoch=self._epoch
            )
        )
        config = SchedulerConfig(
            max_num_seqs=load.num_seqs,
            max_num_batched_tokens=load.num_seqs * (load.prompt_tokens + 1),
            watermark=0.0,
            pipeline_depth=pipeline_depth,
        )
        driver = CoreDriver(SchedulerCore(config))
        ends = Ends(load.num_seqs)
        driver.add_frontend(FRONTEND, ends)
        for index in range(load.num_seqs):
            driver.core.submit(load.request(index, capacity.model), driver.clock())
        driver.follow_up()
        call = self._stub.ExecuteSteps()
        try:
            return await self._execute(ObservedCall(call), driver, capacity, ends)
        finally:
            call.cancel()
            driver.close()

    async def _execute(
        self, call: ObservedCall, driver: CoreDriver, capacity: WorkerGroupCapacity, ends: Ends
    ) -> ObservedCall:
        """Step until all requests have ended. Raises what ends the stream before."""
        work = driver.add_worker_group(capacity)
        stream = StepStream(
            [call],  # type: ignore[list-item]
            driver,
            group_id=GROUP,
            epoch=self._epoch,
            sampler=0,
            times=StepTimes(StepTimeout()),
            meter=StepCounters(),
        )
        await run_until_first(stream.run(work), ends.all_ended.wait())
        return call

    def _capacity(self, load: Load) -> WorkerGroupCapacity:
        """Room for all of a load's sequences."""
        model = self._info.model
        blocks_each = -(-(load.prompt_tokens + load.output_tokens) // model.block_size)
        return WorkerGroupCapacity(
            worker_group_id=GROUP,
            model=model.name,
            num_gpu_blocks=blocks_each * load.num_seqs,
            num_cpu_blocks=0,
            block_size=model.block_size,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
        )
