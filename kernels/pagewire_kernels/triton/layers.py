"""RMS norm and layer norm, with the addition to the residual stream before it.

Bound by memory bandwidth: with a residual three rows are read and two written, one read fewer than
by an addition and a norm of their own, which would read the sum again. One program per row, which
holds it in registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.triton.checks import FLOATS, expect, expect_dtype, expect_rows

MAX_SIZE = 32768
"""The longest row that fits a program's registers."""


@triton.jit
def _row(x, residual, mask, HAS_RESIDUAL: tl.constexpr):
    """A row in float32, added to the residual's and rounded to its type if there is one."""
    values = tl.load(x, mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual, mask, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual, rounded, mask)
        values = rounded.to(tl.float32)
    return values


@triton.jit
def _rms_norm(
    output,
    x,
    residual,
    weight,
    eps,
    output_stride,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < SIZE
    values = _row(
        x + row * x_stride + column, residual + row * residual_stride + column, mask, HAS_RESIDUAL
    )
    mean = tl.sum(values * values, axis=0) / SIZE
    weights = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(mean + eps) * weights
    tl.store(output + row * output_stride + column, values.to(output.dtype.element_ty), mask)


@triton.jit
def _layer_norm(
    output,
    x,
    residual,
    weight,
    bias,
    eps,
    output_stride,
    x_stride,
    residual_stride,
    SIZE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_AFFINE: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < SIZE
    values = _row(
        x + row * x_stride + column, residual + row * residual_stride + column, mask, HAS_RESIDUAL
    )
    mean = tl.sum(values, axis=0) / SIZE
    values = tl.where(mask, values - mean, 0.0)
    variance = tl.sum(values * values, axis=0) / SIZE
    values = values * tl.rsqrt(variance + eps)
    if IS_AFFINE:
        values = values * tl.load(weight + column, mask, other=0.0).to(tl.float32)
        values = values + tl.load(bias + column, mask, other=0.0).to(tl.float32)
    tl.store(output + row * output_stride + column, values.to(output.dtype.element_ty), mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight; with a residual, of the sum that it then holds; as the reference."""
    expect_rows("weight", weight, x.shape[-1])
    expect_dtype("weight", weight, *FLOATS)
    output = _checked_output(x, residual)
    if len(x):
        _rms_norm[(len(x),)](
            output,
            x,
            x if residual is None else residual,
            weight,
            eps,
            *_row_strides(output, x, residual),
            HAS_RESIDUAL=residual is not None,
            **_tiling(x.shape[1]),
        )
    return output


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
) -> Tensor:
    """(x - mean) / deviation * weight + bias; a residual as in `rms_norm`; as the reference."""
    expect((weight is None) == (bias is None), "weight and bias: expected both or neither")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            expect_rows(name, tensor, x.shape[-1])
            expect_dtype(name, tensor, *FLOATS)
    output = _checked_output(x, residual)
    if len(x):
        _layer_norm[(len(x),)](
            output,
            x,
            x if residual is None else residual,
            x if weight is None else weight,
            x if bias is None else bias,
            eps,
            *_row_strides(output, x, residual),
            HAS_RESIDUAL=residual is not None,
            IS_AFFINE=weight is not None,
            **_tiling(x.shape[1]),
        )
    return output


def _checked_output(x: Tensor, residual: Tensor | None) -> Tensor:
    """Room for the result, after a look at what goes in."""
    expect_dtype("x", x, *FLOATS)
    expect_rows("x", x, None, None)
    expect(x.shape[1] <= MAX_SIZE, f"x: expected rows of at most {MAX_SIZE}, got {x.shape[1]}")
    if residual is not None:
        expect_dtype("residual", residual, x.dtype)
        expect_rows("residual", residual, *x.shape)
    return x.new_empty(x.shape)


def _row_strides(output: Tensor, x: Tensor, residual: Tensor | None) -> tuple[int, int, int]:
    return output.stride(0), x.stride(0), (x if residual is None else residual).stride(0)


def _tiling(size: int) -> dict[str, int | bool]:
    tile = triton.next_power_of_2(size)
    return {
        "SIZE": size,
        "TILE": tile,
        "num_warps": min(16, max(1, tile // 512)),
        "enable_fp_fusion": False,
    }
