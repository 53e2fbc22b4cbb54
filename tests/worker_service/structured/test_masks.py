"""Masks are what the contract says, token by token."""

import json
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.vocabularies import END, constraint, token_texts
from worker_service.plan import Constraint
from worker_service.structured.grammars import MAX_CACHED, Grammars
from worker_service.structured.masks import ConstrainedRow, TokenMasks

VOCAB_SIZE = 160
"""Not a multiple of 32; the vocabulary has texts for fewer."""
TEXTS = token_texts(VOCAB_SIZE)
GRAMMARS = Grammars(VOCAB_SIZE, lambda: TEXTS)
OTHER_END, LAST = 3, 4


def masks_after(
    masks: TokenMasks, outputs: dict[int, Sequence[int]]
) -> tuple[list[set[int]], list[bool]]:
    """The tokens allowed after each row's output, and whether its row has failed."""
    rows = [
        ConstrainedRow(row, row_id, np.array(output, np.int32))
        for row, (row_id, output) in enumerate(outputs.items())
    ]
    masked = masks.compute(rows)
    assert masked.rows.tolist() == list(range(len(rows)))
    bits = np.unpackbits(masked.bitmask.view(np.uint8), axis=1, bitorder="little")
    assert not bits[:, VOCAB_SIZE:].any()
    return [set(np.flatnonzero(row).tolist()) for row in bits], masked.failed.tolist()


def allowed(asked: Constraint, output: Sequence[int], min_tokens: int = 0) -> set[int]:
    """The tokens allowed after an output."""
    masks = TokenMasks(GRAMMARS)
    masks.add(0, asked, min_tokens, None)
    sets, failed = masks_after(masks, {0: output})
    assert failed == [False]
    return sets[0]


def expected(language: set[str], output: Sequence[int], ends: set[int]) -> set[int]:
    """The same for a finite language, by trying every token."""
    text = b"".join(TEXTS[token] for token in output).decode()
    tokens = {
        token
        for token, piece in enumerate(TEXTS)
        if piece and any(word.startswith(text + piece.decode()) for word in language)
    }
    return tokens | (ends if text in language else set())


def walk(asked: Constraint, language: set[str], choose: Callable[[list[int]], int]) -> None:
    """Follow one output to its end, looking at every token on the way."""
    output: list[int] = []
    while True:
        found = allowed(asked, output)
        assert found == expected(language, output, {END, OTHER_END}), output
        token = choose(sorted(found))
        if token in (END, OTHER_END):
            return
        output.append(token)


words = st.sets(st.text('ab{".*[|\\/ ', min_size=1, max_size=6), min_size=1, max_size=6)


@settings(max_examples=40)
@given(words, st.data())
def test_a_choice_allows_what_begins_one_of_its_texts(
    language: set[str], data: st.DataObject
) -> None:
    asked = constraint("choice", *sorted(language), ends=[END, OTHER_END])
    walk(asked, language, lambda tokens: data.draw(st.sampled_from(tokens)))


Pattern = tuple[str, frozenset[str]]
"""A regular expression, and all that it matches."""


def both(first: Pattern, second: Pattern) -> Pattern:
    texts = frozenset(a + b for a, b in product(first[1], second[1]))
    return f"(?:{first[0]})(?:{second[0]})", texts


def either(first: Pattern, second: Pattern) -> Pattern:
    return f"{first[0]}|{second[0]}", first[1] | second[1]


def once_or_twice(one: Pattern) -> Pattern:
    return f"(?:{one[0]}){{1,2}}", one[1] | both(one, one)[1]


leaves = {"a": "a", "[ab]": "ab", "ab": ["ab"], "c?": ["", "c"], r"\{": "{", "/": "/"}
patterns = st.recursive(
    st.sampled_from([(pattern, frozenset(texts)) for pattern, texts in leaves.items()]),
    lambda inner: st.one_of(
        st.builds(both, inner, inner), st.builds(either, inner, inner), inner.map(once_or_twice)
    ),
    max_leaves=4,
).filter(lambda pattern: len(pattern[1]) <= 200)


@settings(max_examples=40)
@given(patterns, st.data())
def test_a_regex_allows_what_begins_a_match(pattern: Pattern, data: st.DataObject) -> None:
    asked = constraint("regex", pattern[0], ends=[END, OTHER_END])
    walk(asked, set(pattern[1]), lambda tokens: data.draw(st.sampled_from(tokens)))


