"""The bytes of tokens in byte-level vocabularies, and the parts of a tokenizer's decoder."""

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer


def decoder_steps(tokenizer: Tokenizer) -> list[str]:
    """Type names of a tokenizer's decoder and, in a sequence, of its parts."""
    decoder = tokenizer.decoder
    return [] if decoder is None else _steps(json.loads(decoder.__getstate__()))


def _steps(decoder: dict[str, Any]) -> list[str]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
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
