"""Penalties, bitmasks, sampling and log probabilities on the GPU against the reference."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from pagewire_kernels import philox, reference
from pagewire_kernels.batch import SamplingMetadata
from pagewire_kernels.triton import apply_bitmask, gather_logprobs, sample, sampling_kernels
from tests.support.gpu_kernels import DEVICE, MARKS, on_device

pytestmark = MARKS

VOCAB_SIZE = 300


def _metadata(
    temperature: list[float],
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: list[float] | None = None,
) -> SamplingMetadata:
    n = len(temperature)
    return SamplingMetadata(
        temperature=torch.tensor(temperature),
        top_k=torch.tensor(top_k or [0] * n, dtype=torch.int32),
        top_p=torch.tensor(top_p or [1.0] * n, dtype=torch.float64),
        min_p=torch.tensor(min_p or [0.0] * n, dtype=torch.float64),
        seeds=torch.arange(n) * 77,
        choice_indices=torch.arange(n, dtype=torch.int32) % 3,
        positions=torch.arange(n, dtype=torch.int32),
    )


def _logits(num_rows: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * spread


def _both(logits: torch.Tensor, metadata: SamplingMetadata, **options: int) -> list[list[int]]:
    ours = sample(logits.to(DEVICE), on_device(metadata), **options)
    return [ours.tolist(), reference.sample(logits, metadata).tolist()]


@triton.jit
def _draw(output, seeds, choice_indices, positions, num_rows, TILE: tl.constexpr):
    row = tl.arange(0, TILE)
    mask = row < num_rows
    draws = sampling_kernels.uniform(
        tl.load(seeds + row, mask, other=0),
        tl.load(choice_indices + row, mask, other=0),
        tl.load(positions + row, mask, other=0),
    )
    tl.store(output + row, draws, mask)


def test_draws_are_the_workers_own_to_the_bit() -> None:
    random = np.random.default_rng(0)
    seeds = random.integers(0, 2**64, 200, dtype=np.uint64)
    choices = random.integers(0, 2**31, 200, dtype=np.uint32)
    positions = random.integers(0, 2**31, 200)
    expected = philox.uniform(seeds, choices, positions)
    columns = [
        torch.from_numpy(seeds.view(np.int64)),
        torch.from_numpy(choices.astype(np.int32)),
        torch.from_numpy(positions.astype(np.int32)),
    ]
    draws = torch.empty(200, dtype=torch.float64, device=DEVICE)
    _draw[(1,)](
        draws, *[each.to(DEVICE) for each in columns], 200, TILE=256, enable_fp_fusion=False
    )
    assert np.array_equal(draws.cpu().numpy(), expected)
    assert np.array_equal(reference.uniforms(*columns).numpy(), expected)


@pytest.mark.parametrize("capacity", [16, 512])
def test_filtered_rows_get_the_references_tokens(capacity: int) -> None:
    metadata = _metadata(
        temperature=[1.0, 0.7, 1.3, 1.0, 2.0, 1.0, 0.5, 1.0],
        top_k=[5, 0, 0, 40, 70, 1, 9000, 50],
        top_p=[1.0, 0.9, 1.0, 0.8, 0.95, 1.0, 0.999, 0.0],
        min_p=[0.0, 0.0, 0.05, 0.01, 0.0, 0.0, 0.0, 0.0],
    )
    ours, expected = _both(_logits(8), metadata, capacity=capacity)
    assert ours == expected


def test_unfiltered_rows_get_the_references_tokens() -> None:
    ours, expected = _both(_logits(6, spread=1.0), _metadata([1.0, 0.3, 5.0, 1.0, 1.0, 2.0]))
    assert ours == expected
    assert len(set(ours)) > 3


def test_rows_of_several_tiles_get_the_references_tokens() -> None:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(8, 10_000, generator=draw) * 2
    logits[0, [4500, 9999]] = 40.0
    logits[1, :9000] = -torch.inf  # all weight is in the last tile
    metadata = _metadata(
        temperature=[0.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 0.0],
        top_k=[0, 0, 0, 0, 300, 0, 4000, 0],
        top_p=[1.0, 1.0, 1.0, 1.0, 1.0, 0.7, 0.99, 1.0],
        min_p=[0.0] * 7 + [0.5],
    )
    ours, expected = _both(logits, metadata)
    assert ours == expected
    assert ours[0] == 4500
    assert ours[1] >= 9000
    assert len({token // 4096 for token in ours}) == 3


def test_log_probabilities_of_several_tiles_agree_with_the_reference() -> None:
    logits = torch.randn(3, 10_000, generator=torch.Generator().manual_seed(4)) * 3
    tokens = torch.tensor([[9_999, 5], [0, 5_000], [4_096, 4_095]])
    logprobs, ranks = gather_logprobs(logits.to(DEVICE), tokens.to(DEVICE))
    expected_logprobs, expected_ranks = reference.gather_logprobs(logits, tokens)
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs, atol=1e-5, rtol=1e-5)
    assert ranks.tolist() == expected_ranks.tolist()


def test_a_greedy_row_gets_the_first_of_its_largest_logits() -> None:
    logits = _logits(2)
    logits[0, [299, 17, 40]] = 50.0
    ours, _ = _both(logits, _metadata([0.0, 0.0]))
    assert ours == [17, int(logits[1].argmax())]


def test_equal_logits_at_the_cut_all_stay() -> None:
    logits = torch.full((12, VOCAB_SIZE), -5.0)
    logits[:, [3, 99, 250]] = 4.0
    metadata = _metadata([1.0] * 12, top_k=[2] * 12)
    ours, expected = _both(logits, metadata)
    assert ours == expected
    assert set(ours) == {3, 99, 250}


def test_banned_tokens_are_never_drawn() -> None:
    logits = torch.zeros(4, VOCAB_SIZE)
    logits[:, :290] = -torch.inf
    ours, expected = _both(logits, _metadata([1.0] * 4, top_p=[0.5, 1.0] * 2))
    assert ours == expected
    assert min(ours) >= 290


def test_rows_without_a_finite_maximum_have_no_token() -> None:
    logits = _logits(4)
    logits[0] = -torch.inf
    logits[1, 2] = torch.nan
    logits[2, 2] = torch.inf
    ours, expected = _both(logits, _metadata([1.0, 0.0, 1.0, 1.0]))
    assert ours == expected
    assert ours[:3] == [-1, -1, -1]
    assert ours[3] >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_log_probabilities_agree_with_the_reference(dtype: torch.dtype) -> None:
    logits = _logits(4).to(dtype)
    tokens = torch.randint(0, VOCAB_SIZE, (4, 5), generator=torch.Generator().manual_seed(2))
    tokens[0, 0] = logits[0].argmax()
    logprobs, ranks = gather_logprobs(logits.to(DEVICE), tokens.to(DEVICE))
    expected_logprobs, expected_ranks = reference.gather_logprobs(logits, tokens)
    torch.testing.assert_close(logprobs.cpu(), expected_logprobs, atol=1e-5, rtol=1e-5)
    assert ranks.tolist() == expected_ranks.tolist()
    assert ranks[0] == 1


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 300, 5000])
def test_bitmasks_exclude_what_the_reference_excludes(vocab_size: int) -> None:
    draw = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(5, vocab_size, generator=draw)
    rows = torch.tensor([3, 0, 4])
    shape = (3, -(-vocab_size // 32))
    bitmask = torch.randint(-(2**31), 2**31, shape, generator=draw).int()
    ours, expected = logits.to(DEVICE), logits.clone()
    apply_bitmask(ours, rows.to(DEVICE), bitmask.to(DEVICE))
    reference.apply_bitmask(expected, rows, bitmask)
    assert ours.cpu().equal(expected)
    assert expected[[1, 2]].equal(logits[[1, 2]])


def test_a_bitmask_of_another_width_is_refused() -> None:
    logits, rows = torch.zeros(1, 65, device=DEVICE), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="expected 3 columns"):
        apply_bitmask(logits, rows, torch.zeros(1, 2, dtype=torch.int32))
