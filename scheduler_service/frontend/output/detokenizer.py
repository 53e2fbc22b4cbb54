"""Incremental detokenization: text is never retracted and never ends within a character.

The pieces that a `Detokenizer` returns, joined, equal the tokenizer's own `decode` of all tokens,
or what they add to the text of the tokens that they follow. Two kinds of tokenizer cover those of
language models:

- **Byte-level** (GPT-2, Llama 3, Qwen): every token is a fixed run of bytes, so the text is those
  bytes, decoded as UTF-8 while they come. Exact, and a dictionary look-up per token.
- **Everything else** (sentencepiece conversions and older kinds): a token's text depends on its
  neighbours, so a token is decoded together with those of the preceding piece, whose text is then
  removed. Byte-fallback tokens (`<0xE4>`) wait for the first token of another kind: only then is it
  known whether the run is valid UTF-8 or shown as one U+FFFD per byte.

Both take amortized constant time per token.
"""

import codecs
import re
from collections.abc import Callable, Collection, Sequence, Set
from typing import Protocol

from tokenizers import Tokenizer

from service_common.token_bytes import byte_level_bytes, decoder_steps

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 8
"""Tokens held back while their text ends in U+FFFD, which further tokens may complete."""
MAX_TOKENS_BEFORE = 64
"""The last tokens before a run of which one with a text of its own is looked for."""


class Detokenizer(Protocol):
    """The text of one growing run of tokens."""

    def push(self, token_id: int) -> str:
        """Text that is final after one more token."""
        ...

    def flush(self) -> str:
        """The remaining text, when there are no more tokens. Nothing may be pushed afterwards."""
        ...


class ByteLevelDetokenizer:
    """Fixed bytes per token, decoded as UTF-8 as they come."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._rest = b""

    def push(self, token_id: int) -> str:
        """Whole characters, and U+FFFD for bytes that no later byte can complete."""
        data = self._rest + self._token_bytes(token_id)
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def flush(self) -> str:
        """U+FFFD if the last character is incomplete."""
        text, self._rest = self._rest.decode("utf-8", "replace"), b""
        return text


class WindowDetokenizer:
    """Decodes new tokens together with those of the preceding piece.

    `_anchor` holds the tokens of the last piece that has text of its own; `_context` also those of
    the piece after it, if that has none. This is sufficient for a decoder that treats the first
    token, or the border of two tokens, in a special way.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        ignored: Callable[[int], bool],
        is_byte_fallback: Callable[[int], bool],
        *,
        context: Sequence[int],
        mends_replacements: bool,
    ) -> None:
        self._decode = decode
        self._ignored = ignored
        self._is_byte_fallback = is_byte_fallback
        self._mends_replacements = mends_replacements
        self._anchor = list(context)
        self._context = self._anchor
        self._context_text = decode(context) if context else ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """The text up to this token, unless it may still change."""
        if self._ignored(token_id):
            return ""
        self._held.append(token_id)
        if self._is_byte_fallback(token_id):
            return ""
        text = self._decode(self._context + self._held)
        if self._may_change(text):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The text of the tokens held back."""
        return self._emit(self._decode(self._context + self._held)) if self._held else ""

    def _may_change(self, text: str) -> bool:
        return (
            self._mends_replacements
            and text.endswith(REPLACEMENT)
            and len(self._held) < MAX_HELD_TOKENS
        )

    def _emit(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        own_text = self._decode(self._held)
        if own_text or not self._anchor:
            self._anchor = self._context = self._held
            self._context_text = own_text
        else:  # such as a single space, which a decoder strips at the start of a text
            self._context = self._anchor + self._held
            self._context_text = self._decode(self._context)
        self._held = []
        return piece


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer, and holds what they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        steps = decoder_steps(tokenizer)
        self._is_byte_level = steps == ["ByteLevel"]
        self._has_byte_fallback = "ByteFallback" in steps
        self._mends_replacements = "ByteLevel" in steps
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._token_bytes: dict[int, bytes] = {}
        self._is_fallback: dict[int, bool] = {}
        self._letter = tokenizer.token_to_id("<0x41>") or 0
        """One byte that is a character, where tokens are bytes."""

    def make(
        self,
        *,
        skip_special_tokens: bool,
        kept: Collection[str] = frozenset(),
        follows: Sequence[int] = (),
    ) -> Detokenizer:
        """A detokenizer at the start of a text, or of what comes after the tokens `follows`;
        special tokens in `kept` are not skipped."""
        skipped: Set[int] = self._special if skip_special_tokens else frozenset()
        if skipped and kept:
            skipped = skipped - set(map(self._tokenizer.token_to_id, kept))
        if self._is_byte_level:
            return ByteLevelDetokenizer(
                lambda token_id: b"" if token_id in skipped else self._bytes_of_token(token_id)
            )

        def is_ignored(token_id: int) -> bool:
            return token_id in skipped or self._tokenizer.id_to_token(token_id) is None

        return WindowDetokenizer(
            self._decode,
            is_ignored,
            self._is_fallback_token,
            context=self._context_in(follows, is_ignored),
            mends_replacements=self._mends_replacements,
        )

    def _context_in(self, follows: Sequence[int], is_ignored: Callable[[int], bool]) -> list[int]:
        """The last tokens from one on that has a text of its own; empty without one. In place of a
        byte, whose text later ones may change, there is a letter's."""
        context: list[int] = []
        for token_id in reversed(follows[-MAX_TOKENS_BEFORE:]):
            if is_ignored(token_id):
                continue
            shown = self._letter if self._is_fallback_token(token_id) else token_id
            if REPLACEMENT not in (text := self._decode([shown])):
                context.insert(0, shown)
                if text:
                    return context
        return []

    def token_text(self, token_id: int) -> str:
        """One token's text as it reads inside a text; special tokens too."""
        if self._is_byte_level:
            return self._bytes_of_token(token_id).decode("utf-8", "replace")
        # After itself a token is not the first one, whose leading space decoders strip.
        return self._decode([token_id, token_id])[len(self._decode([token_id])) :]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def _is_fallback_token(self, token_id: int) -> bool:
        known = self._is_fallback.get(token_id)
        if known is None:
            token = self._tokenizer.id_to_token(token_id) or ""
            known = self._has_byte_fallback and _BYTE_FALLBACK.fullmatch(token) is not None
            self._is_fallback[token_id] = known
        return known

    def _bytes_of_token(self, token_id: int) -> bytes:
        data = self._token_bytes.get(token_id)
        if data is None:
            data = byte_level_bytes(self._tokenizer.id_to_token(token_id) or "")
            self._token_bytes[token_id] = data
        return data


_BYTE_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")
