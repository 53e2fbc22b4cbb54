"""The worker's gRPC server: its own service, health and reflection."""

import logging

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagewire.v1 import worker_service_pb2, worker_service_pb2_grpc
from worker_service.address import Address, TcpAddress, check_free, is_local
from worker_service.cluster import Cluster
from worker_service.errors import CannotListen
from worker_service.grpc_options import SERVER_OPTIONS
from worker_service.servicer import WorkerServicer

logger = logging.getLogger(__name__)

LIVENESS = "liveness"
"""The health service's name for the process itself: SERVING from first to last, while it loads and
drains, too. What is not alive is restarted; what does not serve is sent nothing."""

SERVICE_NAME: str = worker_service_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name


class Server:
    """Listens from `start` to `stop`; says NOT_SERVING until told otherwise."""

    def __init__(self, servicer: WorkerServicer, cluster: Cluster) -> None:
        self._cluster = cluster
        self._health = health.aio.HealthServicer()
        self._health_server: grpc.aio.Server | None = None
        self._server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=cluster.gates())
        worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    async def start(self, address: Address) -> Address:
        """Listen. Returns the address with the real port. Raises CannotListen."""
        check_free(address)
        try:
            port = self._cluster.add_port(self._server, str(address))
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}: {error}") from None
        self._warn_if_exposed(address)
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return TcpAddress(address.host, port) if isinstance(address, TcpAddress) else address

    async def start_health_checks(self, address: Address) -> None:
        """Answer health checks at an address of their own, of anybody and without TLS, for probes
        that know neither TLS nor credentials. Raises CannotListen."""
        check_free(address)
        self._health_server = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
        try:
            self._health_server.add_insecure_port(str(address))
        except RuntimeError as error:
            raise CannotListen(f"cannot listen on {address}: {error}") from None
        await self._health_server.start()
        logger.info("listening for health checks address=%s", address)

    def _warn_if_exposed(self, address: Address) -> None:
        if is_local(address):
            return
        if not self._cluster.has_certificates:
            logger.warning("listening to other machines without TLS address=%s", address)
        if not self._cluster.has_credentials:
            logger.warning(
                "listening to other machines without asking who calls address=%s", address
            )

    async def set_serving(self, is_serving: bool) -> None:
        """What health checks are told."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if is_serving else status.NOT_SERVING
        for name in ("", SERVICE_NAME):
            await self._health.set(name, value)

    async def stop(self, grace_s: float) -> None:
        """Stop listening; calls under way have `grace_s` seconds left."""
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)
