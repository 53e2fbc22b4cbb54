"""What may precede a constrained text, token by token, compared with the contract's definition."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from tests.support.vocabularies import END, constraint, token_texts
from worker_service.plan import Constraint, Thought
from worker_service.structured.grammars import Grammars, special_texts
from worker_service.structured.masks import ConstrainedRow, TokenMasks

PIECES = [b"</", b"t>", b"t>\n", b"</t>x", b"x</", b"/t>ab", b"<t>x", b"", b""]
TEXTS = [*token_texts(110), *PIECES]
OPEN, CLOSE, LAST = 0, 1, 4
IN_THOUGHTS = [{OPEN: b"<t>", CLOSE: b"</t>"}.get(i, text) for i, text in enumerate(TEXTS)]
GRAMMARS = Grammars(len(TEXTS), lambda: TEXTS, lambda: {OPEN: b"<t>", CLOSE: b"</t>"})
LANGUAGE = ["ab", "abc", "<t", "<b", "a b"]
KINDS = {
    "json_schema": ['{"enum": ["ab", 7]}'],
    "regex": ["(ab)+c?"],
    "choice": LANGUAGE,
    "grammar": ['start: "(" start ")" | "ab"'],
}


def ids(*texts: str) -> list[int]:
    """The tokens with these texts."""
    return [IN_THOUGHTS.index(text.encode()) for text in texts]


def allowed(asked: Constraint, output: Sequence[int], masks: TokenMasks | None = None) -> set[int]:
    """The tokens allowed after an output; None in place of a set for a row that has failed."""
    if masks is None:
        masks = TokenMasks(GRAMMARS)
        masks.add(0, asked, 0, None)
    masked = masks.compute([ConstrainedRow(0, 0, np.array(output, np.int32))])
    assert not masked.failed[0]
    bits = np.unpackbits(masked.bitmask.view(np.uint8), axis=1, bitorder="little")
    return set(np.flatnonzero(bits[0]).tolist())


def has_failed(asked: Constraint, output: Sequence[int]) -> bool:
    masks = TokenMasks(GRAMMARS)
    masks.add(0, asked, 0, None)
    return bool(masks.compute([ConstrainedRow(0, 0, np.array(output, np.int32))]).failed[0])


def starts(thought: Thought) -> tuple[bytes, ...]:
    return tuple(start.encode() for start in (thought.start, *thought.other_starts))


def rest(thought: Thought, output: Sequence[int]) -> tuple[bytes, list[int]] | None:
    """The text after an output's first end, and the tokens after it; None if there is none."""
    text = b""
    for count, token in enumerate(output, 1):
        text += IN_THOUGHTS[token]
        if not text.startswith(starts(thought)):
            continue
        ends = [text.find(end.encode()) + len(end) for end in thought.ends if end.encode() in text]
        if ends:
            return text[min(ends) :], list(output[count:])
    return None


def expected(asked: Constraint, thought: Thought, output: Sequence[int]) -> set[int]:
    """The contract's words as a loop over all tokens."""
    plain = constraint(asked.kind.value, *asked.texts)
    text = b"".join(IN_THOUGHTS[token] for token in output)

    def may_begin(text: bytes) -> bool:
        return any(start.startswith(text) for start in starts(thought))

    if found := rest(thought, output):
        return allowed(plain, found[1])
    if not (text.startswith(starts(thought)) or may_begin(text)):
        return allowed(plain, output)

    def stays_in_thought(token: int) -> bool:
        found, after = rest(thought, [*output, token]), text + IN_THOUGHTS[token]
        if found and found[0]:
            return False
        if text.startswith(starts(thought)):
            return True
        return bool(IN_THOUGHTS[token]) and (after.startswith(starts(thought)) or may_begin(after))

    tokens = {token for token in range(len(TEXTS)) if token != END and stays_in_thought(token)}
    if not text.startswith(starts(thought)) and not has_failed(plain, output):
        tokens |= allowed(plain, output)
    return tokens


thoughts = st.builds(
    Thought,
    st.sampled_from(["", "<t>", "<t>x", "ab", "<"]),
    st.sampled_from([("</t>",), ("t>",), ("</t>", "/t"), ("xx",), ("</t>\n", "</t>x"), ("tt>",)]),
    st.sampled_from([(), ("\n<t>", "x<t"), ("a", "<t"), ("<t>xx",)]),
).filter(
    lambda thought: (
        (thought.start or not thought.other_starts)
        and not any(
            end in start for end in thought.ends for start in (thought.start, *thought.other_starts)
        )
    )
)


@settings(max_examples=150)
@given(st.sampled_from(list(KINDS)), thoughts, st.data())
def test_every_token_is_allowed_in_a_thought_and_the_constraint_begins_after_it(
    kind: str, thought: Thought, data: st.DataObject
) -> None:
    asked = constraint(kind, *KINDS[kind], thought=thought)
    masks, output = TokenMasks(GRAMMARS), list[int]()
    masks.add(0, asked, 0, None)
    marks = ids("<", "/", "t", ">", "</", "t>", "x", "<t>", "</t>")
    for _ in range(data.draw(st.integers(1, 12))):
        found = allowed(asked, output, masks)
        assert found == expected(asked, thought, output), output
        assert found == allowed(asked, output), "a matcher that is built from the tokens"
        likely = [token for token in marks if token in found]
        token = data.draw(st.sampled_from(likely * 3 + sorted(found)))
        if token == END:
            return
        output.append(token)


@settings(max_examples=100)
@given(thoughts, st.lists(st.sampled_from(range(len(TEXTS))), max_size=8), st.data())
def test_as_many_drafts_are_allowed_as_one_by_one(
    thought: Thought, tail: list[int], data: st.DataObject
) -> None:
    asked = constraint("choice", *LANGUAGE, thought=thought)
    marks = st.sampled_from([*ids("<t>", "</t>", "</", "t>", "x", "ab", "a", "b"), END])
    drafts = data.draw(st.lists(marks, max_size=8)) + tail
    masks = TokenMasks(GRAMMARS)
    masks.add(0, asked, 0, None)
    row = ConstrainedRow(0, 0, np.empty(0, np.int32))
    number = masks.num_allowed(row, np.array(drafts, np.int32))
    for place in range(number):
        if drafts[place] == END:
            return
        assert drafts[place] in allowed(asked, drafts[:place])
    if number < len(drafts) and drafts[number] != END:
        assert drafts[number] not in allowed(asked, drafts[:number])
    assert allowed(asked, [], masks) == allowed(asked, []), "drafts have left no trace"


def test_a_thought_of_thousands_of_tokens_computes_as_many_masks_as_its_end_has_bytes() -> None:
    asked = constraint("json_schema", '{"type": "object"}', thought=Thought("", ("</t>",)))
    masks = TokenMasks(GRAMMARS)
    masks.add(0, asked, 0, None)
    output = ids("x", "</", "x", "<", "t", '{"') * 500
    for count in range(len(output)):
        masks.compute([ConstrainedRow(0, 0, np.array(output[:count], np.int32))])
    assert asked.thought is not None
    assert GRAMMARS.thought(asked.thought).allowed.cache_info().currsize <= len("</t>")


def test_special_tokens_have_their_contents_in_thoughts() -> None:
    tokenizer = Tokenizer(models.BPE())
    assert special_texts(tokenizer) == {}
    tokenizer.add_special_tokens(["<|channel|>"])
    tokenizer.add_tokens(["<think>"])
    assert special_texts(tokenizer) == {0: b"<|channel|>"}
