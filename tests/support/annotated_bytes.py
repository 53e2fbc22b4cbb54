"""A message's bytes, a line for each field, with what they mean behind them."""

from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire import columns

FLAGS = ("output",)
"""Fields of one byte per row; other fields of bytes are int32 columns."""

WIDTH = 44
"""Of the bytes' part of a line, at least."""


def annotated(message: Message) -> str:
    """Nested messages are indented, and begin with a line of their own."""
    return "\n".join(_lines(message, ""))


def read(text: str) -> bytes:
    """The bytes of such lines."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in text.splitlines()))


def _lines(message: Message, indent: str) -> Iterator[str]:
    for field, value in message.ListFields():
        for element in value if field.is_repeated else [value]:
            data = _alone(message, field, element)
            if field.message_type is None:
                yield _line(indent, data, f"{field.name}: {_told(field, element)}")
            else:
                size = element.ByteSize()
                head = data[: len(data) - size]
                yield _line(indent, head, f"{field.name}, {size} bytes")
                yield from _lines(element, indent + "  ")


def _alone(message: Message, field: FieldDescriptor, value: Any) -> bytes:
    """The field's bytes, of a repeated one those of this entry."""
    alone = type(message)()
    if field.message_type is not None:
        target = getattr(alone, field.name)
        (target.add() if field.is_repeated else target).CopyFrom(value)
    elif field.is_repeated:
        getattr(alone, field.name).append(value)
    else:
        setattr(alone, field.name, value)
    return alone.SerializeToString()


def _told(field: FieldDescriptor, value: Any) -> str:
    if field.type != FieldDescriptor.TYPE_BYTES:
        return f"{value}"
    if field.name in FLAGS:
        return ", ".join(map(str, value))
    return ", ".join(map(str, columns.unpack(value)))


def _line(indent: str, data: bytes, meaning: str) -> str:
    """The meaning of many bytes stands above them."""
    digits = indent + data.hex(" ")
    if len(digits) > WIDTH:
        return f"{'':<{WIDTH}} # {indent}{meaning}\n{digits}"
    return f"{digits:<{WIDTH}} # {indent}{meaning}"
