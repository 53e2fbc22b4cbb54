"""`InferenceService` over gRPC. It awaits and translates; the work is done elsewhere."""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError

from pagewire.connection_errors import in_words
from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import inference_service_pb2_grpc as inference_grpc
from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.errors import Unavailable, UnknownRequest
from scheduler_service.frontend.adapter_service import AdapterService
from scheduler_service.frontend.auth import PRINCIPAL, Authentication, Principal
from scheduler_service.frontend.core_client import CoreConnection
from scheduler_service.frontend.input import processor, validation
from scheduler_service.frontend.models.frontend_model import FrontendModel
from scheduler_service.frontend.models.served_models import ModelDirectory
from scheduler_service.frontend.multiplexer import RequestMultiplexer, request_error
from scheduler_service.frontend.pooling.call import PoolingResult
from scheduler_service.frontend.pooling.service import PoolingService
from scheduler_service.frontend.request_manager import RequestManager
from scheduler_service.frontend.requests.request_stream import RequestStream
from scheduler_service.status_codes import malformed_message, rpc
from service_common.metadata import TRACEPARENT, authorization, traceparent

logger = logging.getLogger(__name__)

CORE_TIMEOUT_S = 5.0
"""How long the core may take for a snapshot or an abort."""

Context = Any
"""grpc's stubs know a context for servers with threads and another for asyncio; this is the latter.
"""

R = TypeVar("R")
Rpc: TypeAlias = Callable[["InferenceServicer", Any, Context], Awaitable[R]]
Method: TypeAlias = Callable[["InferenceServicer", Any, Context, Principal], Awaitable[R]]


def _rpc(method: Method[R]) -> Rpc[R]:
    """A gRPC method from one that also takes the caller's tenant."""

    @functools.wraps(method)
    async def wrapped(self: "InferenceServicer", request: Any, context: Context) -> R:
        TRACEPARENT.set(traceparent(context.invocation_metadata()))
        return await method(self, request, context, PRINCIPAL.get())

    return rpc(wrapped)


def _pooling(make_response: Callable[[], Any], field: str) -> Any:
    """A gRPC method that writes results to `field` of its responses as they come, and at last the
    usage."""

    async def method(
        self: "InferenceServicer", _: Any, context: Context, tenant: Principal
    ) -> None:
        read, deadline = self.reader(context), _deadline(context)
        async with self.pooling.open(read, tenant, deadline=deadline) as call:
            response = make_response()
            if isinstance(response, inference_pb.ClassifyResponse):
                response.labels.extend(call.work.labels)
            while (results := await call.next()) is not None:
                has_vectors = not call.work.is_scored
                _add_results(getattr(response, field), results, has_vectors=has_vectors)
                await context.write(response)
                response = make_response()
            response.usage.CopyFrom(call.usage)
            await context.write(response)

    method.__name__ = make_response.__name__.removesuffix("Response")
    return _rpc(method)


def _add_results(entries: Any, results: Sequence[PoolingResult], *, has_vectors: bool) -> None:
    """Add results to a field of a response."""
    for result in results:
        if result.error is not None:
            entries.add(index=result.index, error=request_error("", result.error))
        elif not has_vectors:
            entries.add(index=result.index, score=result.score, num_tokens=result.num_tokens)
        elif result.values:  # the last part of a text with one vector per token has none
            entries.add(
                index=result.index,
                values=result.values,
                num_tokens=result.num_tokens,
                first_token=result.first_token,
            )


