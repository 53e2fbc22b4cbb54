"""Columns of numbers on the wire: little-endian int32 or float32, one after the other."""

import struct
from collections.abc import Sequence

from scheduler_service.errors import InvalidArgument


def to_column(values: Sequence[int]) -> bytes:
    """`values` as a column; raises struct.error for one that int32 cannot hold."""
    return struct.pack(f"<{len(values)}i", *values)


def from_column(data: bytes, field: str) -> list[int]:
    """The values of a column; raises InvalidArgument naming `field` when its length is wrong."""
    if len(data) % 4:
        raise InvalidArgument(field, "expected whole little-endian int32 values")
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def to_float_column(values: Sequence[float]) -> bytes:
    """`values`, rounded to float32, as a column."""
    return struct.pack(f"<{len(values)}f", *values)


def from_float_column(data: bytes, field: str) -> list[float]:
    """The values of a float32 column; raises InvalidArgument naming `field` when its length is
    wrong."""
    if len(data) % 4:
        raise InvalidArgument(field, "expected whole little-endian float32 values")
    return list(struct.unpack(f"<{len(data) // 4}f", data))
