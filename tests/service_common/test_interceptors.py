"""Calls whose one request is read, and answered, by the interceptor."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from service_common.interceptors import CallGuard


class Context:
    """Of a call whose caller sends a request, and goes before the answer."""

    async def read(self) -> str:
        return "request"

    async def write(self, response: object) -> None:
        raise grpc.aio.InternalError("the call is over")


async def test_a_caller_that_goes_before_its_answer_is_cancelled() -> None:
    async def echo(request: object, context: object) -> object:
        return request

    async def find(details: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(echo)

    details: Any = SimpleNamespace(method="/a/B")
    handler: Any = await CallGuard().intercept_service(find, details)
    with pytest.raises(asyncio.CancelledError):
        await handler.stream_stream(None, Context())
