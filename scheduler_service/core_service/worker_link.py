"""The core's line to one worker: dial, size and make its cache, step, and dial again.

    GetInfo ──▶ ProfileBlocks, once ──▶ InitializeCache(epoch) ──▶ ExecuteSteps ──▶ drained
       ▲                                                                │
       └────────────── a greater epoch, after a pause ◀─── broken ──────┘

While the worker's lease holds, the link tries again; when the lease ends, the link is cancelled.
Either way the group's sequences go back to the core's queue at once.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

import grpc

from pagewire.v1 import scheduler_service_pb2 as pb
from pagewire.v1 import status_pb2
from pagewire.v1 import worker_service_pb2 as worker_pb
from pagewire.v1.worker_service_pb2_grpc import WorkerServiceStub
from scheduler_service.core.config import GroupCapacity, SchedulerConfig
from scheduler_service.core.pipeline import ResultMismatch
from scheduler_service.core_service.driver import CoreDriver
from scheduler_service.core_service.step_stream import LinkFailed, StepStream
from scheduler_service.errors import PagewireError
from scheduler_service.grpc_options import channel_options

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
"""For what a worker answers without work."""

PROFILE_TIMEOUT_S = 600.0
"""For a forward pass of the largest batch, and for making the caches."""

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 5.0
STABLE_AFTER_S = 30.0
"""A stream that lasted this long was sound: after it the pauses start short again."""


class CannotServe(Exception):
    """The worker is sound, but this core can never use it; trying again would not help."""


class WorkerLink:
    """From the first call to a registered worker to its last step."""

    def __init__(
        self,
        registration: pb.WorkerRegistration,
        driver: CoreDriver,
        config: SchedulerConfig,
        on_change: Callable[[], None],
    ) -> None:
        """`on_change` is called whenever `state` has changed."""
        self.state = status_pb2.WORKER_STATE_STARTING
        self.epoch = registration.last_epoch
        self._registration = registration
        self._group_id = registration.group_id
        self._driver = driver
        self._config = config
        self._on_change = on_change
        self._num_former_steps = 0
        self._blocks: worker_pb.ProfileBlocksResponse | None = None
        self._stream: StepStream | None = None
        self._draining = asyncio.Event()

    @property
    def is_draining(self) -> bool:
        """Whether the worker takes nothing new."""
        return self._draining.is_set()

    @property
    def num_steps(self) -> int:
        """Steps executed since the worker registered."""
        return self._num_former_steps + (self._stream.num_steps if self._stream else 0)

    def drain(self) -> None:
        """Take nothing new; `run` returns when what runs is done."""
        self._draining.set()
        if self._stream is not None:
            self._stream.drain()
            self._driver.drain_group(self._group_id)
            self._set_state(status_pb2.WORKER_STATE_DRAINING)

    async def run(self) -> None:
        """Keep the worker busy until it is drained; raises CannotServe."""
        address, pause_s = self._registration.address, MIN_PAUSE_S
        async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
            stub = WorkerServiceStub(channel)
            while not self._draining.is_set():
                started_at = self._driver.clock()
                failure = await self._try_session(stub)
                if failure is None:
                    break
                if self._driver.clock() - started_at > STABLE_AFTER_S:
                    pause_s = MIN_PAUSE_S
                await self._pause(failure, pause_s)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)

    async def _try_session(self, stub: WorkerServiceStub) -> str | None:
        """One try, from dialling to drained; why it failed, or None."""
        self._set_state(status_pb2.WORKER_STATE_STARTING)
        try:
            await self._execute_steps(stub, await self._prepare(stub))
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name} {error.details()}"
        except (LinkFailed, ResultMismatch, PagewireError) as error:
            return str(error)
        except CannotServe:
            raise
        except Exception as error:
            logger.exception("unexpected error in a worker's link group_id=%s", self._group_id)
            return f"unexpected {type(error).__name__}"
        return None

    async def _prepare(self, stub: WorkerServiceStub) -> GroupCapacity:
        """Draw a new epoch and have the caches made for it."""
        info = await stub.GetInfo(worker_pb.GetInfoRequest(), timeout=CALL_TIMEOUT_S)
        if info.worker_id != self._registration.worker_id:
            raise LinkFailed(
                f"{self._registration.address} is worker {info.worker_id}, "
                f"not {self._registration.worker_id}: does --advertise name this worker?"
            )
        blocks = self._blocks = self._blocks or await self._profile_blocks(stub)
        self.epoch = max(self.epoch, info.last_epoch) + 1
        await stub.InitializeCache(
            worker_pb.InitializeCacheRequest(
                num_gpu_blocks=blocks.num_gpu_blocks,
                num_cpu_blocks=blocks.num_cpu_blocks,
                epoch=self.epoch,
            ),
            timeout=PROFILE_TIMEOUT_S,
        )
        return self._capacity(blocks)

    async def _profile_blocks(self, stub: WorkerServiceStub) -> worker_pb.ProfileBlocksResponse:
        """What fits, measured once: it costs a forward pass, and memory does not change."""
        request = worker_pb.ProfileBlocksRequest(
            max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
        )
        try:
            blocks = await stub.ProfileBlocks(request, timeout=PROFILE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:  # its memory will not grow
                raise CannotServe(error.details()) from error
            raise
        if blocks.num_gpu_blocks < 1:
            raise CannotServe("not a single block fits into the worker's memory")
        return blocks

    def _capacity(self, blocks: worker_pb.ProfileBlocksResponse) -> GroupCapacity:
        model = self._registration.model
        try:
            return GroupCapacity(
                group_id=self._group_id,
                model=model.name,
                num_gpu_blocks=blocks.num_gpu_blocks,
                num_cpu_blocks=blocks.num_cpu_blocks,
                block_size=model.block_size,
                max_model_len=model.max_model_len,
                vocab_size=model.vocab_size,
            )
        except ValueError as error:
            raise CannotServe(str(error)) from error

    async def _execute_steps(self, stub: WorkerServiceStub, capacity: GroupCapacity) -> None:
        """Step until drained. However this ends, the core knows that the group is gone."""
        if self._draining.is_set():
            return
        call = stub.ExecuteSteps()
        self._stream = StepStream(
            call,
            self._driver,
            group_id=self._group_id,
            epoch=self.epoch,
        )
        try:
            work = self._add_group(capacity)
            self._set_state(status_pb2.WORKER_STATE_READY)
            logger.info(
                "group ready group_id=%s worker_id=%s epoch=%d num_gpu_blocks=%d",
                self._group_id,
                self._registration.worker_id,
                self.epoch,
                capacity.num_gpu_blocks,
            )
            await self._stream.run(work)
        finally:
            call.cancel()
            self._num_former_steps, self._stream = self.num_steps, None
            self._driver.remove_group(self._group_id)
            self._set_state(status_pb2.WORKER_STATE_LOST)

    def _add_group(self, capacity: GroupCapacity) -> asyncio.Event:
        try:
            return self._driver.add_group(capacity)
        except ValueError as error:
            raise CannotServe(str(error)) from error

    async def _pause(self, failure: str, pause_s: float) -> None:
        logger.warning(
            "worker link failed group_id=%s worker_id=%s epoch=%d retry_in_s=%g reason=%s",
            self._group_id,
            self._registration.worker_id,
            self.epoch,
            pause_s,
            failure,
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._draining.wait()

    def _set_state(self, state: status_pb2.WorkerState.ValueType) -> None:
        if state != self.state:
            self.state = state
            self._on_change()
