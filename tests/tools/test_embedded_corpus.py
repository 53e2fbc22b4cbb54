"""The corpus and the tokenizer of the embedded model."""

import re
from itertools import islice

import pytest
from tokenizers import Tokenizer

from tools.embedded_model.arithmetic import Pair, held_out_pairs, is_held_out
from tools.embedded_model.corpus import documents
from tools.embedded_model.documents import Document, Role
from tools.embedded_model.packing import Packer
from tools.embedded_model.tokenizer import BOS, EOS, SPECIAL_TOKENS, VOCAB_SIZE, train_tokenizer

NUM_DOCUMENTS = 20_000
WRITTEN_SUM = re.compile(r"(\d+) (?:\+|plus|and) (\d+)")


@pytest.fixture(scope="module")
def corpus() -> list[Document]:
    return list(islice(documents(seed=0), NUM_DOCUMENTS))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(seed=0)


def test_the_same_seed_gives_the_same_corpus(corpus: list[Document]) -> None:
    assert list(islice(documents(seed=0), 500)) == corpus[:500]
    assert list(islice(documents(seed=1), 500)) != corpus[:500]


def test_a_sixth_of_the_pairs_is_held_out_in_both_orders() -> None:
    pairs = set(held_out_pairs())
    assert 1500 <= len(pairs) <= 2000
    assert all(Pair(b, a) in pairs for a, b in pairs)


def test_held_out_sums_never_occur(corpus: list[Document]) -> None:
    num_sums = {"plain": 0, "chat": 0}
    for document in corpus:
        for segment in document.segments:
            for a, b in WRITTEN_SUM.findall(segment.text):
                assert not is_held_out(Pair(int(a), int(b))), segment.text
                num_sums["chat" if segment.role.is_chat else "plain"] += 1
    assert num_sums["plain"] > 1000
    assert num_sums["chat"] > 1000


def test_every_question_about_addition_states_its_sum(corpus: list[Document]) -> None:
    """So the search for held-out sums in the answers misses none of the questions."""
    for document in corpus:
        for asked, answered in zip(document.segments, document.segments[1:], strict=False):
            is_question = asked.role is Role.USER and answered.role is Role.ASSISTANT
            numbers = re.findall(r"\d+", asked.text)
            if is_question and len(numbers) == 2 and "+" in answered.text:
                assert answered.text.startswith(f"{numbers[0]} + {numbers[1]} = ")


def test_written_sums_are_right(corpus: list[Document]) -> None:
    for document in corpus:
        for a, b, total in re.findall(r"(\d+) \+ (\d+) = (\d+)", document.text):
            assert int(a) + int(b) == int(total)


def test_corpus_is_ascii_without_unfilled_slots(corpus: list[Document]) -> None:
    for document in corpus:
        assert document.text.isascii()
        assert "{" not in document.text


def test_the_same_seed_gives_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(seed=0).to_str() == tokenizer.to_str()
    assert tokenizer.get_vocab_size() == VOCAB_SIZE


@pytest.mark.parametrize(
    "text",
    [
        "Once upon a time there was a cat.\n",
        "  two  spaces\tand a tab \r\n",
        "Grüße, 你好, שלום, नमस्ते",
        "emoji 👩‍👩‍👧 and a lone accent \u0301",
        "\x00\x01\x7f",
        "12345 + 67 = ١٢٣",
        "",
    ],
)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    encoding = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_bos_begins_every_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("cat").tokens[0] == BOS


def test_digits_are_single_tokens(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("27 + 45 = 72", add_special_tokens=False).tokens
    assert [token for token in tokens if token.isdigit()] == list("274572")
    learned = set(tokenizer.get_vocab()) - set(SPECIAL_TOKENS)
    assert not [token for token in learned if len(token) > 1 and re.search(r"\d", token)]


def test_prompt_and_completion_split_where_the_whole_text_does(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("27 + 45 = 72\n", add_special_tokens=False).ids
    parts = [tokenizer.encode(p, add_special_tokens=False).ids for p in ("27 + 45 =", " 72\n")]
    assert whole == parts[0] + parts[1]


def test_every_window_starts_with_a_whole_document(
    tokenizer: Tokenizer, corpus: list[Document]
) -> None:
    packer = Packer(tokenizer, iter(corpus))
    batch = packer.batch(num_windows=8, window=64)
    assert batch.token_ids.shape == batch.is_learned.shape == (8, 64)
    assert batch.token_ids[:, 0].tolist() == [tokenizer.token_to_id(BOS)] * 8


def test_only_completions_and_the_ends_of_documents_are_learned(tokenizer: Tokenizer) -> None:
    document = next(d for d in documents(0) if d.segments[0].role is Role.PROMPT)
    encoded = Packer(tokenizer, []).encode(document)
    learned = tokenizer.decode([t for t, is_learned in encoded if is_learned])
    assert learned == document.segments[1].text
    assert encoded[-1] == (tokenizer.token_to_id(EOS), True)
