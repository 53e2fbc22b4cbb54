import json
import random
import sys
import threading
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from scheduler_service.errors import UnsupportedByModel
from scheduler_service.frontend.models.tokenizer import (
    PIECE_CHARS,
    ModelTokenizer,
    TooManyTokens,
)
from tests.support.tokenizers import BOS, EOS, byte_level, sentencepiece

FILE = byte_level().to_str().encode()
BOS_ID, EOS_ID = byte_level().token_to_id(BOS), byte_level().token_to_id(EOS)
NAMES = {"bos_token": BOS, "eos_token": {"content": EOS, "lstrip": False}}
CHAT = [{"role": "user", "content": "hello"}]


def encode_chat(tokenizer: ModelTokenizer, *, add_generation_prompt: bool) -> list[int]:
    template = tokenizer.chat_template(with_tools=False)
    text = template.render(CHAT, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode(text, add_special_tokens=False)


def around(**config: object) -> tuple[bool, bool]:
    """Whether a text gets a first and a last special token."""
    ids = ModelTokenizer(FILE, NAMES | config).encode("hello")
    return ids[0] == BOS_ID, ids[-1] == EOS_ID


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (True, False)),
        ({"add_bos_token": False}, (False, False)),
        ({"add_bos_token": True}, (True, False)),
        ({"add_eos_token": True}, (False, True)),
        ({"add_bos_token": True, "add_eos_token": True}, (True, True)),
        ({"add_bos_token": True, "bos_token": None}, (False, False)),
    ],
)
def test_the_configuration_overrules_the_special_tokens_of_the_file(
    config: dict[str, object], expected: tuple[bool, bool]
) -> None:
    assert around(**config) == expected


def test_truncation_and_padding_stored_in_the_file_do_not_apply() -> None:
    tokenizer = byte_level().from_str(byte_level().to_str())
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    ours = ModelTokenizer(tokenizer.to_str().encode())
    assert ours.encode("hello hello hello") == byte_level().encode("hello hello hello").ids


def test_a_chat_is_rendered_and_gets_no_special_tokens_but_the_templates_own() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{{eos_token}}"
    tokenizer = ModelTokenizer(FILE, NAMES, {"default": source})
    ids = encode_chat(tokenizer, add_generation_prompt=True)
    assert ids[0] == BOS_ID
    assert ids.count(BOS_ID) == 1
    assert ids[-1] == EOS_ID


def test_without_a_template_there_is_no_chat() -> None:
    with pytest.raises(UnsupportedByModel, match="a worker's --chat-template gives it one"):
        ModelTokenizer(FILE).chat_template(with_tools=False)


def test_bad_words_are_banned_at_the_start_and_inside_a_text() -> None:
    tokenizer = ModelTokenizer(FILE)
    texts = [
        tokenizer.decode(ids, skip_special_tokens=False)
        for ids in tokenizer.bad_word_sequences("hello")
    ]
    assert texts == ["hello", " hello"]


def test_one_spelling_is_banned_once() -> None:
    assert len(ModelTokenizer(FILE).bad_word_sequences(" hello")) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((b"{}",), "tokenizer.json"),
        ((b"\xff\xff",), "tokenizer.json"),
        ((FILE, {"added_tokens_decoder": {"5": "x"}}), "added_tokens_decoder: expected tokens"),
        ((FILE, {"added_tokens_decoder": {"x": {"content": "x"}}}), "added_tokens_decoder"),
    ],
)
def test_files_that_cannot_be_used_are_a_value_error(
    arguments: tuple[bytes], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        ModelTokenizer(*arguments)


def test_tokens_are_named_as_the_vocabulary_writes_them() -> None:
    tokenizer = ModelTokenizer(sentencepiece().to_str().encode())
    ids = [sentencepiece().token_to_id(name) for name in ("▁hello", "<0xE4>")]
    assert [tokenizer.token_name(token_id) for token_id in [*ids, 9999]] == ["▁hello", "<0xE4>", ""]
    assert json.loads(sentencepiece().to_str())["model"]["byte_fallback"]


LONG = " ".join(random.Random(1).choices(["hello", "world", "café", "fox,", "你好"], k=60_000))
"""Several pieces long."""


@pytest.mark.parametrize("library", [byte_level(), sentencepiece()])
def test_texts_of_any_length_have_the_librarys_own_tokens(library: Tokenizer) -> None:
    tokenizer = ModelTokenizer(library.to_str().encode())
    assert len(LONG) > 4 * PIECE_CHARS
    for text in ("", "hello", LONG):
        for adds in (True, False):
            expected = library.encode(text, add_special_tokens=adds).ids
            assert tokenizer.encode(text, add_special_tokens=adds) == expected
            num_tokens = len(expected)
            within = tokenizer.encode(text, add_special_tokens=adds, max_tokens=num_tokens)
            assert within == expected
            for end in (1, 100, num_tokens):
                assert tokenizer.encode_end(text, end, add_special_tokens=adds) == expected[-end:]


def test_a_text_with_too_many_tokens_is_not_encoded_as_a_whole() -> None:
    tokenizer = ModelTokenizer(FILE)
    num_tokens = len(tokenizer.encode(LONG))
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(LONG, max_tokens=num_tokens - 1)
    assert caught.value.number == num_tokens
    with pytest.raises(TooManyTokens) as caught:
        tokenizer.encode(LONG, max_tokens=1000)
    assert 1000 < caught.value.number < num_tokens / 2


@pytest.fixture
def no_timed_switches() -> Iterator[None]:
    """A thread keeps the interpreter's lock until it releases it itself."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.usefixtures("no_timed_switches")
def test_other_threads_run_while_a_text_is_encoded() -> None:
    tokenizer = ModelTokenizer(FILE)
    began = threading.Event()
    is_encoding = has_run = False

    def encode() -> None:
        nonlocal is_encoding
        for _ in range(20):  # the operating system may not wake the other thread during the first
            is_encoding = True
            began.set()
            tokenizer.encode(LONG)
            is_encoding = False
            if has_run:
                break

    encoder = threading.Thread(target=encode)
    encoder.start()
    began.wait()
    has_run = is_encoding  # False if this thread had to wait for the last call to return
    encoder.join()
    assert has_run
