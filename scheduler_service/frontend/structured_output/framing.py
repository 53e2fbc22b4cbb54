"""The protocol between a frontend and its sandbox: four bytes of length, big-endian, and JSON.

A question is `{"id": ..., "kind": ..., "texts": [...]}`; its answer is `{"id": ..., "problem":
...}`, with null if there is no problem.
"""

import json
from typing import Any, BinaryIO

LENGTH_BYTES = 4


def encode(message: dict[str, Any]) -> bytes:
    """A message as it is sent."""
    data = json.dumps(message).encode()
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def length(header: bytes) -> int:
    """Number of bytes that follow a header."""
    return int.from_bytes(header, "big")


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message, or None at the stream's end. The stream may be unbuffered."""
    header = _read_exactly(stream, LENGTH_BYTES)
    data = _read_exactly(stream, length(header))
    if len(header) < LENGTH_BYTES or len(data) < length(header):
        return None
    message: dict[str, Any] = json.loads(data)
    return message


def _read_exactly(stream: BinaryIO, number: int) -> bytes:
    """`number` bytes, fewer at the stream's end."""
    data = bytearray()
    while len(data) < number and (piece := stream.read(number - len(data))):
        data += piece
    return bytes(data)
