"""Credentials and trace context in a call's metadata."""

from collections.abc import Iterable
from contextvars import ContextVar

from service_common.errors import Unauthenticated

TRACEPARENT: ContextVar[str | None] = ContextVar("traceparent", default=None)
"""The `traceparent` that the call brings, as W3C Trace Context writes it."""

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"


def authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The call's `authorization`, as `Bearer KEY`; None if there is none.

    Some gateways and libraries send the key alone, as `x-api-key`. Raises Unauthenticated if one of
    them comes twice: which of the two a proxy has checked is not known.
    """
    values: dict[str, str | bytes] = {}
    for name, value in metadata:
        if name in (AUTHORIZATION, API_KEY):
            if name in values:
                raise Unauthenticated(f"{name}: expected once", reason="AMBIGUOUS_CREDENTIALS")
            values[name] = value
    given = values.get(AUTHORIZATION)
    if isinstance(given, str):
        return given
    key = values.get(API_KEY)
    return f"Bearer {key}" if isinstance(key, str) else None


def traceparent(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The client's span, as W3C Trace Context writes it; None if the call brings none."""
    for name, value in metadata or ():
        if name == "traceparent" and isinstance(value, str):
            return value
    return None
