"""Columns of numbers, as the protos declare them by `(pagewire.v1.column)`.

    plan = plan_pb2.StepPlan(step_id=1, **columns_of(plan_pb2.StepPlan.DESCRIPTOR).pack(steps))

A new column is one line in a proto: every codec iterates over what is declared there.
"""

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from pagewire.v1 import columns_pb2


class MalformedColumn(ValueError):
    """Bytes that do not hold whole elements: the column's name, and what is expected of it."""

    def __init__(self, name: str, expected: str) -> None:
        super().__init__(f"{name}: {expected}")
        self.name = name
        self.expected = expected


_CODES = {
    columns_pb2.COLUMN_ELEMENT_INT32: "i",
    columns_pb2.COLUMN_ELEMENT_FLOAT32: "f",
    columns_pb2.COLUMN_ELEMENT_UINT8: "B",
}
_DTYPES = {"i": "<i4", "f": "<f4", "B": "u1"}


def pack(values: Collection[int]) -> bytes:
    """The int32 column of `values`; raises struct.error for one that int32 cannot hold."""
    return struct.pack(f"<{len(values)}i", *values)


def pack_rows(rows: Iterable[Collection[int]]) -> bytes:
    """The int32 column of entries of several elements each."""
    return b"".join(map(pack, rows))


def pack_floats(values: Collection[float]) -> bytes:
    """The float32 column of `values`, rounded."""
    return struct.pack(f"<{len(values)}f", *values)


def unpack(data: bytes, name: str = "column") -> list[int]:
    """The integers in an int32 column; raises MalformedColumn."""
    return _unpack(data, name, "i", 4)


def unpack_floats(data: bytes, name: str = "column") -> list[float]:
    """The numbers in a float32 column; raises MalformedColumn."""
    return _unpack(data, name, "f", 4)


def _unpack(data: bytes, name: str, code: str, entry_bytes: int) -> list[Any]:
    """The elements of whole entries of `entry_bytes` bytes."""
    if len(data) % entry_bytes:
        raise MalformedColumn(name, f"expected a multiple of {entry_bytes} bytes, got {len(data)}")
    return list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A declared column."""

    name: str
    code: str
    """The element's type, as in `struct`: `i` int32, `f` float32, `B` uint8."""

    width: int
    """Elements per entry."""

    has_rows: bool
    """Whether an entry belongs to each row, or to each row that samples."""

    absent: int
    """The element of every row where the column is empty."""

    @property
    def dtype(self) -> str:
        """The element's type, as numpy names it."""
        return _DTYPES[self.code]

    @property
    def entry_bytes(self) -> int:
        """Bytes per entry."""
        return self.width * struct.calcsize(self.code)

    def pack(self, values: Collection[float]) -> bytes:
        """The column of some elements, the entries one after the other."""
        return struct.pack(f"<{len(values)}{self.code}", *values)

    def unpack(self, data: bytes) -> list[Any]:
        """The elements; raises MalformedColumn unless there are whole entries."""
        return _unpack(data, self.name, self.code, self.entry_bytes)


class Columns(Mapping[str, Column]):
    """The columns of a message type by name."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._columns = {
            field.name: _column(field.name, field.GetOptions().Extensions[columns_pb2.column])
            for field in descriptor.fields
            if field.GetOptions().HasExtension(columns_pb2.column)
        }

    def __getitem__(self, name: str) -> Column:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def pack(self, values: Any) -> dict[str, Any]:
        """The columns of an object that has their elements under the same names. What is empty or
        None is left out."""
        packed: dict[str, Any] = {}
        for name, column in self._columns.items():
            if elements := getattr(values, name):
                packed[name] = column.pack(elements)
        return packed

    def unpack(self, message: Message) -> dict[str, list[Any] | None]:
        """The elements of a message's columns; None for a column of rows that is empty. Raises
        MalformedColumn."""
        return {
            name: None if column.has_rows and not data else column.unpack(data)
            for name, column in self._columns.items()
            for data in (getattr(message, name),)
        }


columns_of = lru_cache(Columns)
"""The columns of a message type, determined once for a descriptor."""


def _column(name: str, declared: columns_pb2.Column) -> Column:
    return Column(
        name=name,
        code=_CODES[declared.element],
        width=declared.width or 1,
        has_rows=declared.entries != columns_pb2.COLUMN_ENTRIES_UNSPECIFIED,
        absent=declared.absent,
    )