@settings(max_examples=40)
@given(st.data())
def test_a_matcher_made_anew_allows_what_the_one_that_was_there_does(data: st.DataObject) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 4}},
        "required": ["a"],
        "additionalProperties": False,
    }
    asked = constraint("json_schema", json.dumps(schema))
    masks = TokenMasks(GRAMMARS)
    masks.add(0, asked, 0, None)
    output: list[int] = []
    for _ in range(12):
        (found,), _ = masks_after(masks, {0: output})
        assert found == allowed(asked, output)
        token = data.draw(st.sampled_from(sorted(found)))
        if token == END:
            return
        output.append(token)


def test_drafts_count_as_output_of_the_rows_after_them() -> None:
    asked = constraint("regex", "(?:ab|ba)+")
    ids = {text: token for token, text in enumerate(TEXTS) if text}
    a, b = ids[b"a"], ids[b"b"]
    masks = TokenMasks(GRAMMARS)
    for row_id in (4, 5):
        masks.add(row_id, asked, 0, None)
    output = np.array([a, b, b, a, END, a], np.int32)
    wrong = np.array([a, b, b, b, a], np.int32)
    rows = [ConstrainedRow(place, 4, output[: 2 + place], place) for place in range(5)]
    rows += [ConstrainedRow(5 + place, 5, wrong[: 2 + place], place) for place in range(4)]
    masked = masks.compute(rows)
    bits = np.unpackbits(masked.bitmask.view(np.uint8), axis=1, bitorder="little")
    found = [set(np.flatnonzero(row).tolist()) for row in bits]
    texts = [output[:2], output[:3], output[:4], output[:5], output[:6], wrong[:2], wrong[:3]]
    assert found[:7] == [allowed(asked, text.tolist()) for text in texts]
    assert found[7:] == [set(), set()], "after a text that cannot be continued"
    assert masked.failed.tolist() == [False] * 7 + [True] * 2
    again = masks.compute([ConstrainedRow(0, 5, np.array([a, b, ids[b"ba"]], np.int32))])
    assert again.failed.tolist() == [False], "what was drafted has left no trace"


def test_a_stop_token_with_a_text_is_no_text_any_more() -> None:
    ids = {text: token for token, text in enumerate(TEXTS) if text}
    a, b = ids[b"a"], ids[b"b"]
    asked = constraint("regex", "[ab]+", ends=[b])
    assert b not in allowed(asked, [])
    assert b in allowed(asked, [a])
    assert b not in allowed(asked, [a], min_tokens=2)


@pytest.mark.parametrize(
    ("asked", "output"),
    [
        (constraint("choice", "ab"), [99]),
        (constraint("regex", "a("), []),
        (constraint("regex", "a\\"), []),
        (constraint("grammar", "start: b"), []),
        (constraint("grammar", "start: <nobody>"), []),
    ],
)
def test_a_row_that_cannot_go_on_fails_alone(asked: Constraint, output: list[int]) -> None:
    masks = TokenMasks(GRAMMARS)
    masks.add(0, constraint("choice", "ab"), 0, None)
    masks.add(1, asked, 0, None)
    found, failed = masks_after(masks, {0: [], 1: output})
    assert failed == [False, True]
    assert found[0]
    assert not found[1]


def test_of_more_constraints_than_are_kept_each_is_compiled_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that come in one plan are all needed in the same step."""
    grammars, texts = Grammars(VOCAB_SIZE, lambda: TEXTS), []
    compile_one = grammars._compile
    monkeypatch.setattr(
        grammars, "_compile", lambda text: (texts.append(text), compile_one(text))[1]
    )
    masks, row_ids = TokenMasks(grammars), range(MAX_CACHED + 3)
    for row_id in row_ids:
        masks.add(row_id, constraint("choice", str(row_id)), 0, None)
    found, failed = masks_after(masks, {row_id: [] for row_id in row_ids})
    assert all(found)
    assert not any(failed)
    assert len(texts) == len(row_ids)


def test_compiled_constraints_are_shared_and_bounded() -> None:
    grammars = Grammars(VOCAB_SIZE, lambda: TEXTS)
    first = grammars.expect(constraint("choice", "0"))
    assert grammars.expect(constraint("choice", "0", ends=[9])) is first
    for number in range(MAX_CACHED):
        grammars.expect(constraint("choice", str(number)))
    assert grammars.expect(constraint("choice", "0")) is first
    grammars.expect(constraint("choice", "another"))
    assert grammars.expect(constraint("choice", "1")) is not first
    assert len(grammars._compiled) == MAX_CACHED
