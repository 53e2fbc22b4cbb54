"""Constraints exclude tokens on the host as the reference does."""

import numpy as np
import pytest
import torch

from pagewire_kernels import reference
from tests.worker_service.sampling.test_sampler import Rows
from worker_service.plan import SamplerParams
from worker_service.sampling.logit_edits import apply_masks
from worker_service.structured.masks import MaskedRows


def masked_rows(rows: list[int], vocab_size: int, *allowed: list[int]) -> MaskedRows:
    bits = np.zeros((len(rows), -(-vocab_size // 32) * 32), np.uint8)
    for line, tokens in zip(bits, allowed, strict=True):
        line[tokens] = 1
    bitmask = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return MaskedRows(rows=np.array(rows), bitmask=bitmask, failed=np.zeros(len(rows), np.bool_))


@pytest.mark.parametrize("vocab_size", [1, 32, 33, 1000])
@pytest.mark.parametrize("rows", [[0, 1, 2], [2], [0, 2]])
def test_masks_are_the_references(vocab_size: int, rows: list[int]) -> None:
    draw = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(draw.standard_normal((3, vocab_size)).astype(np.float32))
    allowed = [np.flatnonzero(draw.random(vocab_size) < 0.3).tolist() for _ in rows]
    masked = masked_rows(rows, vocab_size, *allowed)
    expected = logits.clone()
    reference.apply_bitmask(expected, torch.tensor(rows), torch.from_numpy(masked.bitmask))
    apply_masks(logits, masked)
    assert logits.equal(expected)


def test_greedy_random_and_reporting_rows_keep_to_their_masks() -> None:
    rows = Rows(vocab_size=100)
    rows.add(SamplerParams(temperature=0.0, num_logprobs=2))
    rows.add(SamplerParams(temperature=2.0, seed=4))
    rows.add(SamplerParams(temperature=2.0, seed=5, top_k=10))
    rows.add(SamplerParams(num_candidates=6))
    rows.add(SamplerParams(temperature=0.0))
    free = rows.sample()
    masked = masked_rows([0, 1, 2, 3], 100, [7, 90], [8], [9, 10], [11, 12])
    samples = rows.sample(masked=masked)
    assert samples.tokens[0] in (7, 90)
    assert samples.tokens[1] == 8
    assert samples.tokens[2] in (9, 10)
    assert sorted(samples.candidates[3].token_ids.tolist()) == [11, 12]
    assert samples.tokens[4] == free.tokens[4], "a row without a constraint"
    tops = [outcome.logprobs[0].token_ids.tolist()[1:] for outcome in (free, samples)]
    assert tops[0] == tops[1], "log probabilities are the model's own"


def test_a_row_without_anything_left_has_no_token() -> None:
    rows = Rows(vocab_size=40)
    for _ in range(2):
        rows.add(SamplerParams(temperature=1.0))
    samples = rows.sample(masked=masked_rows([1], 40, []))
    assert samples.no_candidates.tolist() == [1]
    assert samples.tokens[1] == -1
