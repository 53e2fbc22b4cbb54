"""Columns of other services' messages, whose faults are those of the field that holds them."""

from typing import Any

from google.protobuf.message import Message

from pagewire import columns
from scheduler_service.errors import InvalidArgument


def from_column(data: bytes, field: str) -> list[int]:
    """The integers of a column; raises InvalidArgument naming `field` when its length is wrong."""
    try:
        return columns.unpack(data, field)
    except columns.MalformedColumn as error:
        raise InvalidArgument(field, error.expected) from error


def from_columns(message: Message, prefix: str = "") -> dict[str, Any]:
    """The elements of a message's columns by name, None for a column of rows that is empty. Raises
    InvalidArgument naming a malformed one, after `prefix`."""
    try:
        return columns.columns_of(message.DESCRIPTOR).unpack(message)
    except columns.MalformedColumn as error:
        raise InvalidArgument(f"{prefix}{error.name}", error.expected) from error
