"""Options of every gRPC channel and server of the services; set nowhere else."""

from typing import Any

MAX_MESSAGE_BYTES = 256 << 20
"""Largest message between the services: a plan that adds thousands of long prompts."""

MAX_FRAME_BYTES = 2**24 - 1
"""Largest frame of a connection for much data, instead of 16 KiB: a third more bytes per second."""

IDLE_TIMEOUT_MS = 60_000
"""Time without a call after which a connection for much data is closed; the next call opens it
again."""

MAX_METADATA_BYTES = 16 << 10
"""Maximum size of a call's metadata, in bytes."""

HANDSHAKE_TIMEOUT_MS = 10_000
"""Time limit for the handshake of a connection, including TLS."""

KEEPALIVE_MS = 5_000
"""Time without data from a peer after which it is pinged."""

KEEPALIVE_TIMEOUT_MS = 5_000
"""Time after which a peer that answers no pings, or acknowledges no data, counts as dead."""

MIN_PING_INTERVAL_MS = 1_000
"""Pings at this interval or longer are never treated as abuse. None of the gRPC libraries in use
pings more often."""

CONNECT_TIMEOUT_MS = 2_000
"""Time limit for an attempt to connect: several round trips on a slow link, one of them repeated.
An attempt that is refused fails at once."""

MAX_RECONNECT_BACKOFF_MS = 500
"""Longest backoff between two attempts to connect, so that a restarted process is found soon."""

Options = list[tuple[str, Any]]


def keepalive_options() -> Options:
    """Options by which each end of a connection detects that the other is dead or unreachable.

    After `keepalive_timeout_ms` without an answer, gRPC closes a connection only if the ping's own
    timeout is not longer, which is a minute by default.
    """
    return [
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def server_options(*, max_receive_bytes: int = MAX_MESSAGE_BYTES) -> Options:
    """Options of a server whose callers may send messages up to `max_receive_bytes`.

    `so_reuseport` is off, so that a second process on the same port is an error instead of a
    process that silently gets some of the connections.
    """
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
        # Clients that use other gRPC libraries may ping while they have no calls.
        ("grpc.keepalive_permit_without_calls", 1),
        *keepalive_options(),
    ]


def channel_options() -> Options:
    """Options of a channel to another service.

    It connects directly, bypassing any `http_proxy`, and shares no connection or backoff with other
    channels, so that a new channel connects at once.
    """
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *keepalive_options(),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
    ]
