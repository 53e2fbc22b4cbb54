"""How a frontend and its sandbox speak: four bytes of length, big-endian, and JSON.

A question is `{"kind": ..., "texts": [...]}`, its answer `{"problem": ...}`, null if there is none.
"""

import json
from typing import Any, BinaryIO

LENGTH_BYTES = 4


def encode(message: dict[str, Any]) -> bytes:
    """A message as it travels."""
    data = json.dumps(message).encode()
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def length(header: bytes) -> int:
    """Bytes that follow a header."""
    return int.from_bytes(header, "big")


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message, or None at the stream's end."""
    header = stream.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    message: dict[str, Any] = json.loads(stream.read(length(header)))
    return message
