"""A gRPC server with what every service needs: address, health checks and reflection."""

import logging
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from service_common.addresses import UNIX, ensure_free, is_local
from service_common.errors import CannotListen
from service_common.grpc_options import Options, server_options

logger = logging.getLogger(__name__)

REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"
LIVENESS = "liveness"
"""The health service's name for the process itself: SERVING until shutdown begins. A missing model
does not change it, because that is no reason to restart the process."""


class GrpcServer:
    """A `grpc.aio` server, from `start` to `stop`; NOT_SERVING until `set_serving`."""

    def __init__(
        self,
        *,
        listen: str,
        service_names: Sequence[str],
        options: Options | None = None,
        credentials: grpc.ServerCredentials | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        knows_callers: bool = False,
        health_listen: str | None = None,
    ) -> None:
        """`credentials`: None for no TLS; `knows_callers`: whether they or the interceptors
        authenticate callers; `health_listen`: an address for health checks only."""
        self.server = grpc.aio.server(
            options=options or server_options(), interceptors=interceptors
        )
        """The server, to which servicers are added before `start`."""
        self.address = listen
        """The address; with port 0, the port in effect once the server has started."""
        self.health_address = health_listen
        """An additional address for health checks without TLS or credentials."""
        self._credentials = credentials
        self._knows_callers = knows_callers
        self._health_server: grpc.aio.Server | None = None
        self._service_names = ["", *service_names]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        _enable_reflection(self.server, [*service_names, health.SERVICE_NAME])

    async def start(self) -> None:
        """Listen; raises CannotListen."""
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        self.address = _bind(self.server, self.address, self._credentials)
        await self._start_health_server()
        await self.server.start()
        logger.info("listening address=%s", self.address)
        warn_if_exposed(
            self.address, has_tls=self._credentials is not None, knows_callers=self._knows_callers
        )

    async def _start_health_server(self) -> None:
        if self.health_address is None:
            return
        self._health_server = grpc.aio.server(options=server_options())
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
        self.health_address = _bind(self._health_server, self.health_address, None)
        await self._health_server.start()
        logger.info("listening for health checks address=%s", self.health_address)

    async def set_serving(self, serving: bool) -> None:
        """Set the health of the whole process and of each service."""
        status = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def leave(self) -> None:
        """Report NOT_SERVING from now on, also for the process itself."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls, let open ones finish for `grace_s` seconds, then cancel them."""
        await self.leave()
        await self.server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)
        logger.info("stopped address=%s", self.address)


def warn_if_exposed(address: str, *, has_tls: bool, knows_callers: bool) -> None:
    """Warn if an address that other machines can reach has no TLS or authentication."""
    if is_local(address):
        return
    if not has_tls:
        logger.warning("listening to other machines without TLS address=%s", address)
    if not knows_callers:
        logger.warning("listening to other machines without authentication address=%s", address)


def _enable_reflection(server: grpc.aio.Server, service_names: Sequence[str]) -> None:
    """Serve reflection in both versions, whose messages have the same fields; grpcio has code for
    the older one only."""
    names = [*service_names, reflection.SERVICE_NAME, REFLECTION_V1]
    reflection.enable_server_reflection(names, server)
    method = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handler = grpc.method_handlers_generic_handler(REFLECTION_V1, {"ServerReflectionInfo": method})
    server.add_generic_rpc_handlers((handler,))


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    """The address in effect, once the server listens on it."""
    ensure_free(address)
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise CannotListen(address, "the address cannot be used") from error
    if address.startswith(UNIX):
        return address
    return f"{address.rpartition(':')[0]}:{port}"
