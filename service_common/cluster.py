"""Credentials between the services of one deployment: certificates, a token, both or none.

With certificates (mutual TLS), every member has one that the cluster's own authority signed. All
certificates have the same DNS name: they prove membership of the cluster, not a machine's identity,
since workers' addresses change.

With a token, every call except health checks must contain it. Its file may hold several, one per
line: the first is sent, any is accepted, so that the token can be rotated without downtime.
"""

import hmac
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from pagewire.bearer_tokens import read_tokens
from service_common.errors import Unauthenticated
from service_common.grpc_options import IDLE_TIMEOUT_MS, MAX_FRAME_BYTES, Options, channel_options
from service_common.metadata import AUTHORIZATION, authorization
from service_common.tls import TlsFiles, channel_credentials, server_credentials, warn_of_files
from service_common.watched_files import WatchedFiles, warn_if_shared

if TYPE_CHECKING:
    from service_common.interceptors import CallGuard

MEMBER_NAME = "pagewire-cluster"
"""The DNS name in members' certificates."""

MIN_TOKEN_CHARS = 16

Stub = TypeVar("Stub")
AnyChannel = TypeVar("AnyChannel", grpc.Channel, grpc.aio.Channel)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Files of a member's credentials; all are optional."""

    token_file: Path | None = None
    """The token that the services of the deployment present to each other; see
    docs/security.md."""
    ca: Path | None = None
    """Authority of the services' certificates (PEM), for TLS between them."""
    cert: Path | None = None
    """This service's certificate (PEM)."""
    key: Path | None = None
    """That certificate's key (PEM)."""

    def __post_init__(self) -> None:
        given = [path is not None for path in (self.ca, self.cert, self.key)]
        if any(given) and not all(given):
            raise ValueError("cluster_ca, cluster_cert, cluster_key: expected all three or none")
        if self.token_file is not None:
            _read_tokens(self.token_file)
        _ = self.tls  # reads its files, too

    @property
    def tls(self) -> TlsFiles | None:
        """The certificates, if there are any."""
        if self.ca is None or self.cert is None or self.key is None:
            return None
        return TlsFiles(cert=self.cert, key=self.key, ca=self.ca)


NO_CLUSTER = ClusterConfig()


class Cluster:
    """A member's credentials, for its servers and channels."""

    def __init__(self, config: ClusterConfig) -> None:
        self._tls = config.tls
        self._channel_credentials: WatchedFiles[grpc.ChannelCredentials] | None = None
        if config.tls is not None:
            files = config.tls
            warn_of_files(files)
            self._channel_credentials = WatchedFiles(
                files.paths, lambda: channel_credentials(files)
            )
        self._tokens: WatchedFiles[list[str]] | None = None
        if config.token_file is not None:
            path = config.token_file
            warn_if_shared(path)
            self._tokens = WatchedFiles([path], lambda: _read_tokens(path))

    @property
    def has_credentials(self) -> bool:
        """Whether callers are authenticated."""
        return self._tls is not None or self._tokens is not None

    # Servers.

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """Credentials for a server that members call; None: without TLS."""
        return None if self._tls is None else server_credentials(self._tls)

    def call_guard(self) -> "CallGuard":
        """The interceptor of such a server."""
        from service_common.interceptors import CallGuard  # imports what only servers need

        return CallGuard(check_caller=None if self._tokens is None else self._check)

    def _check(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        assert self._tokens is not None
        shown = (authorization(metadata) or "").encode()
        tokens = [_bearer(token).encode() for token in self._tokens.get()]
        if not any(hmac.compare_digest(shown, token) for token in tokens):
            raise Unauthenticated(
                "expected the cluster's token; is --cluster-token-file the same everywhere?",
                reason="NOT_A_MEMBER",
            )

    # Channels.

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """The certificates that are on disk now; the same object while they are unchanged."""
        return None if self._channel_credentials is None else self._channel_credentials.get()

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """A channel to a member; it keeps the certificates that it was made with."""
        credentials = self.channel_credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        named = [*options, ("grpc.ssl_target_name_override", MEMBER_NAME)]
        return grpc.aio.secure_channel(address, credentials, options=named)

    def blocking_channel(self, address: str) -> grpc.Channel:
        """As `channel`, for calls that block their thread and receive much data. It has no
        connection when it was idle for a while."""
        credentials = self.channel_credentials()
        options = [
            *channel_options(),
            # The caller's thread receives: no other one begins with a call, or wakes it.
            (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
            ("grpc.http2.max_frame_size", MAX_FRAME_BYTES),
            ("grpc.client_idle_timeout_ms", IDLE_TIMEOUT_MS),
        ]
        if credentials is None:
            return grpc.insecure_channel(address, options=options)
        named = [*options, ("grpc.ssl_target_name_override", MEMBER_NAME)]
        return grpc.secure_channel(address, credentials, options=named)

    @asynccontextmanager
    async def dial(
        self, make: Callable[[grpc.aio.Channel], Stub], address: str
    ) -> AsyncIterator[Stub]:
        """A stub on a channel of its own."""
        async with self.channel(address, channel_options()) as channel:
            yield self.stub(make, channel)

    def stub(self, make: Callable[[AnyChannel], Stub], channel: AnyChannel) -> Stub:
        """A stub whose calls all contain the token."""
        made = make(channel)
        if self._tokens is not None:
            for name, call in vars(made).items():
                setattr(made, name, self._with_token(call))
        return made

    def _with_token(self, call: Callable[..., Any]) -> Callable[..., Any]:
        tokens = self._tokens
        assert tokens is not None

        def call_with_token(*args: Any, **kwargs: Any) -> Any:
            return call(*args, metadata=((AUTHORIZATION, _bearer(tokens.get()[0])),), **kwargs)

        return call_with_token


def _bearer(token: str) -> str:
    return f"Bearer {token}"


def _read_tokens(path: Path) -> list[str]:
    """The file's tokens. Raises ValueError, whose message contains none of them."""
    try:
        tokens = read_tokens(path)
    except ValueError as error:
        raise ValueError(f"cluster_token_file: {error}") from error
    if min(map(len, tokens)) < MIN_TOKEN_CHARS:
        raise ValueError(
            f"cluster_token_file: {path}: expected tokens of at least {MIN_TOKEN_CHARS} characters"
        )
    return tokens
