"""Options of every gRPC channel and server of the worker, in one place."""

MAX_MESSAGE_BYTES = 256 * 2**20
"""Largest message: a plan that takes in thousands of long prompts."""

MAX_METADATA_BYTES = 16 * 2**10
"""Most metadata of a call."""

HANDSHAKE_TIMEOUT_MS = 10_000
"""Time in which a connection must have become one of gRPC's, TLS included."""

KEEPALIVE_MS = 5_000
"""Time in which nothing came from a peer after which it is pinged."""

KEEPALIVE_TIMEOUT_MS = 5_000
"""Time after which a peer that does not answer pings, or acknowledge data, counts as gone."""

MIN_PING_INTERVAL_MS = 1_000
"""Pings of a core that come this far apart are never held against it."""

Options = tuple[tuple[str, int | str], ...]


def keepalive_options(
    interval_ms: int = KEEPALIVE_MS, timeout_ms: int = KEEPALIVE_TIMEOUT_MS
) -> Options:
    """Have either end of a connection notice, by itself, that the other is gone or unreachable.

    After `keepalive_timeout_ms` without an answer gRPC calls a connection dead only if the ping's
    own timeout is not longer, and that is a minute unless set.
    """
    return (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.http2.max_pings_without_data", 0),
    )


_COMMON = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    *keepalive_options(),
)

SERVER_OPTIONS: Options = (
    *_COMMON,
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    # A port that is taken is an error, not a share of its connections.
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    ("grpc.keepalive_permit_without_calls", 1),
)

CHANNEL_OPTIONS: Options = (
    *_COMMON,
    # Straight to the address, past any `http_proxy`.
    ("grpc.enable_http_proxy", 0),
    # Registration has its own backoff; the channel should try as soon as it is asked to.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
)
