"""Products of few rows are those of torch, with and without an activation."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.triton import few_rows
from pagewire_kernels.triton.layers import ACTIVATIONS
from tests.support.gpu_kernels import DEVICE, INTERPRETED, MARKS, TOLERANCE, assert_agrees

pytestmark = MARKS

DTYPES = (torch.float16,) if INTERPRETED else few_rows.DTYPES
SHAPES = [(1, 64, 64), (4, 100, 130), (3, 3072, 30), (2, few_rows.MAX_INPUTS, 3), (2, 1024, 1037)]


def _drawn(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype, *, with_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(num_rows, 2 * num_inputs, generator=draw)[:, :num_inputs] / num_inputs**0.5
    weight = torch.randn(num_outputs, num_inputs, generator=draw).to(dtype)
    bias = torch.randn(num_outputs, generator=draw).to(dtype) if with_bias else None
    return rows.to(dtype), weight, bias


def _there(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_torchs(
    dtype: torch.dtype, shape: tuple[int, int, int], with_bias: bool
) -> None:
    rows, weight, bias = _drawn(*shape, dtype, with_bias=with_bias)
    expected = torch.nn.functional.linear(
        rows.float(), weight.float(), None if bias is None else bias.float()
    )
    given = rows.to(DEVICE), weight.to(DEVICE), _there(bias)
    assert_agrees(few_rows.multiply(*given), expected.to(dtype))
    assert_agrees(few_rows.multiply(*given, torch.float32), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_gated_product_is_the_references(
    dtype: torch.dtype, activation: str, with_bias: bool
) -> None:
    rows, weight, bias = _drawn(2, 200, 2 * 75, dtype, with_bias=with_bias)
    product = torch.nn.functional.linear(
        rows.float(), weight.float(), None if bias is None else bias.float()
    )
    expected = reference.act_and_mul(product.to(dtype).float(), activation)
    output = few_rows.multiply_gated(rows.to(DEVICE), weight.to(DEVICE), _there(bias), activation)
    tolerance = 4 * TOLERANCE[dtype]  # a product may be rounded the other way
    torch.testing.assert_close(output.cpu().float(), expected, atol=tolerance, rtol=tolerance)


def test_no_rows_give_no_rows() -> None:
    weight = torch.ones(4, 16, dtype=torch.float16, device=DEVICE)
    assert few_rows.multiply(weight[:0], weight).shape == (0, 4)
    assert few_rows.multiply_gated(weight[:0], weight, None, "silu").shape == (0, 2)


def test_only_few_rows_are_few() -> None:
    rows = torch.ones(few_rows.MAX_ROWS + 1, 16)
    assert few_rows.are_few(rows[:-1])
    assert not few_rows.are_few(rows)
    assert not few_rows.are_few(rows[:2, ::2])


def test_which_weights_are_supported() -> None:
    longest = torch.ones(1, few_rows.MAX_INPUTS, dtype=torch.float16)
    assert few_rows.can_multiply(longest)
    assert not few_rows.can_multiply(longest.float())
    assert not few_rows.can_multiply(longest.t())
    assert not few_rows.can_multiply(longest[:, :0])
    assert not few_rows.can_multiply(torch.ones(1, few_rows.MAX_INPUTS + 1, dtype=torch.float16))


def test_what_would_be_misread_is_refused() -> None:
    rows, weight = torch.ones(5, 16, dtype=torch.float16), torch.ones(3, 16, dtype=torch.float16)
    with pytest.raises(ValueError, match="rows: expected at most 4, got 5"):
        few_rows.multiply(rows, weight)
    with pytest.raises(TypeError, match="weight: expected float16, got"):
        few_rows.multiply(rows[:1], weight.bfloat16())
    with pytest.raises(ValueError, match=r"rows: expected shape \[\*, 16\], got \[1, 8\]"):
        few_rows.multiply(rows[:1, :8], weight)
