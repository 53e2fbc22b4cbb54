"""The batch-invariant linear layer: right, and each row the same in any batch."""

import pytest
import torch

from pagewire_kernels.triton import InvariantWeight, linear
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees

pytestmark = MARKS


def _random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=draw).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64, 64), (70, 100, 130), (65, 192, 30)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_torchs(
    dtype: torch.dtype, shape: tuple[int, int, int], with_bias: bool
) -> None:
    num_rows, num_inputs, num_outputs = shape
    rows = _random(num_rows, 2 * num_inputs, dtype=dtype)[:, :num_inputs] / num_inputs**0.5
    weight = _random(num_outputs, num_inputs, dtype=dtype, seed=1)
    bias = _random(num_outputs, dtype=dtype, seed=2) if with_bias else None
    there = None if bias is None else bias.to(DEVICE)
    expected = torch.nn.functional.linear(
        rows.float(), weight.float(), None if bias is None else bias.float()
    )
    output = linear(rows.to(DEVICE), weight.to(DEVICE), there)
    assert_agrees(output, expected.to(dtype))
    wide = InvariantWeight(weight.to(DEVICE)).apply(
        rows.to(DEVICE), there, output_dtype=torch.float32
    )
    assert_agrees(wide, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    rows, weight = _random(200, 160, dtype=dtype), _random(130, 160, dtype=dtype, seed=1)
    rows, weight = rows.to(DEVICE), weight.to(DEVICE)
    together = linear(rows, weight)
    for part in (slice(0, 1), slice(63, 66), slice(150, 151), slice(7, 200), slice(0, 128)):
        assert torch.equal(linear(rows[part], weight), together[part])


def test_no_rows_give_no_rows() -> None:
    weight = torch.ones(3, 16, device=DEVICE)
    assert linear(torch.ones(0, 16, device=DEVICE), weight).shape == (0, 3)


def test_what_would_be_misread_is_refused() -> None:
    rows, weight = torch.ones(2, 16), torch.ones(3, 16)
    with pytest.raises(TypeError, match="weight: expected float32, got"):
        linear(rows, weight.half())
    with pytest.raises(ValueError, match=r"rows: expected shape \[\*, 16\], got \[2, 8\]"):
        linear(rows[:, :8], weight)
