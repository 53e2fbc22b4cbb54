"""The `WorkerService` RPCs; errors become statuses with details."""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import wraps
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from pagewire.v1 import model_pb2, plan_pb2
from pagewire.v1 import worker_service_pb2 as pb
from pagewire.v1 import worker_service_pb2_grpc as pb_grpc
from service_common.errors import PagewireError
from service_common.grpc_status import Statuses, cancel_if_ended
from worker_service import errors
from worker_service.config import WorkerConfig
from worker_service.engine.engine import Engine
from worker_service.engine.executor import ModelFacts
from worker_service.engine.step_stream import StepStream
from worker_service.errors import InvalidPlan, StepFailed, WorkerError
from worker_service.load_progress import LoadProgress
from worker_service.plan import monotonic_us
from worker_service.service import wire
from worker_service.service.adapters import AdapterTable
from worker_service.service.block_connection import data_parts, digest_parts, memory_for

logger = logging.getLogger(__name__)


STATUS_CODES: dict[type[PagewireError], grpc.StatusCode] = {
    errors.WorkerError: grpc.StatusCode.INTERNAL,
    errors.InvalidOption: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ModelNotFound: grpc.StatusCode.NOT_FOUND,
    errors.UnsupportedModel: grpc.StatusCode.FAILED_PRECONDITION,
    errors.BadCheckpoint: grpc.StatusCode.FAILED_PRECONDITION,
    errors.OutOfMemory: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.ProfilingFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CaptureFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NotReady: grpc.StatusCode.UNAVAILABLE,
    errors.InvalidPlan: grpc.StatusCode.INVALID_ARGUMENT,
    errors.OutOfOrder: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AdapterNotFound: grpc.StatusCode.NOT_FOUND,
    errors.BadAdapter: grpc.StatusCode.FAILED_PRECONDITION,
    errors.AdaptersFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.LeaseDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.StaleTable: grpc.StatusCode.ABORTED,
    errors.WorkerRejected: grpc.StatusCode.UNAVAILABLE,
    errors.StaleEpoch: grpc.StatusCode.ABORTED,
    errors.GroupBroken: grpc.StatusCode.ABORTED,
    errors.DeviceLost: grpc.StatusCode.UNAVAILABLE,
    errors.StepFailed: grpc.StatusCode.INTERNAL,
}

_STATUSES = Statuses(STATUS_CODES)

to_status = _STATUSES.status
abort = _STATUSES.abort


ASSET_CHUNK_BYTES = 2**20


