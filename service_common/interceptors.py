"""A call's one request has to come soon after the call.

gRPC waits for it for as long as the caller likes; calls that never say what they want would hold
their places for nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from service_common.errors import DeadlineExceeded, InvalidArgument
from service_common.grpc_status import COMMON, unless_over

REQUEST_TIMEOUT_S = 30.0
"""From a call's beginning to its request, which is 16 MiB at most."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


class RequestTimeout(grpc.aio.ServerInterceptor):
    """Ends calls without a request. Servicers write streams by `context.write`."""

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
        late = f"no request came within {REQUEST_TIMEOUT_S:g} s"
        await COMMON.abort(context, DeadlineExceeded(late, reason="REQUEST_TOO_SLOW"))
    except DecodeError:
        await COMMON.abort(
            context, InvalidArgument("request", "expected a message of the method's type")
        )
    if request is grpc.aio.EOF:
        await COMMON.abort(context, InvalidArgument("request", "expected one message"))
    return request
