"""Limits on serialized messages, checked before they are parsed.

Protobuf parses a message in one piece, with the interpreter's lock held, and a message of 16 MiB
can consist of eight million empty ones: half a second in which no other stream gets a token, and a
gibibyte of memory. Large messages are therefore scanned first; the scan ends at a limit.
"""

from functools import lru_cache
from typing import TypeAlias

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from scheduler_service.errors import InvalidArgument

MAX_PARTS = 32_768
"""Submessages, texts and single numbers in one message."""

MAX_PACKED_NUMBERS = 1 << 22
"""Numbers in packed fields, which take little more than their bytes: token ids."""

SCANNED_BYTES = 1 << 16
"""Messages up to this size are parsed at once: even the worst takes less than 2 ms."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_HIGH_BYTES = bytes(range(128, 256))
"""All bytes of a varint but its last."""

Table: TypeAlias = "dict[int, tuple[str, Table | None, bool]]"
"""By field number: a field's name, the fields of its messages, and whether it holds integers."""


def check_message(data: bytes, descriptor: Descriptor) -> None:
    """Raise InvalidArgument if a serialized message has too many parts to be parsed quickly."""
    if len(data) > SCANNED_BYTES:
        try:
            _Scan(data).scan(0, len(data), _table(descriptor), "")
        except IndexError:
            raise InvalidArgument("request", "expected a message of the method's type") from None


@lru_cache
def _table(descriptor: Descriptor) -> Table:
    return {
        field.number: (
            field.name,
            None if field.message_type is None else _table(field.message_type),
            field.type in _INTEGERS,
        )
        for field in descriptor.fields
    }


_INTEGERS = (
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_UINT64,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_INT64,
)


class _Scan:
    """One pass over a message; IndexError means that it is malformed."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_parts = 0
        self._num_packed = 0

    def scan(self, position: int, end: int, table: Table, prefix: str) -> None:
        """Count the parts from `position` to `end`; `prefix` names the message in errors."""
        data = self._data
        while position < end:
            key, position = self._varint(position)
            name, inner, is_integer = table.get(key >> 3, ("request", None, False))
            kind = key & 7
            self._num_parts += 1
            if self._num_parts > MAX_PARTS:
                raise InvalidArgument(
                    f"{prefix}{name}", f"expected a request with at most {MAX_PARTS} parts"
                )
            if kind == _LENGTH:
                length, position = self._varint(position)
                if position + length > end:
                    raise IndexError
                if inner is not None:
                    self.scan(position, position + length, inner, f"{prefix}{name}.")
                elif is_integer:  # packed
                    numbers = data[position : position + length].translate(None, _HIGH_BYTES)
                    self._count_packed(len(numbers), f"{prefix}{name}")
                position += length
            elif kind == _VARINT:
                _, position = self._varint(position)
            elif kind in (_FIXED32, _FIXED64):
                position += 4 if kind == _FIXED32 else 8
            else:  # groups, which proto3 does not have
                raise IndexError

    def _count_packed(self, number: int, path: str) -> None:
        self._num_packed += number
        if self._num_packed > MAX_PACKED_NUMBERS:
            raise InvalidArgument(path, f"expected at most {MAX_PACKED_NUMBERS} token ids")

    def _varint(self, position: int) -> tuple[int, int]:
        """The number at a position, and the position after it."""
        byte = self._data[position]
        if byte < 128:
            return byte, position + 1
        value, shift = byte & 127, 7
        while byte >= 128:
            position += 1
            byte = self._data[position]
            value |= (byte & 127) << shift
            shift += 7
            if shift > 70:
                raise IndexError
        return value, position + 1
