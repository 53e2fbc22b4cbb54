"""Bytes written by an earlier version still mean the same.

`messages.json` holds one filled-in message of every type as hexadecimal bytes. New types and fields
are added to it by `python -m tests.protos.test_stored_bytes`; what is in it is changed only where
a field was taken out of the contract.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import json_format, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from pagewire.v1 import (
    columns_pb2,
    inference_service_pb2,
    model_pb2,
    plan_pb2,
    sampling_pb2,
    scheduler_service_pb2,
    status_pb2,
    validation_pb2,
    worker_service_pb2,
)

STORE = Path(__file__).parent / "messages.json"
FILES = [
    columns_pb2,
    validation_pb2,
    sampling_pb2,
    model_pb2,
    status_pb2,
    plan_pb2,
    inference_service_pb2,
    scheduler_service_pb2,
    worker_service_pb2,
]


def message_types() -> Iterator[Descriptor]:
    for file in FILES:
        yield from file.DESCRIPTOR.message_types_by_name.values()


def filled(descriptor: Descriptor) -> Message:
    """A message with a distinctive value in every field; of a oneof, in its last field."""
    message = message_factory.GetMessageClass(descriptor)()
    for field in descriptor.fields:
        values = [value_of(field)] * (2 if field.is_repeated else 1)
        if field.message_type is not None:
            for value in values:
                target = getattr(message, field.name)
                (target.add() if field.is_repeated else target).CopyFrom(value)
        elif field.is_repeated:
            getattr(message, field.name).extend(values)
        else:
            setattr(message, field.name, values[0])
    return message


def value_of(field: FieldDescriptor) -> object:
    number = field.number
    if field.message_type is not None:
        return filled(field.message_type)
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.type == FieldDescriptor.TYPE_STRING:
        return f"text {number}"
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes([number, 0, 0, 0])
    if field.type == FieldDescriptor.TYPE_BOOL:
        return True
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return number + 0.5
    return number + 1000


def as_stored(message: Message) -> dict[str, object]:
    return {
        "bytes": message.SerializeToString(deterministic=True).hex(),
        "fields": json_format.MessageToDict(message, preserving_proto_field_name=True),
    }


def stored() -> dict[str, dict[str, object]]:
    return json.loads(STORE.read_text())


@pytest.mark.parametrize("descriptor", list(message_types()), ids=lambda d: d.name)
def test_stored_bytes_still_decode_to_the_same_fields(descriptor: Descriptor) -> None:
    entry = stored()[descriptor.full_name]
    message = message_factory.GetMessageClass(descriptor).FromString(
        bytes.fromhex(str(entry["bytes"]))
    )
    assert json_format.MessageToDict(message, preserving_proto_field_name=True) == entry["fields"]


@pytest.mark.parametrize("descriptor", list(message_types()), ids=lambda d: d.name)
def test_every_field_is_in_the_store(descriptor: Descriptor) -> None:
    entry = stored()[descriptor.full_name]
    message = json_format.ParseDict(entry["fields"], message_factory.GetMessageClass(descriptor)())
    expected = {field.name for field, _ in filled(descriptor).ListFields()}
    assert {field.name for field, _ in message.ListFields()} == expected


def is_complete(fields: object, descriptor: Descriptor) -> bool:
    """Whether a message's stored fields are all of those that it has, and no others."""
    message = message_factory.GetMessageClass(descriptor)()
    try:
        json_format.ParseDict(fields, message)
    except json_format.ParseError:  # one of them, perhaps deep inside, is no more
        return False
    known = {field.name for field, _ in filled(descriptor).ListFields()}
    return {field.name for field, _ in message.ListFields()} == known


def main() -> None:
    entries = stored() if STORE.exists() else {}
    for descriptor in message_types():
        fresh = as_stored(filled(descriptor))
        old = entries.get(descriptor.full_name)
        if old is None or not is_complete(old["fields"], descriptor):
            entries[descriptor.full_name] = fresh
    STORE.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
