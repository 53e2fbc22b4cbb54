"""The text of each token, read from the model's tokenizer.json, for constraints."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conformance.assertions import Skipped

_BYTE_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"
"""SentencePiece's symbol for a space."""

_LIKE_SENTENCEPIECE = frozenset(("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"))


def token_texts(tokenizer_json: bytes, vocab_size: int) -> list[bytes]:
    """Bytes by token id; empty for special tokens and for ids that the tokenizer does not have.

    Raises Skipped for an unsupported kind of tokenizer.
    """
    tokenizer = json.loads(tokenizer_json)
    decoders = list(_decoders(tokenizer.get("decoder")))
    if decoders == ["ByteLevel"]:
        text_of = _byte_level
    elif decoders and _LIKE_SENTENCEPIECE.issuperset(decoders):
        text_of = _like_sentencepiece
    else:
        raise Skipped(f"unsupported decoder in tokenizer.json: {decoders}")
    added = tokenizer.get("added_tokens", [])
    names = _names(tokenizer["model"]["vocab"]) | {token["id"]: token["content"] for token in added}
    special = special_texts(tokenizer_json)
    return [
        b"" if token_id in special else text_of(names.get(token_id, ""))
        for token_id in range(vocab_size)
    ]


def special_texts(tokenizer_json: bytes) -> dict[int, bytes]:
    """The contents of special tokens, by id."""
    added = json.loads(tokenizer_json).get("added_tokens", [])
    return {token["id"]: token["content"].encode() for token in added if token["special"]}


def spell(texts: Sequence[bytes], text: str | bytes, *, longest: bool = False) -> list[int]:
    """Tokens that spell `text`: the shortest that fits at each position, or the longest.

    Raises Skipped if no token fits.
    """
    rest = text.encode() if isinstance(text, str) else text
    by_text = {token_text: token_id for token_id, token_text in reversed(list(enumerate(texts)))}
    sizes = sorted({len(token_text) for token_text in by_text if token_text}, reverse=longest)
    found = []
    while rest:
        size = next((size for size in sizes if rest[:size] in by_text), None)
        if size is None:
            raise Skipped(f"no token of the vocabulary is a prefix of {rest!r}")
        found.append(by_text[rest[:size]])
        rest = rest[size:]
    return found


def _decoders(decoder: Mapping[str, Any] | None) -> Iterator[str]:
    """The types of a decoder's parts."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for part in decoder["decoders"]:
            yield from _decoders(part)
    else:
        yield decoder["type"]


def _names(vocabulary: Mapping[str, int] | Sequence[Sequence[Any]]) -> dict[int, str]:
    """Token texts by id, from a vocabulary by name or in order."""
    if isinstance(vocabulary, Mapping):
        return {token_id: name for name, token_id in vocabulary.items()}
    return {token_id: name for token_id, (name, _) in enumerate(vocabulary)}


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable bytes are themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(name: str) -> bytes:
    """Bytes by the alphabet; an added token with other characters is plain text."""
    if all(char in _ALPHABET for char in name):
        return bytes(_ALPHABET[char] for char in name)
    return name.encode()


def _like_sentencepiece(name: str) -> bytes:
    """Text with spaces, or the single byte of a `<0xNN>` token."""
    if found := _BYTE_FALLBACK.fullmatch(name):
        return bytes([int(found[1], 16)])
    return name.replace(_SPACE, " ").encode()
