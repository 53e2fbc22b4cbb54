"""The bytes of tokens in byte-level vocabularies, and the parts of a tokenizer's decoder."""

from functools import cache
from typing import Any


def decoder_steps(decoder: dict[str, Any] | None) -> list[str]:
    """Type names of a decoder in tokenizer.json and, in a sequence, of its parts."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in decoder_steps(part)]
    return [decoder["type"]]


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def byte_level_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; an added one with foreign characters is plain text."""
    alphabet = _byte_of_char()
    try:
        return bytes([alphabet[char] for char in token])
    except KeyError:
        return token.encode()
