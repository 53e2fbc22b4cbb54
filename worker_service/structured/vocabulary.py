"""The text of each token, from the model's tokenizer.json.

Byte-level tokens are sequences of bytes, byte-fallback tokens (`<0x0A>`) one byte. The text of any
other token is what it adds to a text that ends with the same token, since decoders treat the first
token of a text specially. Special tokens have no text, nor have ids beyond the tokenizer's: a
model often has more logits than its vocabulary has tokens.
"""

import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from service_common.token_bytes import byte_level_bytes, decoder_steps

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
    steps = decoder_steps(json.loads(text).get("decoder"))
    added = tokenizer.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    ids = range(min(vocab_size, tokenizer.get_vocab_size(with_added_tokens=True)))
    names = [tokenizer.id_to_token(token_id) or "" for token_id in ids]
    if steps == ["ByteLevel"]:
        texts = [byte_level_bytes(name) for name in names]
    else:
        texts = _decoded(tokenizer, names, has_byte_fallback="ByteFallback" in steps)
    for token_id in special.intersection(ids):
        texts[token_id] = NO_TEXT
    return texts + [NO_TEXT] * (vocab_size - len(texts))


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
