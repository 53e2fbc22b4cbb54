"""gRPC server interceptors: authentication by metadata, and a timeout for a call's one request.

gRPC waits for the request of a call without a limit; calls that never send one would occupy
concurrent streams.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from service_common.errors import DeadlineExceeded, InvalidArgument, Unauthenticated
from service_common.grpc_status import COMMON, unless_over

REQUEST_TIMEOUT_S = 30.0
"""Time limit from a call's start to its request, which has at most 16 MiB."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class RequestTimeoutInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls that send no request. Servicers write streams by `context.write`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        handler: Any = await continuation(details)
        if handler is None or handler.request_streaming:
            return handler

        async def serve(_: Any, context: Any) -> None:
            request = await _request(context)
            if handler.response_streaming:
                await handler.unary_stream(request, context)
            else:
                response = await handler.unary_unary(request, context)
                with unless_over():
                    await context.write(response)

        return grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )


async def _request(context: Any) -> Any:
    try:
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            request = await context.read()
    except TimeoutError:
        late = f"no request was received within {REQUEST_TIMEOUT_S:g} s"
        await COMMON.abort(context, DeadlineExceeded(late, reason="REQUEST_TOO_SLOW"))
    except InvalidArgument as error:  # by a handler that checks messages before it parses them
        await COMMON.abort(context, error)
    except DecodeError:
        await COMMON.abort(
            context, InvalidArgument("request", "expected a message of the method's type")
        )
    if request is grpc.aio.EOF:
        await COMMON.abort(context, InvalidArgument("request", "expected one message"))
    return request


Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

HEALTH = f"/{health.SERVICE_NAME}/"
REFLECTION = f"/{reflection.SERVICE_NAME}/"


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Admits calls for which `check` does not raise, and all calls of open services."""

    def __init__(self, check: Callable[[Metadata], object], open_services: tuple[str, ...]) -> None:
        """`check` raises Unauthenticated; `open_services` are paths such as HEALTH."""
        self._check = check
        self._open_services = open_services

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        if not details.method.startswith(self._open_services):
            try:
                self._check(details.invocation_metadata)
            except Unauthenticated as error:
                return _refusal(error)
        return await continuation(details)


def _refusal(error: Unauthenticated) -> Handler:
    """A handler that ends a call of any kind at once: a stream handler reads no message first."""

    async def refuse(_: Any, context: Any) -> None:
        await COMMON.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
