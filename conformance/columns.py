"""Columns of integers as plan.proto defines them: little-endian int32, one after the other."""

import struct
from collections.abc import Collection, Iterable


def pack(values: Collection[int]) -> bytes:
    """The column of some integers."""
    return struct.pack(f"<{len(values)}i", *values)


def pack_rows(rows: Iterable[Collection[int]]) -> bytes:
    """The column of a matrix, row by row."""
    return b"".join(map(pack, rows))


def unpack(data: bytes) -> list[int]:
    """The integers in a column. Raises ValueError if it is malformed."""
    if len(data) % 4:
        raise ValueError(f"a column of {len(data)} bytes is not a multiple of 4")
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def unpack_floats(data: bytes) -> list[float]:
    """The numbers in a column of little-endian float32. Raises ValueError if it is malformed."""
    if len(data) % 4:
        raise ValueError(f"a column of {len(data)} bytes is not a multiple of 4")
    return list(struct.unpack(f"<{len(data) // 4}f", data))
