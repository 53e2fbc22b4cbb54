"""Server addresses, TLS, API keys, call metadata, and channels."""

import asyncio
import logging
import math
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Self, TypeAlias

import grpc

from pagewire.bearer_tokens import is_bearer_token
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client.errors import PagewireError
from pagewire_client.synchronization import Event, TaskEvent, ThreadEvent, ThreadQueue, iterate

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
    # Also gRPC's patience with one attempt, TLS included: a far server needs several round trips.
    # If it were longer, a host that is gone would delay the use of another address.
    ("grpc.min_reconnect_backoff_ms", 2_000),
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
            raise ValueError("certificate_chain, private_key: expected both")

    @classmethod
    def of(
        cls,
        *files: Path | None,
        is_on: bool = False,
        server_name: str | None = None,
        prefix: str = "--tls-",
    ) -> Self | None:
        """The options for a command's flags: authority, certificate and key, whose names begin with
        `prefix`. None without any."""
        if not (is_on or any(files)):
            return None
        ca, cert, key = files
        if (cert is None) != (key is None):
            raise ValueError(f"{prefix}cert, {prefix}key: expected both")
        return cls(
            root_certificates=ca, certificate_chain=cert, private_key=key, server_name=server_name
        )

    def credentials(self) -> grpc.ChannelCredentials:
        """Reads the files; raises ValueError that names an unreadable or invalid one."""
        from pagewire.pem_files import read_authorities, read_pair  # imports ssl

        ca, cert, key = self.root_certificates, self.certificate_chain, self.private_key
        chain, private_key = (
            (None, None) if cert is None or key is None else read_pair(Path(cert), Path(key))
        )
        return grpc.ssl_channel_credentials(
            root_certificates=None if ca is None else read_authorities(Path(ca)),
            private_key=private_key,
            certificate_chain=chain,
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
            if self.api_key and not self.tls and not is_local(address):
                logger.warning("API key travels unencrypted address=%s", address)

    @property
    def metadata(self) -> Metadata:
        """The metadata of each call."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def channel_options(self, address: Address) -> list[tuple[str, str | int]]:
        """gRPC's options for a channel to `address`. This machine is reached without the proxy that
        the environment may name, whose own loopback is another one."""
        options: list[tuple[str, str | int]] = list(_CHANNEL_OPTIONS)
        if is_local(address):
            options.append(("grpc.enable_http_proxy", 0))
        if self.tls and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options


def connection_options(
    address: Address | Sequence[Address] | None, tls: TlsOptions | None, api_key: str | None
) -> ConnectionOptions:
    """The options for the arguments of a client's constructor.

    One text may hold several addresses, separated by commas. None: what the environment says. Of
    several keys, separated by spaces, the first is sent.
    """
    if address is None:
        address = os.environ.get("PAGEWIRE_ADDRESS", "").split() or DEFAULT_ADDRESS
    if api_key is None:
        api_key = os.environ.get("PAGEWIRE_API_KEY", "")
    texts = address if isinstance(address, Sequence) and not isinstance(address, str) else [address]
    for text in texts:
        if not isinstance(text, str):
            raise ValueError(f"address: expected HOST:PORT or unix:PATH, got {text!r}")
    addresses = tuple(address for text in texts for address in text.split(","))
    key = next(iter(api_key.split()), None)
    if key is not None and not is_bearer_token(key):
        raise ValueError("api_key: expected visible ASCII characters, got others")
    return ConnectionOptions(addresses=addresses, tls=tls, api_key=key)


class BlockingCall:
    """A call whose responses are iterated over by blocking."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        for response in self._call:
            return response
        raise StopAsyncIteration


class BlockingAnswer:
    """A call whose one response is waited for by blocking."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    def __await__(self) -> Generator[None, None, Any]:
        return self._call.result()
        yield


class BlockingStub:
    """The stub of a channel for calls that block, with the interface of the one for asyncio."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub = InferenceServiceStub(channel)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        call = getattr(self._stub, method)

        async def unary(request: Any, **options: Any) -> Any:
            return call(request, **options)

        def collected(requests: Any, **options: Any) -> Any:
            return BlockingAnswer(call.future(iterate(requests), **options))

        def stream(requests: Any, **options: Any) -> BlockingCall:
            if isinstance(call, grpc.StreamStreamMultiCallable):
                requests = iterate(requests)
            return BlockingCall(call(requests, **options))

        if isinstance(call, grpc.StreamUnaryMultiCallable):
            return collected
        return unary if isinstance(call, grpc.UnaryUnaryMultiCallable) else stream


def sync_channel(options: ConnectionOptions, address: Address) -> grpc.Channel:
    """A channel for calls that block."""
    if options.tls is None:
        return grpc.insecure_channel(address, options.channel_options(address))
    credentials = options.tls.credentials()
    return grpc.secure_channel(address, credentials, options.channel_options(address))


def _async_channel(options: ConnectionOptions, address: Address) -> grpc.aio.Channel:
    """A channel for calls that are awaited; needs a running event loop."""
    if options.tls is None:
        return grpc.aio.insecure_channel(address, options.channel_options(address))
    credentials = options.tls.credentials()
    return grpc.aio.secure_channel(address, credentials, options.channel_options(address))


async def _close_sync_channel(channel: grpc.Channel) -> None:
    channel.close()


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How calls are made and waited for."""

    open_channel: Callable[[ConnectionOptions, Address], Any]
    close_channel: Callable[[Any], Awaitable[None]]
    make_stub: Callable[[Any], Any]
    """The stub of a channel. Its calls are awaited, and their responses iterated over so."""
    make_event: Callable[[], Event]
    make_queue: Callable[[], Any]
    """A queue with the methods `put_nowait` and `get`, which is awaited."""
    find_loop: Callable[[], object]
    """The event loop that channels belong to; None: they belong to none."""


ASYNCIO = Mode(
    open_channel=_async_channel,
    close_channel=lambda channel: channel.close(),  # `grpc.aio.Channel` is abstract
    make_stub=InferenceServiceStub,
    make_event=TaskEvent,
    make_queue=asyncio.Queue,
    find_loop=asyncio.get_running_loop,
)
BLOCKING = Mode(
    open_channel=sync_channel,
    close_channel=_close_sync_channel,
    make_stub=BlockingStub,
    make_event=ThreadEvent,
    make_queue=ThreadQueue,
    find_loop=lambda: None,
)


class Connections:
    """The channels to each address, opened on first use, and the address in use."""

    def __init__(self, options: ConnectionOptions, mode: Mode) -> None:
        self.options = options
        self.mode = mode
        self._channels: dict[tuple[Address, int], tuple[Any, Any]] = {}
        """Channels and their stubs."""
        self._current = 0
        self._was_connected = False
        self._progressed_at = -math.inf
        self._closed = False
        self._loop: object = None
        """That of the channels, once there are any."""
        self._lock = threading.Lock()

    def current(self, number: int = 0) -> tuple[Address, InferenceServiceStub]:
        """The address in use and the stub of one of its channels; raises RuntimeError after
        `close`, and in another event loop than the first call's."""
        loop = self.mode.find_loop()
        with self._lock:
            if self._closed:
                raise RuntimeError("this client is closed")
            if self._channels and loop is not self._loop:
                raise RuntimeError("this client is of another event loop: create one in each")
            self._loop = loop
            address = self.options.addresses[self._current]
            if (address, number) not in self._channels:
                channel = self.mode.open_channel(self.options, address)
                self._channels[address, number] = (channel, self.mode.make_stub(channel))
            return address, self._channels[address, number][1]

    def __reduce__(self) -> NoReturn:
        raise TypeError("a client cannot be pickled or copied deeply: create one in each process")

    def record(self, failure: PagewireError | None) -> None:
        """Record a call's response or failure. A failure to connect counts as the end of a
        connection if any server was ever reached."""
        if failure is None:
            self._was_connected, self._progressed_at = True, time.monotonic()
            return
        self._was_connected |= failure.was_connected
        failure.was_connected = self._was_connected
        failure.progressed_at = self._progressed_at
        if not self._was_connected:
            failure.addresses = self.options.addresses
            if len(failure.addresses) > 1:
                failure.add_note(f"tried in turn: {', '.join(failure.addresses)}")

    def leave(self, address: Address) -> None:
        """Use the next address after `address` failed, unless another call already did."""
        with self._lock:
            if self.options.addresses[self._current] == address:
                self._current = (self._current + 1) % len(self.options.addresses)

    def close(self) -> list[Any]:
        """Open no further channels; returns the channels, for the caller to close."""
        with self._lock:
            self._closed = True
            channels = [channel for channel, _ in self._channels.values()]
            self._channels.clear()
            return channels


class OpenRequests:
    """Spreads requests over connections, one after the other; when all are full, requests wait."""

    per_connection = 1000
    """Most open requests of one connection. A frontend allows 1,024 calls; the others are for calls
    that do not generate."""

    def __init__(self, max_connections: int) -> None:
        if max_connections < 1:
            raise ValueError(f"max_connections: expected at least 1, got {max_connections}")
        self._free = [self.per_connection] * max_connections
        self._connections: dict[Event, int] = {}
        self._waiting: OrderedDict[Event, None] = OrderedDict()
        # Reentrant, because the collection of garbage may end a request at any point.
        self._lock = threading.RLock()

    def enter(self, turn: Event) -> None:
        """Set `turn` once its request may be sent; `leave` must follow."""
        with self._lock:
            self._waiting[turn] = None
            self._admit()

    def connection(self, turn: Event) -> int:
        """The number of the connection of a request whose turn it is; 0 after `leave`."""
        return self._connections.get(turn, 0)

    def leave(self, turn: Event) -> None:
        """Note that a request has ended, even if it was waiting, or had ended already."""
        with self._lock:
            self._waiting.pop(turn, None)
            if turn in self._connections:
                self._free[self._connections.pop(turn)] += 1
                self._admit()

    def _admit(self) -> None:
        connection = next((number for number, free in enumerate(self._free) if free), None)
        if connection is not None and self._waiting:
            self._free[connection] -= 1
            turn, _ = self._waiting.popitem(last=False)
            self._connections[turn] = connection
            turn.set()


def check_address(address: Address, name: str = "address") -> None:
    """Raise ValueError that names `name` unless it is HOST:PORT or unix:PATH."""
    if address.startswith("unix:") and len(address) > len("unix:"):
        return
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{name}: expected HOST:PORT or unix:PATH, got {address!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"{name}: an IPv6 host needs brackets, [HOST]:PORT, got {address!r}")


def is_local(address: Address) -> bool:
    """Whether `address` is on this machine."""
    host = address.rpartition(":")[0]
    return address.startswith("unix:") or host in ("127.0.0.1", "localhost", "[::1]")


def trace_metadata() -> tuple[tuple[str, str], ...]:
    """The current span's `traceparent`; nothing if OpenTelemetry is not imported, which this does
    not import."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
