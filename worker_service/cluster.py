"""What the services of one deployment show each other: certificates, a token, both or nothing.

With certificates, every member has one of the cluster's own authority, and each end of a connection
asks for the other's. They are made out to the same name, whatever machine a member runs on: what
counts is that it belongs to the cluster, not where it is.

With a token, every call but health checks must bring it. Its file may hold several, one a line: the
first is shown, any is taken, so that it can be changed without a moment at which members disagree.
"""

import hmac
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import grpc
from grpc_health.v1 import health

from service_common.watched_files import WatchedFiles, read_file
from worker_service.errors import InvalidOption, NotAMember
from worker_service.grpc_options import Options
from worker_service.status_codes import abort

MEMBER_NAME = "pagewire-cluster"
"""The DNS name in members' certificates."""

MIN_TOKEN_CHARS = 16
AUTHORIZATION = "authorization"
_HEALTH = f"/{health.SERVICE_NAME}/"

Metadata: TypeAlias = tuple[tuple[str, str], ...]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificates:
    """PEM files: the cluster's authority, this member's certificate and that one's key."""

    ca: Path
    cert: Path
    key: Path

    @property
    def paths(self) -> list[Path]:
        """All three."""
        return [self.ca, self.cert, self.key]

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Their contents, in that order. Raises InvalidOption unless they belong together."""
        contents = [_contents("cluster certificates", path) for path in self.paths]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password given, an encrypted key would be asked about on the terminal.
            context.load_cert_chain(self.cert, self.key, password=_no_passphrase)
            context.load_verify_locations(self.ca)
        except (ssl.SSLError, ValueError) as error:
            raise InvalidOption(
                f"cluster certificates: {self.ca}, {self.cert} and {self.key} are not an "
                f"authority's certificate, another and its key: {error}"
            ) from error
        return contents[0], contents[1], contents[2]


def _no_passphrase() -> NoReturn:
    raise ValueError("the key is encrypted; expected one without a passphrase")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Files of a member's credentials; all may be left out."""

    token_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        given = [path is not None for path in (self.ca, self.cert, self.key)]
        if any(given) and not all(given):
            raise InvalidOption("cluster_ca, cluster_cert, cluster_key: expected all three or none")

    @property
    def certificates(self) -> Certificates | None:
        """Where there are any."""
        if self.ca is None or self.cert is None or self.key is None:
            return None
        return Certificates(ca=self.ca, cert=self.cert, key=self.key)


NO_CLUSTER = ClusterConfig()


class Cluster:
    """A member's credentials, as its server and its channels use them."""

    def __init__(self, config: ClusterConfig) -> None:
        """Reads the files; raises InvalidOption."""
        self._server: WatchedFiles[grpc.ServerCertificateConfiguration] | None = None
        self._channel: WatchedFiles[grpc.ChannelCredentials] | None = None
        self._tokens: WatchedFiles[list[str]] | None = None
        files, path = config.certificates, config.token_file
        if files is not None:
            self._server = WatchedFiles(files.paths, lambda: _server_side(files), InvalidOption)
            self._channel = WatchedFiles(files.paths, lambda: _channel_side(files), InvalidOption)
        if path is not None:
            self._tokens = WatchedFiles([path], lambda: _read_tokens(path), InvalidOption)

    @property
    def has_certificates(self) -> bool:
        """Whether connections are by TLS."""
        return self._server is not None

    @property
    def has_credentials(self) -> bool:
        """Whether strangers are kept out."""
        return self._server is not None or self._tokens is not None

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Have a server listen; its port. Raises RuntimeError as gRPC does."""
        if self._server is None:
            return server.add_insecure_port(address)
        credentials = grpc.dynamic_ssl_server_credentials(
            self._server.get(), self._server.get, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)

    def gates(self) -> list["Gate"]:
        """Interceptors of a server that members call."""
        return [] if self._tokens is None else [Gate(self._tokens.get)]

    def channel(self, address: str, options: Options) -> grpc.aio.Channel:
        """A channel to a member, with the certificates that are on disk now."""
        if self._channel is None:
            return grpc.aio.insecure_channel(address, options=options)
        named = (*options, ("grpc.ssl_target_name_override", MEMBER_NAME))
        return grpc.aio.secure_channel(address, self._channel.get(), options=named)

    def metadata(self) -> Metadata:
        """What a call to a member brings."""
        if self._tokens is None:
            return ()
        return ((AUTHORIZATION, f"Bearer {self._tokens.get()[0]}"),)


class Gate(grpc.aio.ServerInterceptor):
    """Refuses calls without the token, before any message of theirs is read."""

    def __init__(self, tokens: Callable[[], Iterable[str]]) -> None:
        """`tokens` is asked at every call: any of them will do."""
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        details: grpc.HandlerCallDetails,
    ) -> Handler:
        if details.method.startswith(_HEALTH) or self._is_member(details):
            return await continuation(details)
        return grpc.stream_stream_rpc_method_handler(_refuse)

    def _is_member(self, details: grpc.HandlerCallDetails) -> bool:
        shown = str(dict(details.invocation_metadata).get(AUTHORIZATION, "")).encode()
        expected = [f"Bearer {token}".encode() for token in self._tokens()]
        return any(hmac.compare_digest(shown, one) for one in expected)


async def _refuse(_: object, context: grpc.aio.ServicerContext) -> None:
    await abort(
        context,
        NotAMember("expected the cluster's token; is --cluster-token-file the same everywhere?"),
    )


def _server_side(files: Certificates) -> grpc.ServerCertificateConfiguration:
    ca, cert, key = files.read()
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


def _channel_side(files: Certificates) -> grpc.ChannelCredentials:
    ca, cert, key = files.read()
    return grpc.ssl_channel_credentials(
        root_certificates=ca, private_key=key, certificate_chain=cert
    )


def _contents(what: str, path: Path) -> bytes:
    """A file's contents. Raises InvalidOption if it cannot be read."""
    try:
        return read_file(what, path)
    except ValueError as error:
        raise InvalidOption(str(error)) from error


def _read_tokens(path: Path) -> list[str]:
    """The file's tokens; raises InvalidOption, which tells none of them."""
    try:
        tokens = _contents("cluster_token_file", path).decode("ascii").split()
    except UnicodeDecodeError as error:
        raise InvalidOption(f"cluster_token_file: {path}: expected ASCII characters") from error
    if not tokens:
        raise InvalidOption(f"cluster_token_file: {path}: expected a token")
    if min(map(len, tokens)) < MIN_TOKEN_CHARS:
        raise InvalidOption(
            f"cluster_token_file: {path}: expected at least {MIN_TOKEN_CHARS} characters a token"
        )
    return tokens
