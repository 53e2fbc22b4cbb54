"""`text_offset` of completions: where each token is in the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagewire.v1 import inference_service_pb2 as pb
from scheduler_service.frontend.http.openai.serving import LegacyLogprobs
from scheduler_service.frontend.output.detokenizer import DetokenizerFactory
from tests.support.tokenizers import BOS, byte_level, sentencepiece

TOKENIZERS = {"bytes": byte_level(), "sentencepiece": sentencepiece()}


def offsets_of(tokenizer: Tokenizer, ids: list[int], *, text: str | None = None) -> list[int]:
    factory = DetokenizerFactory(tokenizer)
    positions = [
        pb.TokenLogprobs(token=pb.TokenLogprob(token_id=i, text=factory.token_text(i))) for i in ids
    ]
    detokenizer = factory.make(skip_special_tokens=text is None)
    return LegacyLogprobs(as_ids=False).write(positions, detokenizer, text=text)["text_offset"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.text("ab hello\u00e9\u6771\U0001f44d", max_size=12))
def test_a_token_begins_where_its_text_is(name: str, text: str) -> None:
    """Also after characters that consist of several tokens."""
    tokenizer = TOKENIZERS[name]
    factory, ids = DetokenizerFactory(tokenizer), tokenizer.encode(text).ids
    shown = tokenizer.decode(ids)
    offsets = offsets_of(tokenizer, ids)
    assert offsets == sorted(offsets)
    for token_id, offset in zip(ids, offsets, strict=True):
        own = factory.token_text(token_id)
        is_byte = tokenizer.id_to_token(token_id).startswith("<")  # begins with others of a run
        if "\ufffd" not in own and not is_byte:
            assert shown[offset:].startswith((own, own.lstrip(" ")))


def test_a_special_token_that_is_not_in_the_prompt_takes_no_space() -> None:
    ids = byte_level().encode("hello\u00e9!").ids
    assert byte_level().id_to_token(ids[0]) == BOS
    begin = {letter: offset for offset, letter in enumerate("hello\u00e9!")}
    offsets = offsets_of(byte_level(), ids, text="hello\u00e9!")
    assert offsets[0] == 0
    assert offsets[-1] == begin["!"]
    written = offsets_of(byte_level(), ids, text=f"{BOS}hello\u00e9!")
    assert written == [0, *(offset + len(BOS) for offset in offsets[1:])]
