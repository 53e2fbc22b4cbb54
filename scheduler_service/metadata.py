"""Credentials in a call's metadata."""

from collections.abc import Iterable

AUTHORIZATION = "authorization"
API_KEY = "x-api-key"


def authorization(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """The call's `authorization`, as `Bearer KEY`; None if it brings none.

    A key may also come alone, as `x-api-key`, which some gateways and libraries send.
    """
    values = dict(metadata)
    value = values.get(AUTHORIZATION)
    if isinstance(value, str):
        return value
    key = values.get(API_KEY)
    return f"Bearer {key}" if isinstance(key, str) else None
