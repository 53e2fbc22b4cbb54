"""The gRPC server interceptor of all services: who may call, and how a request is received.

gRPC waits for the request of a call without a limit; calls that never send one would occupy
concurrent streams.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from grpc_health.v1 import health

from service_common.errors import DeadlineExceeded, InvalidArgument, Unauthenticated
from service_common.grpc_status import COMMON, cancel_if_ended

REQUEST_TIMEOUT_S = 30.0
"""Time limit from a call's start to its request, which has at most 16 MiB."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

HEALTH = f"/{health.SERVICE_NAME}/"
REFLECTION = "/grpc.reflection."
"""Prefix of the reflection service in every version."""


class CallGuard(grpc.aio.ServerInterceptor):
    """Refuses callers without credentials, messages that are too costly to parse, and calls that
    send no request in time. Servicers write streams by `context.write`."""

    def __init__(
        self,
        *,
        check_caller: Callable[[Metadata], object] | None = None,
        open_services: tuple[str, ...] = (HEALTH,),
        check_message: Callable[[bytes, Descriptor], None] | None = None,
    ) -> None:
        """`check_caller` raises Unauthenticated, before a call's messages are read; callers of
        `open_services`, paths such as HEALTH, need no credentials. `check_message` raises
        InvalidArgument for a serialized message of the type described."""
        self._check_caller = check_caller
        self._open_services = open_services
        self._check_message = check_message
        self._handlers: dict[str, Handler] = {}
        """The handlers of the methods that were called, with what this adds to them."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        if self._check_caller and not details.method.startswith(self._open_services):
            try:
                self._check_caller(details.invocation_metadata)
            except Unauthenticated as error:
                return _refusal(error)
        if (known := self._handlers.get(details.method)) is not None:
            return known
        handler: Any = await continuation(details)
        if handler is None:
            return None
        if self._check_message:
            handler = _checking(handler, self._check_message)
        if not handler.request_streaming:
            handler = _awaiting_request(handler)
        self._handlers[details.method] = handler
        return handler


def _refusal(error: Unauthenticated) -> Handler:
    """A handler that ends a call of any kind at once: a stream handler reads no message first."""

    async def refuse(_: Any, context: Any) -> None:
        await COMMON.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _checking(handler: Any, check_message: Callable[[bytes, Descriptor], None]) -> Any:
    """The handler, with each message checked before it is parsed."""
    message_type = getattr(handler.request_deserializer, "__self__", None)
    if message_type is None:
        return handler

    def deserialize(data: bytes) -> Any:
        check_message(data, message_type.DESCRIPTOR)
        return message_type.FromString(data)

    return handler._replace(request_deserializer=deserialize)


def _awaiting_request(handler: Any) -> Handler:
    """A handler that waits for its one request no longer than REQUEST_TIMEOUT_S."""

    async def serve(_: Any, context: Any) -> None:
        request = await _request(context)
        if handler.response_streaming:
            await handler.unary_stream(request, context)
        else:
            response = await handler.unary_unary(request, context)
            with cancel_if_ended():
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
    except InvalidArgument as error:  # by `check_message`
        await COMMON.abort(context, error)
    except DecodeError:
        await COMMON.abort(
            context, InvalidArgument("request", "expected a message of the method's type")
        )
    if request is grpc.aio.EOF:
        await COMMON.abort(context, InvalidArgument("request", "expected one message"))
    return request
