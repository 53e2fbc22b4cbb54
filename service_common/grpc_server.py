"""A gRPC server with what every service has around its own: address, health and reflection."""

import logging
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from service_common.addresses import UNIX, ensure_free, is_local
from service_common.errors import CannotListen
from service_common.grpc_options import Options, server_options

logger = logging.getLogger(__name__)

LIVENESS = "liveness"
"""The health service's name for the process itself: SERVING until it is told to end. Whether there
is a model to serve is to be asked before sending requests, not before a restart."""


class GrpcServer:
    """A `grpc.aio` server, from `start` to `stop`; NOT_SERVING until told otherwise."""

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
        """`credentials`: None for no TLS; `knows_callers` tells whether strangers are kept out, by
        them or by the interceptors; `health_listen`: an address for health checks alone."""
        self.server = grpc.aio.server(
            options=options or server_options(), interceptors=interceptors
        )
        """Servicers are to be added to it before it starts."""
        self.address = listen
        """Where the service listens; with port 0, the port in effect once it has started."""
        self.health_address = health_listen
        """Where it answers health checks besides, of anybody and without TLS, for probes that know
        neither TLS nor credentials."""
        self._credentials = credentials
        self._knows_callers = knows_callers
        self._health_server: grpc.aio.Server | None = None
        self._service_names = ["", *service_names]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server
        )

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
        """What the health service answers for the whole process and for each service."""
        status = health_pb2.HealthCheckResponse
        for name in self._service_names:
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def leave(self) -> None:
        """Answer NOT_SERVING for good, for the process itself, too."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float | None = None) -> None:
        """Refuse new calls, give open ones `grace_s` seconds, then end them."""
        await self.leave()
        await self.server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)
        logger.info("stopped address=%s", self.address)


def warn_if_exposed(address: str, *, has_tls: bool, knows_callers: bool) -> None:
    """Say in the log what an address that other machines can reach does without."""
    if is_local(address):
        return
    if not has_tls:
        logger.warning("listening to other machines without TLS address=%s", address)
    if not knows_callers:
        logger.warning("listening to other machines without asking who calls address=%s", address)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> str:
    """The address in effect, once the server holds it."""
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
