"""The oracle of the sampling kernels."""

import numpy as np
import pytest
import torch

from pagewire_kernels import reference
from tests.support.sampling_tables import Sampled, tables_of

PROBABILITIES = torch.tensor([[0.5, 0.3, 0.15, 0.05]])


def _shares(**params: float) -> list[float]:
    """How often each token is drawn from one distribution by 2,000 rows."""
    n = 2000
    rows, tables = tables_of([Sampled({"seed": seed, **params}) for seed in range(n)], 4)
    logits, outcome = PROBABILITIES.log().repeat(n, 1), torch.zeros(n, dtype=torch.int64)
    sound = reference.edit(logits, rows, tables)
    reference.sample(logits, sound, rows, tables, outcome)
    return (np.bincount(outcome.numpy(), minlength=4) / n).tolist()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]),
        ({"top_p": 0.7}, [0.625, 0.375, 0, 0]),
        ({"min_p": 0.25}, [0.526, 0.316, 0.158, 0]),
        ({"temperature": 0.5}, [0.685, 0.247, 0.062, 0.007]),
        ({"temperature": 0.0}, [1, 0, 0, 0]),
    ],
    ids=["plain", "top-k", "top-p", "min-p", "cold", "greedy"],
)
def test_draws_follow_the_distribution(params: dict[str, float], expected: list[float]) -> None:
    assert _shares(**params) == pytest.approx(expected, abs=0.04)


def test_log_probabilities_are_those_of_a_log_softmax() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[3, 4], [0, 49], [7, 7]])
    logprobs, ranks = reference.gather_logprobs(logits, tokens)
    expected = torch.log_softmax(logits, dim=-1)
    torch.testing.assert_close(logprobs, expected.gather(1, tokens))
    order = torch.sort(logits, descending=True).indices
    assert [int(order[row, rank - 1]) for row, rank in enumerate(ranks)] == [3, 0, 7]


def test_a_bitmask_excludes_tokens_whose_bit_is_zero() -> None:
    logits = torch.arange(2 * 40, dtype=torch.float32).view(2, 40)
    before = logits.clone()
    bits = [1 << 3 | 1 << 31, 1 << 2]
    bitmask = torch.from_numpy(np.array([bits], np.uint32).view(np.int32))
    reference.apply_bitmask(logits, torch.tensor([1]), bitmask)
    assert logits[0].equal(before[0])
    assert logits[1].isfinite().nonzero().flatten().tolist() == [3, 31, 34]
    assert logits[1, [3, 31, 34]].equal(before[1, [3, 31, 34]])
