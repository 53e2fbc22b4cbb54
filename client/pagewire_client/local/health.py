"""Asks a service whether it serves, by the standard `grpc.health.v1` protocol."""

import socket

import grpc

# HealthCheckResponse{status: SERVING}: field 1, varint 1. The empty request asks for the whole
# server. Two bytes are no reason for the client to depend on the protocol's package.
_SERVING = b"\x08\x01"


def is_serving(address: str, timeout_s: float = 1.0) -> bool:
    """Whether a service answers at `address` and can do its work."""
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        try:
            return bool(check(b"", timeout=timeout_s) == _SERVING)
        except grpc.RpcError:
            return False


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
