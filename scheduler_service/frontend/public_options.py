"""Options of the gRPC server that strangers can reach."""

from service_common.grpc_options import Options, server_options

MAX_PUBLIC_MESSAGE_BYTES = 16 << 20
"""Largest message a client may send: a prompt of four million token ids."""

MAX_PUBLIC_STREAMS = 1024
"""Open calls of one client's connection; more of them wait at the client."""

MAX_PUBLIC_IDLE_MS = 900_000
"""Time after which a client's connection without calls is closed; a client that comes back opens
another by itself."""


def public_server_options(*, max_connections: int) -> Options:
    """Options of a server that strangers can reach."""
    return [
        *server_options(max_receive_bytes=MAX_PUBLIC_MESSAGE_BYTES),
        ("grpc.max_concurrent_streams", MAX_PUBLIC_STREAMS),
        ("grpc.max_connection_idle_ms", MAX_PUBLIC_IDLE_MS),
        ("grpc.max_allowed_incoming_connections", max_connections),
    ]
