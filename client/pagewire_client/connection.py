"""Server addresses, TLS, API keys, call metadata, and channels."""

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

import grpc

from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub

logger = logging.getLogger(__name__)


Address: TypeAlias = str
"""`HOST:PORT` or `unix:PATH`."""

Metadata: TypeAlias = tuple[tuple[str, str], ...]

DEFAULT_ADDRESS: Address = "127.0.0.1:7600"

_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    # A peer that disappeared silently is detected, but only while calls are open. A ping has a
    # timeout of its own, and the longer of the two applies.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    # The first retries reach a server that restarts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Channels of one process to one address do not share a connection's backoff.
    ("grpc.use_local_subchannel_pool", 1),
)


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """How to use TLS. By default, the system's root certificates verify the server."""

    root_certificates: Path | str | None = None
    """PEM file with the certificates that may sign the server's."""
    certificate_chain: Path | str | None = None
    """PEM file with this client's certificate, if the server requires one."""
    private_key: Path | str | None = None
    """PEM file with that certificate's key."""
    server_name: str | None = None
    """The name in the server's certificate, if it is not the address's host."""

    def __post_init__(self) -> None:
        if (self.certificate_chain is None) != (self.private_key is None):
            raise ValueError("certificate_chain and private_key belong together: give both")

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files; raises OSError for one that cannot be read."""
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.root_certificates),
            private_key=_read(self.private_key),
            certificate_chain=_read(self.certificate_chain),
        )


@dataclass(frozen=True, kw_only=True)
class ConnectionOptions:
    """How to reach the servers."""

    addresses: tuple[Address, ...]
    """Frontends of one deployment, any of which may be used."""
    tls: TlsOptions | None = None
    """None: no encryption."""
    api_key: str | None = field(default=None, repr=False)
    """Sent with each call as `authorization: Bearer KEY`."""

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("at least one address is needed")
        for address in self.addresses:
            check_address(address)
            if self.api_key and not self.tls and not _is_local(address):
                logger.warning("API key travels unencrypted address=%s", address)

    @property
    def metadata(self) -> Metadata:
        """The metadata of each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    @property
    def channel_options(self) -> list[tuple[str, str | int]]:
        """gRPC's options for each channel."""
        options: list[tuple[str, str | int]] = list(_CHANNEL_OPTIONS)
        if self.tls and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def connection_options(
    address: Address | Sequence[Address], tls: TlsOptions | None, api_key: str | None
) -> ConnectionOptions:
    """The options for the arguments of a client's constructor; one text may hold several addresses,
    separated by commas."""
    texts = (address,) if isinstance(address, str) else address
    addresses = tuple(each for text in texts for each in text.split(","))
    return ConnectionOptions(addresses=addresses, tls=tls, api_key=api_key)


ChannelT = TypeVar("ChannelT")


class Connections(Generic[ChannelT]):
    """One channel per address, opened on first use, and the address in use.

    `ChannelT` is `grpc.Channel` or `grpc.aio.Channel`, as `make_channel` makes them.
    """

    def __init__(
        self,
        options: ConnectionOptions,
        make_channel: Callable[[ConnectionOptions, Address], ChannelT],
    ) -> None:
        self.options = options
        self._make_channel = make_channel
        self._channels: dict[Address, tuple[ChannelT, InferenceServiceStub]] = {}
        self._current = 0
        self._closed = False
        self._lock = threading.Lock()

    def current(self) -> tuple[Address, InferenceServiceStub]:
        """The address in use and its stub; raises RuntimeError after `close`."""
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            address = self.options.addresses[self._current]
            if address not in self._channels:
                channel = self._make_channel(self.options, address)
                stub = InferenceServiceStub(channel)
                self._channels[address] = (channel, stub)
            return address, self._channels[address][1]

    def leave(self, address: Address) -> None:
        """Use the next address after `address` failed, unless another call already did."""
        with self._lock:
            if self.options.addresses[self._current] == address:
                self._current = (self._current + 1) % len(self.options.addresses)

    def close(self) -> list[ChannelT]:
        """Open no further channels; returns the channels, for the caller to close."""
        with self._lock:
            self._closed = True
            channels = [channel for channel, _ in self._channels.values()]
            self._channels.clear()
            return channels


def sync_channel(options: ConnectionOptions, address: Address) -> grpc.Channel:
    """A channel for calls that block."""
    if options.tls is None:
        return grpc.insecure_channel(address, options.channel_options)
    return grpc.secure_channel(address, options.tls.credentials(), options.channel_options)


def async_channel(options: ConnectionOptions, address: Address) -> grpc.aio.Channel:
    """A channel for calls that are awaited; needs a running event loop."""
    if options.tls is None:
        return grpc.aio.insecure_channel(address, options.channel_options)
    credentials = options.tls.credentials()
    return grpc.aio.secure_channel(address, credentials, options.channel_options)


def check_address(address: Address) -> None:
    """Raise ValueError unless it is HOST:PORT or unix:PATH."""
    if address.startswith("unix:") and len(address) > len("unix:"):
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"address must be HOST:PORT or unix:PATH, not {address!r}")


def _is_local(address: Address) -> bool:
    host = address.rpartition(":")[0]
    return address.startswith("unix:") or host in ("127.0.0.1", "localhost", "[::1]")


def _read(path: Path | str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The current span's `traceparent`; nothing if OpenTelemetry is not imported, which this does
    not import."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
