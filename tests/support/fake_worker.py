"""A worker that counts: its next token is always the last one plus one.

It holds the core to the contract of plan.proto: epochs, step numbers, and all that the simulated
worker checks of sequences and blocks. Tests decide when it answers.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import grpc

from pagewire.v1 import (
    model_pb2,
    plan_pb2,
    scheduler_service_pb2,
    status_pb2,
    worker_service_pb2,
)
from pagewire.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from pagewire.v1.worker_service_pb2_grpc import (
    WorkerServiceServicer,
    add_WorkerServiceServicer_to_server,
)
from worker_service.config import SimulationConfig
from worker_service.errors import OutOfOrder, WorkerError
from worker_service.plan import ContextPart, StepPlan, StepResult
from worker_service.service import wire
from worker_service.simulated.executor import RowResults, SimulatedRunner
from worker_service.simulated.model import VECTOR_SIZE
from worker_service.simulated.sequences import Row

VOCAB_SIZE = 1000
BLOCK_SIZE = 4
ASSETS = {"config.json": b"{}", "empty.json": b"", "tokenizer.json": bytes(range(256)) * 10_000}


def counted(last_token: int, number: int) -> list[int]:
    """The tokens that follow `last_token`."""
    return [(last_token + 1 + i) % VOCAB_SIZE for i in range(number)]


class CountingRunner(SimulatedRunner):
    """The simulated worker's runner, which refuses every wrong plan, with tokens that count."""

    def __init__(self, num_gpu_blocks: int, max_model_len: int) -> None:
        config = SimulationConfig(vocab_size=VOCAB_SIZE, max_model_len=max_model_len)
        super().__init__(
            config,
            groups=config.groups(BLOCK_SIZE),
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=0,
        )
        self.num_gpu_blocks = num_gpu_blocks
        self.contexts: list[tuple[ContextPart, ...]] = []
        """The context of each sequence so far that was no fork."""

    def execute(self, plan: StepPlan) -> StepResult:
        new_sequences = [new for new in plan.new_sequences if new.parent_seq_id is None]
        self.contexts += [new.context for new in new_sequences]
        return super().execute(plan)

    def _sample_row(self, row: Row, drafts: list[int], outcome: RowResults) -> None:
        tokens = counted(row.sequence.tokens[-1], 1)
        row.sequence.extend(tokens)
        outcome.tokens.extend(tokens)


