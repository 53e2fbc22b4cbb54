"""The text of each token, from the model's tokenizer.json.

Byte-level tokens are runs of bytes, byte-fallback tokens (`<0x0A>`) one byte. Any other token's
text is what it adds behind itself, since decoders treat the first token of a text in a special way.
Special tokens have no text, nor have ids that the tokenizer does not know: a model's logits are
often wider than its vocabulary.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

NO_TEXT = b""
_BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_texts(tokenizer_json: bytes, vocab_size: int) -> list[bytes]:
    """By token id, `vocab_size` of them. Raises ValueError if the file cannot be read."""
    text = tokenizer_json.decode()
    try:
        tokenizer = Tokenizer.from_str(text)
    # The library raises bare `Exception` for whatever is wrong with the file.
    except Exception as error:
        raise ValueError(f"tokenizer.json: {error}") from error
    steps = _decoder_steps(json.loads(text).get("decoder"))
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    ids = range(min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True)))
    names = [tokenizer.id_to_token(token_id) or "" for token_id in ids]
    if steps == ["ByteLevel"]:
        texts = [_byte_level(name) for name in names]
    else:
        texts = _decoded(tokenizer, names, has_byte_fallback="ByteFallback" in steps)
    for token_id in special.intersection(ids):
        texts[token_id] = NO_TEXT
    return texts + [NO_TEXT] * (vocab_size - len(texts))


def _decoder_steps(decoder: dict[str, Any] | None) -> list[str]:
    """Type names of a decoder and, in a sequence, of its parts."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _decoder_steps(part)]
    return [decoder["type"]]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(name: str) -> bytes:
    """A byte-level token's bytes; an added one with foreign characters is plain text."""
    try:
        return bytes([_ALPHABET[char] for char in name])
    except KeyError:
        return name.encode()


def _decoded(tokenizer: Tokenizer, names: Sequence[str], *, has_byte_fallback: bool) -> list[bytes]:
    """What each token adds to a text that ends with the same token."""

    def decode(repeats: int) -> list[str]:
        ids = [[token_id] * repeats for token_id in range(len(names))]
        texts: list[str] = tokenizer.decode_batch(ids, skip_special_tokens=False)
        return texts

    texts = [twice[len(once) :].encode() for once, twice in zip(decode(1), decode(2), strict=True)]
    if has_byte_fallback:
        for token_id, name in enumerate(names):
            if found := _BYTE_FALLBACK.fullmatch(name):
                texts[token_id] = bytes([int(found[1], 16)])
    return texts
