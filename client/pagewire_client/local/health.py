"""Asks a service whether it serves, by the standard `grpc.health.v1` protocol."""

import socket

import grpc

# HealthCheckResponse{status: SERVING}: field 1, varint 1. Two bytes are no reason for the client to
# depend on the protocol's package.
_SERVING = b"\x08\x01"


def is_serving(address: str, timeout_s: float = 1.0, service: str = "") -> bool:
    """Whether what answers at `address` can do its work.

    `service`: one of its services, or `liveness` for the process itself; by default all of it.
    """
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return bool(check(_request(service), timeout=timeout_s) == _SERVING)
        except grpc.RpcError:
            return False


def _request(service: str) -> bytes:
    """HealthCheckRequest{service}: field 1, its length (one byte will do for a name), its bytes."""
    name = service.encode()[:127]
    return b"\x0a" + bytes([len(name)]) + name


def is_taken(address: str, timeout_s: float = 1.0) -> bool:
    """Whether somebody listens at `address`, whoever it is."""
    try:
        if address.startswith("unix:"):
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(timeout_s)
                probe.connect(address.removeprefix("unix:").removeprefix("//"))
        else:
            host, _, port = address.rpartition(":")
            host = host.removeprefix("[").removesuffix("]")
            socket.create_connection((host, int(port)), timeout_s).close()
    except (OSError, ValueError):  # what is no address at all is the service's to refuse
        return False
    return True
