"""The kit's credentials for a worker that accepts only members of its cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

MEMBER_NAME = "pagewire-cluster"
"""The DNS name in members' certificates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """Files of credentials; all optional. Methods raise OSError for unreadable files."""

    token_file: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def channel(self, address: str) -> grpc.Channel:
        """A channel to the worker; every call on it contains the token."""
        if self.ca is None:
            channel = grpc.insecure_channel(address)
        else:
            credentials = grpc.ssl_channel_credentials(self.ca.read_bytes(), *self._pair())
            named = [("grpc.ssl_target_name_override", MEMBER_NAME)]
            channel = grpc.secure_channel(address, credentials, named)
        if self.token_file is None:
            return channel
        return grpc.intercept_channel(channel, _Token(_first_token(self.token_file)))

    def add_port(self, server: grpc.Server, address: str) -> int:
        """Add the port at which the worker registers; raises RuntimeError as gRPC does."""
        if self.ca is None:
            return server.add_insecure_port(address)
        credentials = grpc.ssl_server_credentials(
            [self._pair()], self.ca.read_bytes(), require_client_auth=True
        )
        return server.add_secure_port(address, credentials)

    def _pair(self) -> tuple[bytes, bytes]:
        assert self.key is not None, "checked with the options"
        assert self.cert is not None
        return self.key.read_bytes(), self.cert.read_bytes()


NO_CREDENTIALS = Credentials()


def _first_token(file: Path) -> str:
    """The token to send. Raises RuntimeError if there is none."""
    tokens = file.read_text().split()
    if not tokens:
        raise RuntimeError(f"{file} contains no token")
    return tokens[0]


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
