"""RMS norm, with the addition to the residual stream before it.

Bound by memory bandwidth: with a residual three rows are read and two written, one read fewer than
by an addition and a norm of their own, which would read the sum again. One program per row, which
holds it in registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.gpu.checks import FLOATS, expect, expect_dtype, expect_rows

MAX_SIZE = 32768
"""The longest row that fits a program's registers."""


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
    values = tl.load(x + row * x_stride + column, mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * residual_stride + column
        values += tl.load(at, mask, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / SIZE
    weights = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(mean + eps) * weights
    tl.store(output + row * output_stride + column, values.to(output.dtype.element_ty), mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight; with a residual, of the sum that it then holds; as the reference."""
    expect_dtype("x", x, *FLOATS)
    expect_rows("x", x, None, None)
    num_rows, size = x.shape
    expect(size <= MAX_SIZE, f"x: expected rows of at most {MAX_SIZE} elements, got {size}")
    expect_dtype("weight", weight, *FLOATS)
    expect_rows("weight", weight, size)
    if residual is not None:
        expect_dtype("residual", residual, x.dtype)
        expect_rows("residual", residual, num_rows, size)
    output = x.new_empty((num_rows, size))
    if num_rows == 0:
        return output
    tile = triton.next_power_of_2(size)
    _rms_norm[(num_rows,)](
        output,
        x,
        x if residual is None else residual,
        weight,
        eps,
        output.stride(0),
        x.stride(0),
        x.stride(0) if residual is None else residual.stride(0),
        SIZE=size,
        HAS_RESIDUAL=residual is not None,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
        enable_fp_fusion=False,
    )
    return output
