"""`--metrics-port`: an HTTP server for Prometheus, on a thread of its own."""

import logging

from prometheus_client import CollectorRegistry

from service_common.metrics_http import start_metrics_server
from worker_service.address import TcpAddress, check_free
from worker_service.errors import CannotListen

logger = logging.getLogger(__name__)


class MetricsServer:
    """Answers `GET /metrics` until it is closed."""

    def __init__(self, address: TcpAddress, registry: CollectorRegistry) -> None:
        """Listen. Raises CannotListen."""
        check_free(address)
        try:
            self._server, self._thread = start_metrics_server(address.port, address.host, registry)
        except OSError as error:
            raise CannotListen(f"cannot listen on {address}: {error.strerror}") from error
        self.address = TcpAddress(address.host, self._server.server_port)
        """Where it listens, with the port in effect."""
        logger.info("listening for prometheus address=%s", self.address)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
