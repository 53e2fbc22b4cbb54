"""A registry over HTTP in Prometheus' text format, whatever else the caller would take.

The client library's OpenMetrics writes samples named `vllm:…` as `vllm_…` (prometheus-client 0.26,
`openmetrics/exposition.py`: it escapes a sample's name as it does a label's), and OpenMetrics is
what Prometheus 2 asks for first.
"""

import socket
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_text(registry: CollectorRegistry) -> bytes:
    """All that is told now."""
    return generate_latest(registry)


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each scrape: a slow reader holds up no other."""

    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = 30.0
    """Seconds that a caller may take to ask."""

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


def start_metrics_server(
    port: int, host: str, registry: CollectorRegistry
) -> tuple[WSGIServer, Thread]:
    """A server, and the thread that it runs on. Raises OSError."""
    answer = make_wsgi_app(registry)

    def in_text_format(environ: "WSGIEnvironment", start: "StartResponse") -> Any:
        environ.pop("HTTP_ACCEPT", None)
        return answer(environ, start)

    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    kind = _Server6 if family == socket.AF_INET6 else _Server
    server = make_server(host, port, in_text_format, kind, handler_class=_Handler)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return server, thread
