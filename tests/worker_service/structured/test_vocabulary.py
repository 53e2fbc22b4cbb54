"""Tokens' texts are those that a frontend makes of them."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support import vocabularies
from tests.support.tokenizers import SENTENCEPIECE_DECODERS, byte_level, sentencepiece
from worker_service.structured.grammars import Grammars, token_texts
from worker_service.structured.masks import ConstrainedRow, TokenMasks

EMBEDDED = Path(__file__).parents[3] / "worker_service/embedded_model/tokenizer.json"
TEXTS = ["hello world", "naïve café 你好 😀", ' {"a": [1, 2]}\n', "  two  spaces", "\t\x00"]


def texts_of(tokenizer: Tokenizer, extra: int = 0) -> list[bytes]:
    size = tokenizer.get_vocab_size() + extra
    return token_texts(tokenizer, size)


@pytest.mark.parametrize("name", ["byte level", "embedded", *SENTENCEPIECE_DECODERS])
def test_the_texts_of_a_texts_tokens_are_that_text(name: str) -> None:
    tokenizer = {
        "byte level": byte_level,
        "embedded": lambda: Tokenizer.from_file(str(EMBEDDED)),
    }.get(name, lambda: sentencepiece(name))()
    texts = texts_of(tokenizer)
    for text in TEXTS:
        pieces = text if name not in SENTENCEPIECE_DECODERS else text.replace(" ", "▁")
        ids = tokenizer.encode(pieces, add_special_tokens=False).ids
        assert b"".join(texts[token_id] for token_id in ids).decode() == text


def test_special_tokens_and_ids_beyond_the_vocabulary_have_none() -> None:
    tokenizer = byte_level()
    texts = texts_of(tokenizer, extra=7)
    assert texts[-7:] == [b""] * 7
    special = [id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    assert special
    assert all(texts[token_id] == b"" for token_id in special)
    assert texts[tokenizer.token_to_id("<tool call>")] == b"<tool call>"
    assert texts[tokenizer.token_to_id("é plain")] == "é plain".encode()


def test_fewer_logits_than_tokens_are_enough() -> None:
    assert texts_of(byte_level(), extra=-5) == texts_of(byte_level())[:-5]


def test_the_texts_are_prepared_once_a_constraint_needs_them() -> None:
    calls: list[None] = []

    def texts() -> list[bytes]:
        calls.append(None)
        return vocabularies.token_texts(256)

    grammars = Grammars(256, texts)
    assert not calls
    for choice in ("a", "b"):
        grammars.expect(vocabularies.constraint("choice", choice)).result()
    assert len(calls) == 1


class Panic(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize("kind", [ValueError, Panic])
def test_an_error_of_the_texts_is_that_of_each_constraint(kind: type[BaseException]) -> None:
    def texts() -> list[bytes]:
        raise kind("no tokenizer")

    grammars = Grammars(256, texts)
    for choice in ("a", "b"):
        with pytest.raises(kind, match="no tokenizer"):
            grammars.expect(vocabularies.constraint("choice", choice)).result(timeout=60)


def test_a_token_with_a_text_of_any_length_may_be_in_a_vocabulary() -> None:
    texts = [*vocabularies.token_texts(256), b"a" * 5000]
    grammars = Grammars(len(texts), lambda: texts)
    masks = TokenMasks(grammars)
    masks.add(0, vocabularies.constraint("regex", "a*"), 0, None)
    masked = masks.compute([ConstrainedRow(0, 0, np.empty(0, np.int32))])
    allowed = np.unpackbits(masked.bitmask.view(np.uint8), axis=1, bitorder="little")[0]
    found = {texts[token] for token in np.flatnonzero(allowed)}
    assert found == {b"", b"a", b"aa"}  # the first is the end's
