"""The kit's credentials for a worker that accepts only members of its cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from pagewire.bearer_tokens import read_tokens
from pagewire.pem_files import read_authorities, read_pair

MEMBER_NAME = "pagewire-cluster"
"""The DNS name in members' certificates."""

_NO_PROXY = ("grpc.enable_http_proxy", 0)
"""Members call each other directly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Files of credentials; all optional. Methods raise ValueError that names an invalid
    file."""

    token_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def channel(self, address: str) -> grpc.Channel:
        """A channel to the worker; every call on it contains the token."""
        if self.ca is None:
            channel = grpc.insecure_channel(address, [_NO_PROXY])
        else:
            credentials = grpc.ssl_channel_credentials(read_authorities(self.ca), *self._pair())
            named = [_NO_PROXY, ("grpc.ssl_target_name_override", MEMBER_NAME)]
            channel = grpc.secure_channel(address, credentials, named)
        if self.token_file is None:
            return channel
        return grpc.intercept_channel(channel, _Token(read_tokens(self.token_file)[0]))

    def add_port(self, server: grpc.Server, address: str) -> int:
        """Add the port at which the worker registers; raises RuntimeError as gRPC does."""
        if self.ca is None:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [self._pair()], read_authorities(self.ca), require_client_auth=True
        )
        return server.add_secure_port(address, credentials)

    def _pair(self) -> tuple[bytes, bytes]:
        assert self.key is not None, "checked with the options"
        assert self.cert is not None
        cert, key = read_pair(self.cert, self.key)
        return key, cert


NO_CREDENTIALS = Credentials()


class _Token(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the token to calls of every kind that a worker has."""

    def __init__(self, token: str) -> None:
        self._metadata = (("authorization", f"Bearer {token}"),)

    def _intercept(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=self._metadata), request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_stream = _intercept
