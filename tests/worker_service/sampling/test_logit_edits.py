"""Exclusions, biases and penalties against the plain reference."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker_service.sampling import reference
from worker_service.plan import SamplerParams
from worker_service.sampling.logit_edits import (
    BadWords,
    EditedRow,
    LogitEdits,
    Occurrences,
    apply_edits,
)

VOCAB_SIZE = 12
TOKENS = st.integers(0, VOCAB_SIZE - 1)


def int32(tokens: Sequence[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


@st.composite
def edit_params(draw: st.DrawFn) -> SamplerParams:
    biased = draw(st.lists(TOKENS, unique=True, max_size=4))
    return SamplerParams(
        repetition_penalty=draw(st.sampled_from((1.0, 1.3, 0.5))),
        presence_penalty=draw(st.sampled_from((0.0, 0.75, -1.0))),
        frequency_penalty=draw(st.sampled_from((0.0, 0.5, -0.25))),
        bias_token_ids=int32(biased),
        bias_values=np.array([draw(st.floats(-3, 3, width=32)) for _ in biased], np.float32),
        min_tokens=draw(st.integers(0, 6)),
        suppressed_token_ids=int32(draw(st.lists(TOKENS, max_size=2))),
        bad_words=tuple(
            tuple(word) for word in draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3)))
        ),
    )


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(
            edit_params(),
            st.lists(TOKENS, min_size=1),
            st.lists(TOKENS, max_size=12),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 2**32),
)
def test_edits_of_a_batch_equal_the_reference_of_each_row(
    rows: list[tuple[SamplerParams, list[int], list[int], int]], seed: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=(len(rows), VOCAB_SIZE)).astype(np.float32)
    edited = torch.from_numpy(logits.copy())
    batch = []
    for row, (params, prompt, output, most_drafts) in enumerate(rows):
        # Tokens come one by one, as they do when they are sampled; the last may be drafts.
        num_drafts = min(most_drafts, len(output))
        edits = LogitEdits.of(params, int32(prompt), int32([]))
        for token in output[: len(output) - num_drafts]:
            if edits.occurrences is not None:
                edits.occurrences.append(token)
        batch.append(EditedRow(row, edits, int32(output), num_drafts))
    apply_edits(edited, batch)
    for row, (params, prompt, output, _) in enumerate(rows):
        expected = reference.edited_logits(logits[row].tolist(), params, prompt, output)
        np.testing.assert_allclose(edited[row].numpy(), expected, rtol=1e-5, atol=1e-6)


@given(st.lists(TOKENS), st.lists(TOKENS, max_size=200), st.booleans())
def test_occurrences_kept_token_by_token_equal_those_counted_at_once(
    prompt: list[int], output: list[int], with_prompt: bool
) -> None:
    at_once = Occurrences(int32(prompt), int32(output), with_prompt=with_prompt)
    kept = Occurrences(int32(prompt), int32([]), with_prompt=with_prompt)
    for token in output:
        kept.append(token)
    expected = {token: output.count(token) for token in {*output, *(prompt if with_prompt else ())}}
    for occurrences in (at_once, kept):
        found = zip(occurrences.token_ids.tolist(), occurrences.output_counts.tolist(), strict=True)
        assert dict(found) == expected
        assert len(occurrences) == len(expected)


@given(st.lists(TOKENS), st.lists(TOKENS), st.lists(TOKENS, max_size=9), st.booleans())
def test_occurrences_with_drafts_equal_those_after_as_much_output(
    prompt: list[int], output: list[int], drafts: list[int], with_prompt: bool
) -> None:
    counted = Occurrences(int32(prompt), int32(output), with_prompt=with_prompt)
    later = Occurrences(int32(prompt), int32(output + drafts), with_prompt=with_prompt)
    before = counted.output_counts.tolist()
    token_ids, counts = counted.with_drafts(int32(drafts))
    found = dict(zip(token_ids.tolist(), counts.tolist(), strict=True))
    assert len(found) == len(token_ids)
    assert found == dict(zip(later.token_ids.tolist(), later.output_counts.tolist(), strict=True))
    assert counted.output_counts.tolist() == before, "refused drafts leave nothing behind"


def test_occurrences_grow_beyond_their_first_columns() -> None:
    occurrences = Occurrences(int32([]), int32([]), with_prompt=True)
    for token in range(1000):
        occurrences.append(token)
    assert occurrences.token_ids.tolist() == list(range(1000))
    assert occurrences.output_counts.tolist() == [1] * 1000


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    assert BadWords([(3,), (5,)]).banned_after(int32([])).tolist() == [3, 5]


def test_a_bad_word_is_banned_only_after_its_beginning() -> None:
    words = BadWords([(1, 2, 3), (4, 2, 9)])
    assert words.banned_after(int32([1, 2])).tolist() == [3]
    assert words.banned_after(int32([7, 4, 2])).tolist() == [9]
    assert words.banned_after(int32([2])).tolist() == []
    assert words.banned_after(int32([1, 3, 2])).tolist() == []


def test_tokens_may_be_suppressed_for_longer_than_any_output() -> None:
    params = SamplerParams(min_tokens=2**32 - 1, suppressed_token_ids=int32([3]))
    row = EditedRow(0, LogitEdits.of(params, int32([1]), int32([])), int32([5] * 9))
    logits = torch.zeros(1, VOCAB_SIZE)
    apply_edits(logits, [row])
    assert logits.isinf().nonzero().tolist() == [[0, 3]]
