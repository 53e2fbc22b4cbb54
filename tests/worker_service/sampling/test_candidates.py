"""Rows whose tokens the core chooses: what they report."""

import numpy as np
import pytest
import torch

from tests.worker_service.sampling.test_sampler import Rows, int32, mixed_rows
from worker_service.plan import SamplerParams


def test_edits_change_log_probabilities_which_are_not_normalised_again() -> None:
    rows = Rows(vocab_size=8)
    logits = torch.tensor([4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0])
    rows.add(
        SamplerParams(
            num_candidates=8,
            repetition_penalty=2.0,
            bias_token_ids=int32([2]),
            bias_values=np.array([1.5], np.float32),
            min_tokens=1,
            suppressed_token_ids=int32([0]),
        ),
        logits,
        prompt=[1],
    )
    found = rows.sample().candidates[0]
    expected = torch.log_softmax(logits, dim=-1)
    expected[0] = -torch.inf
    expected[1] *= 2  # repeated, and negative as any log probability
    expected[2] += 1.5
    order = expected.argsort(descending=True)[:7]
    assert found.token_ids.tolist() == order.tolist()
    assert found.logprobs.tobytes() == expected[order].numpy().tobytes()


def test_equal_tokens_come_in_order_of_their_ids() -> None:
    rows = Rows(vocab_size=100)
    rows.add(SamplerParams(num_candidates=40), torch.zeros(100))
    ids = rows.sample().candidates[0].token_ids.tolist()
    assert len(ids) == 40
    assert ids == sorted(ids)


@pytest.mark.parametrize("vocab_size", [100, 3000, 40_000])
def test_of_equal_tokens_the_lowest_are_told_whatever_a_neighbour_asks_for(vocab_size: int) -> None:
    """As a vocabulary's unused tokens are, whose weights are all alike."""
    rows = Rows(vocab_size=vocab_size)
    logits = torch.zeros(vocab_size)
    logits[vocab_size - 3 :] = 1.0
    first = rows.add(SamplerParams(num_candidates=20), logits)
    expected = [vocab_size - 3, vocab_size - 2, vocab_size - 1, *range(17)]
    assert rows.sample([first]).candidates[0].token_ids.tolist() == expected
    rows.add(SamplerParams(num_candidates=90))
    assert rows.sample().candidates[0].token_ids.tolist() == expected


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    rows = Rows(vocab_size=10)
    rows.add(SamplerParams(num_candidates=30))
    assert sorted(rows.sample().candidates[0].token_ids.tolist()) == list(range(10))


def test_logits_that_are_no_numbers_fail_the_row() -> None:
    rows = Rows(vocab_size=3)
    rows.add(SamplerParams(num_candidates=2), torch.tensor([0.0, torch.nan, 0.0]))
    samples = rows.sample()
    assert samples.candidates == {}
    assert samples.non_finite.tolist() == [0]


def test_neighbours_change_nothing_either_way() -> None:
    rows = mixed_rows()
    before = rows.sample()
    penalised = SamplerParams(num_candidates=7, repetition_penalty=1.3, num_logprobs=2)
    row_ids = [rows.add(penalised, prompt=[4, 9], output=[5, 5]) for _ in range(3)]
    together = rows.sample()
    assert together.tokens[:32].tolist() == before.tokens.tolist()
    assert together.logprobs.keys() == before.logprobs.keys()
    for row_id in row_ids:
        alone = rows.sample([row_id]).candidates[0]
        assert together.candidates[row_id].token_ids.tolist() == alone.token_ids.tolist()
        assert together.candidates[row_id].logprobs.tobytes() == alone.logprobs.tobytes()
