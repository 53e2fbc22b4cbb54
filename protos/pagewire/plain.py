"""Messages as plain values, by their descriptors: for JSON, and for programs that read states."""

from collections.abc import Collection
from typing import Any

from google.protobuf.message import Message

from pagewire.columns import columns_of


def word(message: Message, field: str) -> str:
    """The value of an enum field as a lower-case word: `ready` for WORKER_STATE_READY.

    A value that only a newer server knows is `unspecified`.
    """
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    return _word(descriptor.enum_type, getattr(message, field))


def plain(message: Message, *, omitted: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a message by name, without the `omitted` ones.

    Messages are dictionaries, repeated fields and columns lists, enums words as from `word`; a
    field that is absent although its absence differs from zero is None.
    """
    return {
        field.name: _field(message, field)
        for field in message.DESCRIPTOR.fields
        if field.name not in omitted
    }


def _field(message: Message, field: Any) -> Any:
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_value(message, field, item) for item in value]
    if field.has_presence and field.message_type is None and not message.HasField(field.name):
        return None
    return _value(message, field, value)


def _value(message: Message, field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return plain(value)
    if field.enum_type is not None:
        return _word(field.enum_type, value)
    column = columns_of(message.DESCRIPTOR).get(field.name)
    return value if column is None else column.unpack(value)


def _word(enum: Any, value: int) -> str:
    names = enum.values_by_number
    prefix = names[0].name.removesuffix("UNSPECIFIED")
    name: str = names[value if value in names else 0].name
    return name.removeprefix(prefix).lower()
