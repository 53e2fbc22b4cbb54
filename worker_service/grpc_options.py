"""Options of every gRPC channel and server of the worker, in one place."""

MAX_MESSAGE_BYTES = 256 * 2**20
"""Largest message: a plan that takes in thousands of long prompts."""

KEEPALIVE_INTERVAL_MS = 10_000
"""After this silence the peer is asked for a sign of life, so that a dead host is noticed."""

KEEPALIVE_TIMEOUT_MS = 5_000

_COMMON = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # A port that is taken is an error, not a share of its connections.
    ("grpc.so_reuseport", 0),
    # Let the core ask for signs of life as often as we do, with a margin.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 2),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON,
    # Straight to the address, past any `http_proxy`.
    ("grpc.enable_http_proxy", 0),
    # Registration has its own backoff; the channel should try as soon as it is asked to.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
)
