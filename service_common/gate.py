"""Refuses calls by their metadata, before anything of their messages is read."""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from service_common.errors import Unauthenticated
from service_common.grpc_status import COMMON

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"

HEALTH = f"/{health.SERVICE_NAME}/"
REFLECTION = f"/{reflection.SERVICE_NAME}/"


class Gate(grpc.aio.ServerInterceptor):
    """Lets calls by for which `check` raises nothing, and all of services that are open."""

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
    """A handler that ends a call of any kind at once: one for streams reads no message first."""

    async def refuse(_: Any, context: Any) -> None:
        await COMMON.abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
