"""Columns of integers on the wire: little-endian int32, one after the other, as `bytes`."""

import sys
from array import array
from collections.abc import Iterable

from scheduler_service.errors import InvalidArgument

_SWAP = sys.byteorder == "big"


def to_column(values: Iterable[int]) -> bytes:
    """`values` as a column; raises OverflowError for one that int32 cannot hold."""
    column = array("i", values)
    if _SWAP:
        column.byteswap()
    return column.tobytes()


def from_column(data: bytes, field: str) -> list[int]:
    """The values of a column; raises InvalidArgument naming `field` when its length is wrong."""
    if len(data) % 4:
        raise InvalidArgument(field, "expected whole little-endian int32 values")
    column = array("i", data)
    if _SWAP:
        column.byteswap()
    return column.tolist()
