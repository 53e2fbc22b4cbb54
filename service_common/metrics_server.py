"""Metrics for Prometheus: their text, and the server at `--metrics-port`, on threads of its own.

The text is in Prometheus' own format, whatever the caller accepts. The client library's OpenMetrics
writes samples named `vllm:…` as `vllm_…` (prometheus-client 0.26,
`openmetrics/exposition.py`: it escapes a sample's name as it does a label's), and OpenMetrics is
the first choice of Prometheus 2.
"""

import logging
import socket
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app

from service_common.addresses import ensure_free, split_host_port
from service_common.errors import CannotListen

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

logger = logging.getLogger(__name__)

LOOPBACK, OFF = "127.0.0.1", "off"

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(registry: CollectorRegistry) -> bytes:
    """The current values as text."""
    return generate_latest(registry)


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
    """Serves `GET /metrics` until it is closed."""

    def __init__(self, address: str, registry: CollectorRegistry) -> None:
        """Listen at HOST:PORT. Raises CannotListen."""
        ensure_free(address)
        try:
            self._server = _make_server(*split_host_port(address), registry)
        except OSError as error:
            raise CannotListen(address, (error.strerror or str(error)).lower()) from error
        self._thread = Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.address = f"{address.rpartition(':')[0]}:{self._server.server_port}"
        """The address, with the port in effect."""
        logger.info("listening for prometheus address=%s", self.address)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """One thread per scrape: a slow reader delays no other."""

    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 30.0
    """Seconds that a caller may take to send its request."""

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


def _make_server(host: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    """A listening server. Raises OSError."""
    answer = make_wsgi_app(registry)

    def in_text_format(environ: "WSGIEnvironment", start: "StartResponse") -> Any:
        environ.pop("HTTP_ACCEPT", None)
        return answer(environ, start)

    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    kind = _Server6 if family == socket.AF_INET6 else _Server
    return make_server(host, port, in_text_format, kind, handler_class=_Handler)
