"""Almost valid requests: well-formed ones, changed in a few places."""

import json
import random
import string
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_DEPTH = 5
EDGES = (0, 1, -1, 2, 127, 128, 255, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**63 - 1, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    "",
    "a",
    "\x00",
    "\ud7ff\U0010ffff",
    "🙂" * 3,
    "{{ 7*7 }}",
    "{% for %}",
    "../../etc/passwd",
)
WORDS = (
    "tiny",
    "user",
    "assistant",
    "auto",
    "none",
    "r",
    "Hello, world",
    "[0-9]+",
    '{"type":"object"}',
    '{"\\ud800":"\\ud800"}',
)

_FLOAT_TYPES = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def mutated_bytes(rng: random.Random, data: bytes) -> bytes:
    """`data` with a few bytes changed, removed, duplicated or inserted, or truncated."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randint(0, len(changed))
        match rng.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randint(1, 8)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                changed[at:at] = changed[at : at + rng.randint(1, 32)]
            case _:
                del changed[at:]
    return bytes(changed)


def mutated_message(rng: random.Random, message: Message, num_changes: int) -> Message:
    """A copy with some fields, at any depth, changed or removed."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(num_changes):
        _mutate(rng, copy, 0)
    return copy


def _mutate(rng: random.Random, message: Any, depth: int) -> None:
    if not message.DESCRIPTOR.fields or depth > MAX_DEPTH:
        return
    field = rng.choice(message.DESCRIPTOR.fields)
    if rng.random() < 0.15:
        message.ClearField(field.name)
    elif field.is_repeated:
        _mutate_repeated(rng, getattr(message, field.name), field, depth)
    elif field.message_type is not None:
        child = getattr(message, field.name)
        child.SetInParent()
        _mutate(rng, child, depth + 1)
    else:
        setattr(message, field.name, _value(rng, field))


def _mutate_repeated(rng: random.Random, values: Any, field: FieldDescriptor, depth: int) -> None:
    if values and rng.random() < 0.2:
        del values[rng.randrange(len(values))]
        return
    for _ in range(rng.choice((1, 1, 2, 40))):
        if field.message_type is None:
            values.append(_value(rng, field))
        elif depth < MAX_DEPTH:
            _mutate(rng, values.add(), depth + 1)


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    """Of the field's type, often at the edge of its range."""
    if field.enum_type is not None:
        return rng.choice([*field.enum_type.values_by_number, 77])
    kind = field.cpp_type
    if kind in _FLOAT_TYPES:
        return rng.choice(FLOATS)
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.randbytes(rng.choice((0, 1, 3, 4, 16, 64)))
        return _text(rng)
    signed = kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64)
    bits = 32 if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32) else 64
    drawn = rng.choice((*EDGES, rng.randrange(100), rng.randrange(40_000)))
    drawn %= 2**bits
    return drawn - 2**bits if signed and drawn >= 2 ** (bits - 1) else drawn


def _text(rng: random.Random) -> str:
    long = "".join(rng.choices(string.printable, k=rng.choice((1, 20, 300))))
    return rng.choice((*TEXTS, *WORDS, long))


def mutated_json(rng: random.Random, value: Any, depth: int = 0) -> Any:
    """A JSON value with one change."""
    if isinstance(value, dict) and value and rng.random() < 0.9 and depth < MAX_DEPTH:
        changed = dict(value)
        name = rng.choice(list(changed))
        if rng.random() < 0.1:
            del changed[name]
        else:
            changed[name] = mutated_json(rng, changed[name], depth + 1)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8 and depth < MAX_DEPTH:
        at = rng.randrange(len(value))
        return [*value[:at], mutated_json(rng, value[at], depth + 1), *value[at + 1 :]]
    return _json_value(rng, depth)


def _json_value(rng: random.Random, depth: int) -> Any:
    choices: list[Any] = [None, True, False, _text(rng), rng.choice(EDGES), rng.choice(FLOATS)]
    if depth < MAX_DEPTH:
        choices += [
            [_json_value(rng, depth + 1) for _ in range(rng.choice((0, 1, 3)))],
            {_text(rng): _json_value(rng, depth + 1)},
        ]
    return rng.choice(choices)


def as_json(value: Any) -> bytes:
    """The value as text; NaN and infinities as Python writes them, which is not valid JSON."""
    return json.dumps(value).encode("utf-8", "surrogatepass")
