"""Asks a service whether it serves, by the standard `grpc.health.v1` protocol."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from pagewire.connection_errors import HTTP_1, in_words
from pagewire_client.connection import TlsOptions
from pagewire_client.retry import Deadline

# HealthCheckResponse{status: SERVING}: field 1, varint 1. For two bytes the client need not
# depend on the protocol's package.
_SERVING = b"\x08\x01"
HTTP = HTTP_1


_NO_PROXY = ("grpc.enable_http_proxy", 0)


@contextmanager
def serving_checks(address: str, interval_s: float) -> Iterator[Callable[[], bool]]:
    """A function that returns whether the service at `address` is serving, for repeated calls.

    They share a connection, since making one takes longer than a check. `interval_s`: between
    attempts to connect as long as nothing listens there.
    """
    interval_ms = round(interval_s * 1000)
    bounds = (f"grpc.{bound}_reconnect_backoff_ms" for bound in ("initial", "min", "max"))
    options = [_NO_PROXY, *((bound, interval_ms) for bound in bounds)]
    with grpc.insecure_channel(address, options) as channel:
        yield lambda: _refusal(channel, timeout_s=1.0, service="") is None


def refusal_to_serve(
    address: str, timeout_s: float = 1.0, service: str = "", tls: TlsOptions | None = None
) -> str | None:
    """Why the service at `address` is not serving, for the user; None if it is.

    `service`: one of its gRPC services, or `liveness` for the process itself; by default all.
    """
    options = [_NO_PROXY]
    with (
        grpc.insecure_channel(address, options)
        if tls is None
        else grpc.secure_channel(address, tls.credentials(), options)
    ) as channel:
        return _refusal(channel, timeout_s, service)


def _refusal(channel: grpc.Channel, timeout_s: float, service: str) -> str | None:
    check = channel.unary_unary("/grpc.health.v1.Health/Check")
    try:
        answer = check(_request(service), timeout=Deadline(timeout_s).remaining_s())
    except grpc.RpcError as error:
        return _in_words(error, timeout_s, service)
    return None if answer == _SERVING else "it responds, but has nothing to serve (yet)"


def _in_words(error: grpc.RpcError, timeout_s: float, service: str) -> str:
    match error.code():
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {timeout_s:g} s"
        case grpc.StatusCode.NOT_FOUND:
            return f"it has no service {service!r}"
        case _:
            return in_words(error.details() or error.code().name)


def _request(service: str) -> bytes:
    """HealthCheckRequest{service}: field 1, its length (one byte suffices), its bytes."""
    name = service.encode()[:127]
    return b"\x0a" + bytes([len(name)]) + name


def attempts(address: str, timeout_s: float = 1.0) -> list[str]:
    """How each network address of HOST:PORT answers, in words; empty for another address."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    return [f"  {place[0]}: {_outcome(family, place, timeout_s)}" for family, *_, place in found]


def _outcome(family: int, place: tuple[Any, ...], timeout_s: float) -> str:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(timeout_s)
            probe.connect(place)
            probe.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            is_http = probe.recv(7) == b"HTTP/1."
    except OSError as error:
        return (error.strerror or "no answer").lower()
    return HTTP if is_http else "something else answers"


def is_taken(address: str, timeout_s: float = 1.0) -> bool:
    """Whether any process of this machine listens at `address`."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(timeout_s)
                probe.connect(address.removeprefix("unix:").removeprefix("//"))
        else:
            host, _, port = address.rpartition(":")
            host = host.removeprefix("[").removesuffix("]")
            # From the address itself, which the system refuses if it is another machine's.
            socket.create_connection((host, int(port)), timeout_s, source_address=(host, 0)).close()
    except (OSError, ValueError):  # the service refuses malformed addresses
        return False
    return True
