"""Credentials and trace context in a call's metadata."""

from collections.abc import Iterable
from contextvars import ContextVar

TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The `traceparent` that the call brings, as W3C Trace Context writes it."""

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"


def authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The call's `authorization`, as `Bearer KEY`; None if there is none.

    Some gateways and libraries send the key alone, as `x-api-key`.
    """
    values = dict(metadata)
    value = values.get(AUTHORIZATION)
    if isinstance(value, str):
        return value
    key = values.get(API_KEY)
    return f"Bearer {key}" if isinstance(key, str) else None


def traceparent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The client's span, as W3C Trace Context writes it; None if the call brings none."""
    for name, value in metadata or ():
        if name == "traceparent" and isinstance(value, str):
            return value
    return None