class FakeWorker(WorkerServiceServicer):
    """A worker process's two sides, in this process: its server, and its registration."""

    def __init__(
        self,
        worker_id: str = "worker-a",
        *,
        group_id: str | None = None,
        model: str = "counter",
        fingerprint: str = "f1",
        num_gpu_blocks: int = 256,
        rank: int = 0,
        world_size: int = 1,
        samples: bool | None = None,
        dtype: str = "float32",
        max_model_len: int = 512,
        mute_assets: bool = False,
        aliases: Sequence[str] = (),
        reasoning_parser: str = "auto",
        pools: bool = False,
    ) -> None:
        self.worker_id = worker_id
        self.group_id = group_id or worker_id
        self.rank = rank
        self.world_size = world_size
        self.samples = rank == 0 if samples is None else samples
        self.tells_tokens = self.samples
        self.num_gpu_blocks = num_gpu_blocks
        self.model = model_pb2.ModelInfo(
            name=model,
            fingerprint=fingerprint,
            architecture="Counter",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            dtype=dtype,
            cache_groups=[
                model_pb2.CacheGroup(lifetime="CACHE_LIFETIME_GROWING", block_tokens=BLOCK_SIZE)
            ],
            aliases=aliases,
            uses_cuda_graphs=True,
            weights="Q4_1",
            cache_layout="growing of 4 tokens (cpu), 0.0% unused",
            reasoning_parser=reasoning_parser,
            pooling={"vector_size": VECTOR_SIZE, "types": [1, 2, 3, 4]} if pools else None,
            work_kinds=["WORK_KIND_POOLING", "WORK_KIND_GENERATION"] if pools else [],
        )
        self.epochs: list[int] = []
        """Of each InitializeCache."""
        self.plans: list[plan_pb2.StepPlan] = []
        """As they arrived."""
        self.num_plan_messages = 0
        self.num_results = 0
        self.broken_promises: list[str] = []
        self.num_asset_calls = 0
        self.mute_assets = mute_assets
        self.answer_first_as_epoch: int | None = None
        """Sends the first result once more, before the real one, as of this epoch."""
        self.answer_next_as_step: int | None = None
        """Reports this step number in the next result, once."""
        self.refuses_to: str | None = None
        """The rpc for which it says that it can never serve, if any."""
        self.directives: list[str] = []
        """Kinds of directives, and errors that ended a registration, as they came."""
        self.stop_reason: str | None = None
        self.runner = CountingRunner(num_gpu_blocks, max_model_len)
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.may_initialize = asyncio.Event()
        self.may_initialize.set()
        self.heartbeat_state = status_pb2.WORKER_STATE_READY
        self.address = ""
        self.advertise: str | None = None
        """The address to register, when it is not the real one."""
        self.num_infos = 0
        self.num_profiles = 0
        self.busy_us = 0
        """What it says of itself when it is asked."""
        self.last_epoch = 0
        """Of another core."""
        self.may_read = asyncio.Event()
        """Whether a step stream that begins reads its plans."""
        self.may_read.set()
        self._server: grpc.aio.Server | None = None
        self._stream_broken = asyncio.Event()
        self._registration: asyncio.Task[None] | None = None
        self._sends_heartbeats = True

    async def start(self, core_address: str, *, last_epoch: int = 0) -> None:
        """Listen, and register with the core."""
        if self._server is None:
            await self.listen()
        self.register(core_address, last_epoch=last_epoch)

    async def listen(self) -> None:
        """Serve on a free port."""
        self._server = grpc.aio.server()
        add_WorkerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def register(self, core_address: str, *, last_epoch: int = 0) -> None:
        """Open a registration stream, as after losing one."""
        self._registration = asyncio.create_task(self._register(core_address, last_epoch))

    async def kill(self) -> None:
        """End at once, without a word."""
        await self.unregister()
        if self._server is not None:
            await self._server.stop(None)

    async def unregister(self) -> None:
        """Break the registration stream."""
        if self._registration is not None:
            self._registration.cancel()
            with suppress(asyncio.CancelledError):
                await self._registration

    def silence(self) -> None:
        """Send no heartbeats any more, as a process that hangs."""
        self._sends_heartbeats = False

    def resume(self) -> None:
        """Undo `silence`; takes effect on the next registration."""
        self._sends_heartbeats = True

    def break_stream(self) -> None:
        """End the step stream with an error, as a fenced or failing engine does."""
        self._stream_broken.set()

    def hold_results(self) -> None:
        """Keep results back until `may_answer` is set."""
        self.may_answer.clear()

    def registration(self, *, last_epoch: int = 0) -> scheduler_service_pb2.WorkerRegistration:
        """Its registration message."""
        return scheduler_service_pb2.WorkerRegistration(
            worker_id=self.worker_id,
            group_id=self.group_id,
            rank=self.rank,
            world_size=self.world_size,
            samples=self.samples,
            address=self.advertise or self.address,
            model=self.model,
            last_epoch=last_epoch,
            version="test",
        )

    async def _register(self, core_address: str, last_epoch: int) -> None:
        async with grpc.aio.insecure_channel(core_address) as channel:
            call = SchedulerServiceStub(channel).RegisterWorker(wait_for_ready=True)
            await self._beat(call, self.registration(last_epoch=last_epoch))
            beating = asyncio.create_task(self._keep_beating(call))
            try:
                async for response in call:
                    self._obey(response.directive)
            except grpc.aio.AioRpcError as error:
                # After a stop, the stream may end while a heartbeat is on its way, which is an
                # error of the stream and none of the worker.
                if self.stop_reason is None:
                    self.directives.append(f"error: {error.code().name}")
            finally:
                beating.cancel()

    def _obey(self, directive: scheduler_service_pb2.WorkerDirective) -> None:
        kind = directive.WhichOneof("directive") or ""
        self.directives.append(kind)
        if kind == "stop":
            self.stop_reason = directive.stop.reason

    async def _beat(self, call: Any, registration: Any = None) -> None:
        heartbeat = scheduler_service_pb2.WorkerHeartbeat(
            registration=registration, state=self.heartbeat_state
        )
        await call.write(scheduler_service_pb2.RegisterWorkerRequest(heartbeat=heartbeat))

    async def _keep_beating(self, call: Any) -> None:
        with suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            while self._sends_heartbeats:
                await asyncio.sleep(0.03)
                await self._beat(call)

    async def GetInfo(
        self, request: worker_service_pb2.GetInfoRequest, context: Any
    ) -> worker_service_pb2.GetInfoResponse:
        self.num_infos += 1
        return worker_service_pb2.GetInfoResponse(
            worker_id=self.worker_id,
            model=self.model,
            last_epoch=max([self.last_epoch, *self.epochs]),
            busy_us=self.busy_us,
        )

    async def GetModelAssets(
        self, request: object, context: Any
    ) -> AsyncIterator[worker_service_pb2.WorkerServiceGetModelAssetsResponse]:
        self.num_asset_calls += 1
        if self.mute_assets:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no assets here")
        for name, data in ASSETS.items():
            for start in range(0, max(1, len(data)), 100_000):
                chunk = model_pb2.ModelAssetChunk(
                    file_name=name, data=data[start : start + 100_000]
                )
                yield worker_service_pb2.WorkerServiceGetModelAssetsResponse(chunk=chunk)

    async def ProfileBlocks(
        self, request: worker_service_pb2.ProfileBlocksRequest, context: Any
    ) -> worker_service_pb2.ProfileBlocksResponse:
        self.num_profiles += 1
        if self.num_gpu_blocks < 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room for a KV block")
        if self.refuses_to == "ProfileBlocks":
            reason = "the largest batch cannot be computed"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        return worker_service_pb2.ProfileBlocksResponse(num_gpu_blocks=self.num_gpu_blocks)

    async def InitializeCache(
        self, request: worker_service_pb2.InitializeCacheRequest, context: Any
    ) -> worker_service_pb2.InitializeCacheResponse:
        await self.may_initialize.wait()
        if self.refuses_to == "InitializeCache":
            reason = "decode steps cannot be captured"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
        if request.epoch <= max(self.epochs, default=0):
            await context.abort(grpc.StatusCode.ABORTED, "an epoch must be greater than any before")
        self.epochs.append(request.epoch)
        self.runner = CountingRunner(request.num_gpu_blocks, self.model.max_model_len)
        return worker_service_pb2.InitializeCacheResponse()

    async def ExecuteSteps(self, _requests: object, context: Any) -> None:  # type: ignore[override]
        self._stream_broken.clear()
        results: asyncio.Queue[plan_pb2.StepResult] = asyncio.Queue()
        tasks = [
            asyncio.create_task(self._read_plans(context, results)),
            asyncio.create_task(self._write_results(context, results)),
            asyncio.create_task(self._stream_broken.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
        if self._stream_broken.is_set():
            await context.abort(grpc.StatusCode.ABORTED, "the test broke the stream")

    async def _read_plans(self, context: Any, results: Any) -> None:
        step_id = 0
        await self.may_read.wait()
        while (request := await context.read()) is not grpc.aio.EOF:
            self.num_plan_messages += 1
            for plan in request.plans:
                step_id += 1
                self.plans.append(plan)
                try:
                    executed = self._execute(plan, step_id)
                except WorkerError as error:
                    self.broken_promises.append(repr(error))
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, repr(error))
                for result in self._results(executed):
                    results.put_nowait(result)

    def _execute(self, plan: plan_pb2.StepPlan, step_id: int) -> plan_pb2.StepResult:
        if (plan.epoch, plan.step_id) != (self.epochs[-1], step_id):
            raise OutOfOrder(f"expected step {step_id} of epoch {self.epochs[-1]}, got {plan}")
        return wire.encode_result(self.runner.execute(wire.decode_plan(plan, 0)))

    def _results(self, executed: plan_pb2.StepResult) -> list[plan_pb2.StepResult]:
        result = plan_pb2.StepResult(
            epoch=executed.epoch,
            step_id=executed.step_id,
            token_ids=executed.token_ids if self.tells_tokens else b"",
            vectors=executed.vectors,
            timings=plan_pb2.StepTimings(started_us=1, finished_us=2),
        )
        if self.answer_next_as_step is not None:
            result.step_id, self.answer_next_as_step = self.answer_next_as_step, None
        if self.answer_first_as_epoch is None:
            return [result]
        stale = plan_pb2.StepResult()
        stale.CopyFrom(result)
        stale.epoch, self.answer_first_as_epoch = self.answer_first_as_epoch, None
        return [stale, result]

    async def _write_results(self, context: Any, results: Any) -> None:
        while True:
            result = await results.get()
            await self.may_answer.wait()
            await context.write(worker_service_pb2.ExecuteStepsResponse(results=[result]))
            self.num_results += 1