@dataclass(eq=False)
class InferenceServicer(inference_grpc.InferenceServiceServicer):
    """Serves one frontend's clients.

    Streams are written with `context.write` rather than yielded (grpc's stubs know only the
    latter): a cancelled call then ends at once, in `finally`, not when a generator is collected.
    """

    requests: RequestManager
    models: ModelDirectory
    core: CoreConnection
    authentication: Authentication
    pooling: PoolingService
    adapters: AdapterService

    @_rpc
    async def Generate(  # type: ignore[override]
        self, request: inference_pb.GenerateRequest, context: Context, tenant: Principal
    ) -> None:
        """Stream responses; the end of the call, whatever its cause, ends the request."""
        updated = asyncio.Event()
        stream = await self.requests.open_soon(request, _deadline(context), updated.set, tenant)
        try:
            await _write_responses(stream, updated, context)
        finally:
            self.requests.close(stream)

    @_rpc
    async def GenerateMany(  # type: ignore[override]
        self, _: Any, context: Context, tenant: Principal
    ) -> None:
        """Responses and errors of all requests on the stream."""

        async def read() -> inference_pb.GenerateManyRequest | None:
            message = await context.read()
            return None if message is grpc.aio.EOF else message

        # The key may be revoked while the stream is open, so each request is authenticated.
        credentials = authorization(context.invocation_metadata())
        await RequestMultiplexer(
            self.requests, _deadline(context), lambda: self.authentication.authenticate(credentials)
        ).run(read, context.write)

    Embed = _pooling(inference_pb.EmbedResponse, "embeddings")
    """Vectors of all texts on the stream."""
    Score = _pooling(inference_pb.ScoreResponse, "scores")
    """Scores of all pairs on the stream."""
    Classify = _pooling(inference_pb.ClassifyResponse, "classifications")
    """Labels of all texts on the stream."""

    @_rpc
    async def Rank(self, _: Any, context: Context, tenant: Principal) -> inference_pb.RankResponse:
        """All documents on the stream, sorted by their scores."""
        read, deadline = self.reader(context), _deadline(context)
        answer = await self.pooling.collect_all(read, tenant, deadline=deadline)
        response = inference_pb.RankResponse(usage=answer.usage)
        _add_results(response.documents, answer.results, has_vectors=False)
        return response

    def reader(self, context: Context) -> Callable[[], Awaitable[Any]]:
        """Reads the messages of a stream, None at its end. The key may be revoked while it is open,
        so it is checked for each of them."""
        credentials = authorization(context.invocation_metadata())

        async def read() -> Any:
            try:
                message = await context.read()
            except DecodeError:
                raise malformed_message() from None
            self.authentication.authenticate(credentials)
            return None if message is grpc.aio.EOF else message

        return read

    @_rpc
    async def Abort(
        self, request: inference_pb.AbortRequest, context: Context, tenant: Principal
    ) -> inference_pb.AbortResponse:
        """End a request, of this frontend or of another."""
        if not self.requests.abort(request.request_id, tenant):
            await self._abort_elsewhere(request.request_id, tenant)
        return inference_pb.AbortResponse()

    @_rpc
    async def Tokenize(
        self, request: inference_pb.TokenizeRequest, context: Context, tenant: Principal
    ) -> inference_pb.TokenizeResponse:
        """Token ids of a text or a chat."""
        return await processor.tokenize(request, self._model(request, tenant))

    @_rpc
    async def Detokenize(
        self, request: inference_pb.DetokenizeRequest, context: Context, tenant: Principal
    ) -> inference_pb.DetokenizeResponse:
        """Text of token ids."""
        return await processor.detokenize(request, self._model(request, tenant))

    @_rpc
    async def GetModel(
        self, request: inference_pb.GetModelRequest, context: Context, tenant: Principal
    ) -> inference_pb.GetModelResponse:
        """Facts about a served model."""
        model = self._model(request, tenant)
        response = inference_pb.GetModelResponse(model=model.info)
        response.model.generation_defaults.extend(sorted(model.defaults.named))
        return response

    @_rpc
    async def LoadAdapter(
        self, request: inference_pb.LoadAdapterRequest, context: Context, tenant: Principal
    ) -> inference_pb.LoadAdapterResponse:
        """Load an adapter on all workers of a model."""
        validation.check_limits(request)
        return await self.adapters.load(request, tenant)

    @_rpc
    async def UnloadAdapter(
        self, request: inference_pb.UnloadAdapterRequest, context: Context, tenant: Principal
    ) -> inference_pb.UnloadAdapterResponse:
        """Make the name of an adapter unusable."""
        validation.check_limits(request)
        return await self.adapters.unload(request, tenant)

    @_rpc
    async def ListAdapters(
        self, request: inference_pb.ListAdaptersRequest, context: Context, tenant: Principal
    ) -> inference_pb.ListAdaptersResponse:
        """The adapters that a tenant may use."""
        return self.adapters.list(tenant)

    @_rpc
    async def GetStatus(
        self, request: inference_pb.GetStatusRequest, context: Context, tenant: Principal
    ) -> inference_pb.GetStatusResponse:
        """The core's snapshot."""
        tenant.check_operator()
        validation.check_limits(request)
        try:
            response = await self.core.stub.GetStatus(
                scheduler_pb.SchedulerServiceGetStatusRequest(detail=request.detail),
                timeout=CORE_TIMEOUT_S,
            )
        except grpc.aio.AioRpcError as error:
            raise _core_unavailable(error) from error
        return inference_pb.GetStatusResponse(status=response.status)

    @_rpc
    async def WatchStatus(  # type: ignore[override]
        self, request: inference_pb.WatchStatusRequest, context: Context, tenant: Principal
    ) -> None:
        """Stream the core's snapshots until the client or the core disconnects."""
        tenant.check_operator()
        validation.check_limits(request)
        watch = scheduler_pb.SchedulerServiceWatchStatusRequest(
            detail=request.detail, interval_ms=validation.value_or(request, "interval_ms", None)
        )
        call = self.core.stub.WatchStatus(watch)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                await context.write(inference_pb.WatchStatusResponse(status=response.status))
        except grpc.aio.AioRpcError as error:
            raise _core_unavailable(error) from error
        finally:
            call.cancel()
        raise Unavailable("the scheduler core has ended the stream; try again", reason="CORE_AWAY")

    async def _abort_elsewhere(self, request_id: str, tenant: Principal) -> None:
        abort = scheduler_pb.SchedulerServiceAbortRequest(request_id=request_id, tenant=tenant.name)
        try:
            await self.core.stub.Abort(abort, timeout=CORE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise _core_unavailable(error) from error
            raise UnknownRequest(
                f"unknown request: no request with id {request_id!r} is live",
                details={"request_id": request_id},
            ) from error

    def _model(self, request: Any, tenant: Principal) -> FrontendModel:
        """The model that a request names; unlike a generation, this does not wait for one."""
        return self.models.current(validation.value_or(request, "model", None), tenant)


async def _write_responses(stream: RequestStream, updated: asyncio.Event, context: Context) -> None:
    """Write all responses; raises the stream's error after the responses that precede it."""
    while not stream.is_done:
        await updated.wait()
        updated.clear()
        response = stream.take()
        if response is not None:
            await context.write(response)
        elif stream.error is not None:
            raise stream.error
        if stream.error is not None:
            updated.set()


def _deadline(context: Context) -> float | None:
    """The call's deadline on the monotonic clock."""
    remaining = context.time_remaining()
    return None if remaining is None else time.monotonic() + remaining


def _core_unavailable(error: grpc.aio.AioRpcError) -> Unavailable:
    why = in_words(error.details())
    return Unavailable(f"the scheduler core does not answer: {why}", reason="CORE_AWAY")
