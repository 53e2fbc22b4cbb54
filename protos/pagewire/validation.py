"""Limits of fields, as the protos declare them by `(pagewire.v1.limits)`.

    limits_of(sampling_pb2.SamplingParams.DESCRIPTOR)["top_p"].lte

`find_violation` checks a message by them. The fields to check are determined once per message type,
so that a check costs no more than the comparisons.
"""

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from pagewire.v1 import validation_pb2


class Violation(NamedTuple):
    """A field that is out of its limits."""

    path: str
    """Path of the field within the message, such as `logit_bias[3].bias`."""

    expected: str
    """The allowed values, and the value received."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The values that a field may have; see validation.proto."""

    low: float = -math.inf
    low_is_open: bool = False
    high: float = math.inf
    or_equal: float | None = None
    min_items: int = 0
    max_items: int | None = None
    min_length: int = 0
    max_length: int | None = None

    def allows(self, value: float) -> bool:
        """Whether a number is finite and in range."""
        above = self.low < value if self.low_is_open else self.low <= value
        return (above and value <= self.high and math.isfinite(value)) or value == self.or_equal

    def range_violation(self, value: float) -> str | None:
        """The allowed range, if this number is not in it."""
        if self.allows(value):
            return None
        low = f"{'above' if self.low_is_open else 'at least'} {self.low:g}"
        parts = [low] * math.isfinite(self.low)
        parts += [f"at most {self.high:.15g}"] * math.isfinite(self.high)
        also = "" if self.or_equal is None else f", or {self.or_equal:g}"
        got = f"{value:g}" if isinstance(value, float) else value
        return f"expected {' and '.join(parts) or 'a finite number'}{also}, got {got}"

    def items_violation(self, number: int) -> str | None:
        """The allowed numbers of entries, if this one is not among them."""
        if number >= self.min_items and (self.max_items is None or number <= self.max_items):
            return None
        if not self.min_items:
            return f"expected at most {self.max_items} entries, got {number}"
        if self.max_items is None:
            return f"expected at least {self.min_items} entries, got {number}"
        return f"expected {self.min_items} to {self.max_items} entries, got {number}"

    def text_violation(self, text: str) -> str | None:
        """The allowed lengths, if that of this text is not among them."""
        if len(text) < self.min_length:
            return "expected a text that is not empty"
        if self.max_length is not None and len(text) > self.max_length:
            return f"expected at most {self.max_length} characters, got {len(text)}"
        return None


@lru_cache
def limits_of(descriptor: Descriptor) -> Mapping[str, Limits]:
    """The limits of a message's fields by name; fields without any are left out."""
    return {
        field.name: _limits(field)
        for field in descriptor.fields
        if field.GetOptions().HasExtension(validation_pb2.limits)
    }


def generation_defaults(descriptor: Descriptor) -> Mapping[str, float]:
    """The values of a message's absent fields by name, of fields that declare one."""
    return {
        field.name: _as_stored(
            field, field.GetOptions().Extensions[validation_pb2.generation_default]
        )
        for field in descriptor.fields
        if field.GetOptions().HasExtension(validation_pb2.generation_default)
    }


def sampling_only(descriptor: Descriptor) -> tuple[str, ...]:
    """The fields that must have their default in a beam search."""
    return tuple(
        field.name
        for field in descriptor.fields
        if field.GetOptions().Extensions[validation_pb2.sampling_only]
    )


def _as_stored(field: FieldDescriptor, value: float) -> float:
    """A number as the field would hold it."""
    if field.type == FieldDescriptor.TYPE_FLOAT:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    return value if field.type == FieldDescriptor.TYPE_DOUBLE else int(value)


def _limits(field: FieldDescriptor) -> Limits:
    declared = field.GetOptions().Extensions[validation_pb2.limits]

    def number(name: str, default: Any) -> Any:
        """A limit as the field itself would hold it."""
        if not declared.HasField(name):  # type: ignore[arg-type]
            return default
        return _as_stored(field, getattr(declared, name))

    return Limits(
        low=number("gt", number("gte", -math.inf)),
        low_is_open=declared.HasField("gt"),
        high=number("lte", math.inf),
        or_equal=number("or_equal", None),
        min_items=declared.min_items,
        max_items=declared.max_items if declared.HasField("max_items") else None,
        min_length=declared.min_length,
        max_length=declared.max_length if declared.HasField("max_length") else None,
    )


def find_violation(message: Message) -> Violation | None:
    """The first field of a message, or of a message in it, that is out of its limits."""
    values = {field.number: value for field, value in message.ListFields()}
    for number, field, limits, default in _checked_fields(message.DESCRIPTOR):
        value = values.get(number, default)
        if value is not None and (found := _field_violation(field, limits, value)) is not None:
            return found
    return None


@lru_cache
def _checked_fields(descriptor: Descriptor) -> tuple[tuple[int, FieldDescriptor, Limits, Any], ...]:
    """The fields that have limits, or contain messages with such fields: with their numbers, limits
    and the values that stand for absent ones, which are None if those need no check."""
    limits = limits_of(descriptor)
    return tuple(
        (field.number, field, limits.get(field.name, _NO_LIMITS), _default(field))
        for field in descriptor.fields
        if field.name in limits
        or (field.message_type is not None and _checked_fields(field.message_type))
    )


def _default(field: FieldDescriptor) -> Any:
    if field.is_repeated:
        return ()
    return None if field.has_presence else field.default_value


_NO_LIMITS = Limits()


def _field_violation(field: FieldDescriptor, limits: Limits, value: Any) -> Violation | None:
    if not field.is_repeated:
        return _value_violation(field, limits, value, field.name)
    if (expected := limits.items_violation(len(value))) is not None:
        return Violation(field.name, expected)
    if field.message_type is None and field.type != FieldDescriptor.TYPE_STRING:
        return None
    for index, entry in enumerate(value):
        violation = _value_violation(field, limits, entry, f"{field.name}[{index}]")
        if violation is not None:
            return violation
    return None


def _value_violation(
    field: FieldDescriptor, limits: Limits, value: Any, path: str
) -> Violation | None:
    if field.message_type is not None:
        inner = find_violation(value)
        return None if inner is None else Violation(f"{path}.{inner.path}", inner.expected)
    is_text = field.type == FieldDescriptor.TYPE_STRING
    expected = limits.text_violation(value) if is_text else limits.range_violation(value)
    return None if expected is None else Violation(path, expected)