def _translates_errors(rpc: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Ends a call with the status of the WorkerError it raised; any other exception is a bug."""

    @wraps(rpc)
    async def translated(
        self: "WorkerServicer", request: Any, context: grpc.aio.ServicerContext
    ) -> Any:
        try:
            with cancel_if_ended():
                return await rpc(self, request, context)
        except WorkerError as error:
            logger.warning("call refused rpc=%s error=%s", rpc.__name__, error)
            if isinstance(error, StepFailed | errors.ProfilingFailed):
                self._engine.model.suspect_device()
            await abort(context, error)
        except (grpc.aio.AbortError, asyncio.CancelledError):
            raise
        except DecodeError:
            await abort(context, _no_message())
        except Exception as error:
            logger.exception("call failed rpc=%s", rpc.__name__)
            self._engine.model.suspect_device()
            await abort(context, StepFailed(f"{rpc.__name__} failed: {type(error).__name__}"))

    return translated


def model_info(config: WorkerConfig, facts: ModelFacts) -> model_pb2.ModelInfo:
    """The facts of the loaded model, with what the worker's options say of it."""
    info = wire.encode_model_info(facts, config.model_name, config.model_aliases)
    info.reasoning_parser = config.reasoning_parser
    info.tool_call_parser = config.tool_call_parser
    if config.adapters.enable_lora:
        info.max_loras = config.adapters.max_loras
    return info


CACHED_ENTRIES_PER_MESSAGE = 4096
"""A message of these is far below the largest allowed one."""


class WorkerServicer(pb_grpc.WorkerServiceServicer):
    """The rpcs that the core calls."""

    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        adapters: AdapterTable,
        progress: LoadProgress,
    ) -> None:
        """progress: of the engine's load."""
        self._config = config
        self._engine = engine
        self._adapters = adapters
        self._progress = progress

    @_translates_errors
    async def GetInfo(
        self, request: pb.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetInfoResponse:
        facts = self._engine.model.facts
        return pb.GetInfoResponse(
            worker_id=self._config.network.worker_id,
            model=model_info(self._config, facts),
            device=facts.device,
            attention_backend=facts.attention_backend,
            pid=os.getpid(),
            num_weight_loads=self._engine.model.num_weight_loads,
            last_epoch=self._engine.last_epoch,
            busy_us=round(self._engine.model.thread.busy_s * 1e6),
            num_speculative_tokens=facts.num_speculative_tokens,
            moves_blocks=bool(facts.cache_groups),
        )

    # The streaming rpcs write to the context instead of yielding, so that they are coroutines
    # whose `finally` runs the moment a call is cancelled.
    @_translates_errors
    async def GetModelAssets(  # type: ignore[override]
        self, request: pb.WorkerServiceGetModelAssetsRequest, context: grpc.aio.ServicerContext
    ) -> None:
        files = self._progress.files  # which may be there before the model is loaded
        assets = self._engine.model.assets() if files is None else iter(files.contents.items())
        for name, content in await asyncio.to_thread(lambda: list(assets)):
            for start in range(0, max(len(content), 1), ASSET_CHUNK_BYTES):
                data = content[start : start + ASSET_CHUNK_BYTES]
                chunk = model_pb2.ModelAssetChunk(file_name=name, data=data)
                await context.write(pb.WorkerServiceGetModelAssetsResponse(chunk=chunk))

    @_translates_errors
    async def ProfileBlocks(
        self, request: pb.ProfileBlocksRequest, context: grpc.aio.ServicerContext
    ) -> pb.ProfileBlocksResponse:
        counts = await self._engine.profile_blocks(
            request.max_num_seqs, request.max_num_batched_tokens
        )
        return pb.ProfileBlocksResponse(
            num_gpu_blocks=counts.num_gpu_blocks, num_cpu_blocks=counts.num_cpu_blocks
        )

    @_translates_errors
    async def InitializeCache(
        self, request: pb.InitializeCacheRequest, context: grpc.aio.ServicerContext
    ) -> pb.InitializeCacheResponse:
        await self._engine.initialize_cache(
            request.num_gpu_blocks, request.num_cpu_blocks, request.epoch
        )
        return pb.InitializeCacheResponse(keeps_blocks=bool(self._engine.model.facts.cache_groups))

    @_translates_errors
    async def GetCachedBlocks(  # type: ignore[override]
        self, request: pb.GetCachedBlocksRequest, context: grpc.aio.ServicerContext
    ) -> None:
        key_seed, entries, sequences = await self._engine.cached_blocks(request.epoch)
        for start in range(0, len(entries), CACHED_ENTRIES_PER_MESSAGE):
            chunk = entries[start : start + CACHED_ENTRIES_PER_MESSAGE]
            blocks = wire.encode_cached_blocks(chunk)
            await context.write(pb.GetCachedBlocksResponse(blocks=blocks, key_seed=key_seed))
        for sequence in sequences:
            kept = wire.encode_kept_sequence(sequence)
            await context.write(pb.GetCachedBlocksResponse(sequences=[kept], key_seed=key_seed))

    @_translates_errors
    async def ExecuteSteps(  # type: ignore[override]
        self, request: AsyncIterator[pb.ExecuteStepsRequest], context: grpc.aio.ServicerContext
    ) -> None:
        first = await anext(request, None)
        if first is None:
            return
        stream = self._engine.open_stream(_plans_of(first)[0].epoch)
        reader = asyncio.create_task(_read_plans(first, request, stream))
        try:
            async for results in stream.results():
                response = pb.ExecuteStepsResponse(results=map(wire.encode_result, results))
                await context.write(response)
        finally:
            reader.cancel()
            self._engine.close_stream(stream)

    @_translates_errors
    async def ReadBlocks(  # type: ignore[override]
        self, request: pb.ReadBlocksRequest, context: grpc.aio.ServicerContext
    ) -> None:
        wanted = wire.decode_read_request(request)
        blocks = await self._engine.leased_blocks(wanted)
        memory = memory_for(blocks, wanted.reader)
        parts = data_parts(blocks) if memory is None else digest_parts(blocks)
        following = asyncio.create_task(asyncio.to_thread(next, parts, None))
        try:
            if memory is not None:  # from which the reader copies while the blocks are digested
                await context.write(pb.ReadBlocksResponse(memory=memory))
            while (part := await following) is not None:
                following = asyncio.create_task(asyncio.to_thread(next, parts, None))
                await context.write(part)
        finally:
            following.cancel()

    @_translates_errors
    async def LoadAdapter(
        self, request: pb.WorkerServiceLoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> pb.WorkerServiceLoadAdapterResponse:
        info = await self._adapters.load(request.path)
        return pb.WorkerServiceLoadAdapterResponse(adapter=info)

    @_translates_errors
    async def GetAdapter(  # type: ignore[override]
        self, request: pb.GetAdapterRequest, context: grpc.aio.ServicerContext
    ) -> None:
        for data in self._engine.model.adapters.chunks(request.digest):
            await context.write(pb.GetAdapterResponse(data=data))

    @_translates_errors
    async def PutAdapter(
        self, request: AsyncIterator[pb.PutAdapterRequest], context: grpc.aio.ServicerContext
    ) -> pb.PutAdapterResponse:
        chunks = (message.data async for message in request)
        return pb.PutAdapterResponse(adapter=await self._adapters.put(chunks))

    @_translates_errors
    async def SetAdapters(
        self, request: pb.SetAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> pb.SetAdaptersResponse:
        return pb.SetAdaptersResponse(missing=await self._adapters.replace(request.adapters))

    @_translates_errors
    async def StartProfile(
        self, request: pb.StartProfileRequest, context: grpc.aio.ServicerContext
    ) -> pb.StartProfileResponse:
        await self._engine.model.start_profile()
        return pb.StartProfileResponse()

    @_translates_errors
    async def StopProfile(
        self, request: pb.StopProfileRequest, context: grpc.aio.ServicerContext
    ) -> pb.StopProfileResponse:
        return pb.StopProfileResponse(path=await self._engine.model.stop_profile())


async def _read_plans(
    first: pb.ExecuteStepsRequest,
    rest: AsyncIterator[pb.ExecuteStepsRequest],
    stream: StepStream,
) -> None:
    """Submit plans as they arrive. A bad one ends the stream, after the results due before it."""
    try:
        await _submit(first, stream)
        async for message in rest:
            await _submit(message, stream)
    except WorkerError as error:
        stream.finish(error)
    except DecodeError:
        stream.finish(_no_message())
    except Exception as error:
        logger.exception("reading plans failed epoch=%d", stream.epoch)
        stream.finish(StepFailed(f"reading plans failed: {type(error).__name__}"))
    else:
        stream.finish()


async def _submit(message: pb.ExecuteStepsRequest, stream: StepStream) -> None:
    received_us = monotonic_us()
    for plan in _plans_of(message):
        await stream.submit(wire.decode_plan(plan, received_us))


def _plans_of(message: pb.ExecuteStepsRequest) -> Sequence[plan_pb2.StepPlan]:
    """The plans in a message. Raises InvalidPlan if there are none."""
    if not message.plans:
        raise InvalidPlan("plans", "expected at least one plan")
    return message.plans


def _no_message() -> InvalidPlan:
    return InvalidPlan("request", "expected messages of the method's type")
