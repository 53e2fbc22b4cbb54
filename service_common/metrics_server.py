"""`--metrics-port`: an HTTP server for Prometheus, on a thread of its own."""

import logging

from prometheus_client import CollectorRegistry

from service_common.addresses import ensure_free, split_host_port
from service_common.errors import CannotListen
from service_common.metrics_http import start_metrics_server

logger = logging.getLogger(__name__)

LOOPBACK, OFF = "127.0.0.1", "off"


def metrics_address(text: str | None) -> str | None:
    """HOST:PORT of `PORT`, which is on loopback, or `HOST:PORT`; None of `off`, or without any.

    Raises ValueError.
    """
    if text is None or text == OFF:
        return None
    address = text if ":" in text else f"{LOOPBACK}:{text}"
    try:
        split_host_port(address)
    except ValueError:
        raise ValueError(f"metrics_port: {text!r}: expected PORT, HOST:PORT or off") from None
    return address


class MetricsServer:
    """Answers `GET /metrics` until it is closed."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Listen at HOST:PORT. Raises CannotListen."""
        ensure_free(address)
        host, port = split_host_port(address)
        try:
            self._server, self._thread = start_metrics_server(port, host, registry)
        except OSError as error:
            raise CannotListen(address, (error.strerror or str(error)).lower()) from error
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_port}"
        """Where it listens, with the port in effect."""
        logger.info("listening for prometheus address=%s", self.address)

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
