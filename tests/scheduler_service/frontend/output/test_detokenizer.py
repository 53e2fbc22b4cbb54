from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from scheduler_service.frontend.models.tokenizer import ModelTokenizer
from scheduler_service.frontend.output.detokenizer import REPLACEMENT, DetokenizerFactory
from tests.support import tokenizers as made

LIBRARY = {
    "byte-level": made.byte_level(),
    "llama": made.sentencepiece("llama"),
    "metaspace": made.sentencepiece("metaspace"),
}


def with_decoder(decoder: decoders.Decoder | None) -> Tokenizer:
    tokenizer = Tokenizer.from_str(made.sentencepiece().to_str())
    tokenizer.decoder = decoder
    return tokenizer


LIBRARY["wordpiece"] = with_decoder(decoders.WordPiece("▁"))
LIBRARY["suffixes"] = with_decoder(decoders.BPEDecoder("ld"))
OURS = {name: ModelTokenizer(tokenizer.to_str().encode()) for name, tokenizer in LIBRARY.items()}

kinds = st.sampled_from(sorted(LIBRARY))
# Sentencepiece vocabularies are mostly bytes: draw from the words as often as from those, and
# bytes that make characters more often than by chance. Ids past the vocabulary have no token.
token_ids = st.lists(
    st.one_of(
        st.integers(0, 405),
        st.integers(259, 272),
        st.sampled_from([3 + byte for byte in "你é😀".encode()]),
    ),
    max_size=40,
)


@given(kinds, token_ids, st.booleans())
def test_the_pieces_joined_are_what_the_library_decodes_from_all_tokens_at_once(
    kind: str, ids: list[int], skip: bool
) -> None:
    assert OURS[kind].decode(ids, skip_special_tokens=skip) == LIBRARY[kind].decode(
        ids, skip_special_tokens=skip
    )


ends = st.sampled_from([["hello"], ["a", "▁"], ["a", "ld"], [".", "ld", "</s>", "▁"], ["<0x7A>"]])


@given(kinds, token_ids, ends, token_ids, st.booleans())
def test_after_other_tokens_the_pieces_are_what_the_library_adds_to_their_text(
    kind: str, before: list[int], end: list[str], ids: list[int], skip: bool
) -> None:
    follows = before + [LIBRARY[kind].token_to_id(token) or 300 for token in end]
    detokenizer = OURS[kind].detokenizer(skip_special_tokens=skip, follows=follows)
    text = LIBRARY[kind].decode(follows, skip_special_tokens=skip)
    added = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
    whole = LIBRARY[kind].decode(follows + ids, skip_special_tokens=skip)
    # Bytes that follow others are a text together with these, or none of them is.
    assume(whole.startswith(text) and not text.endswith("\ufffd"))
    assert text + added == whole


@pytest.mark.parametrize("follows", [[], [1], [2, 400, 1]])
def test_a_text_after_special_tokens_alone_begins_without_a_space(follows: list[int]) -> None:
    detokenizer = OURS["llama"].detokenizer(skip_special_tokens=True, follows=follows)
    assert detokenizer.push(LIBRARY["llama"].token_to_id("▁hello") or 0) == "hello"


@given(kinds, token_ids)
def test_what_was_emitted_is_a_prefix_of_every_later_truth(kind: str, ids: list[int]) -> None:
    detokenizer = OURS[kind].detokenizer(skip_special_tokens=True)
    truth = LIBRARY[kind].decode(ids)
    emitted = ""
    for token_id in ids:
        emitted += detokenizer.push(token_id)
        assert truth.startswith(emitted)


@given(st.text(max_size=60), st.sampled_from(["byte-level", "llama", "metaspace"]))
def test_text_never_shows_a_broken_character_on_its_way(text: str, kind: str) -> None:
    text = text.replace(REPLACEMENT, "")
    ids = OURS[kind].encode(text, add_special_tokens=False)
    detokenizer = OURS[kind].detokenizer(skip_special_tokens=False)
    if "<unk>" in [OURS[kind].token_name(token_id) for token_id in ids]:
        return
    pieces = [detokenizer.push(token_id) for token_id in ids] + [detokenizer.flush()]
    assert not any(REPLACEMENT in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte_and_not_before() -> None:
    tokenizer = OURS["byte-level"]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=True)
    by_name = {tokenizer.token_name(id): id for id in range(400)}
    bytes_of_smile = [by_name[name] for name in ("ð", "Ł", "ĺ", "Ģ")]
    assert [detokenizer.push(token_id) for token_id in bytes_of_smile] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_a_character_that_is_never_completed_is_shown_as_broken_at_the_end() -> None:
    detokenizer = OURS["byte-level"].detokenizer(skip_special_tokens=True)
    broken = next(i for i in range(400) if OURS["byte-level"].token_name(i) == "ð")
    assert detokenizer.push(broken) == ""
    assert detokenizer.flush() == REPLACEMENT


@pytest.mark.parametrize(
    ("kind", "token", "text"),
    [
        ("byte-level", "Ġwor", " wor"),
        ("byte-level", "ð", REPLACEMENT),
        ("byte-level", "</s>", "</s>"),
        ("llama", "▁hello", " hello"),
        ("llama", "<0xE4>", REPLACEMENT),
        ("llama", "<0x41>", "A"),
        ("metaspace", "▁a", " a"),
    ],
)
def test_a_single_token_reads_as_it_does_inside_a_text(kind: str, token: str, text: str) -> None:
    token_id = LIBRARY[kind].token_to_id(token)
    assert token_id is not None
    assert OURS[kind].token_text(token_id) == text


class Counting:
    """A tokenizer that remembers the longest run of tokens it had to decode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.longest = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(ids))
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)


@pytest.mark.parametrize("kind", sorted(LIBRARY))
@pytest.mark.parametrize("token", ["▁", "hello", "<unk>", "\ufffd"])
def test_a_token_costs_the_same_however_long_the_text_is(kind: str, token: str) -> None:
    counting = Counting(LIBRARY[kind])
    detokenizer = DetokenizerFactory(counting).make(skip_special_tokens=False)
    for _ in range(200):
        detokenizer.push(LIBRARY[kind].token_to_id(token) or 300)
    assert counting.longest <= 4
