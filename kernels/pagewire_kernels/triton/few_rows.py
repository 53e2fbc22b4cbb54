"""Products of very few rows, as in the decodes of one stream.

Bound by latency: a layer's weight of some megabytes is read in two microseconds, and a kernel for
tiles of rows takes longer than that to fill its pipeline. So each program reads the weights of its
outputs at once, into registers, before it does anything else, and multiplies them by one row after
the other. A program of a gated layer has weights of both halves, and applies the activation.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.reference import ACTIVATIONS
from pagewire_kernels.triton.checks import expect, expect_tensors
from pagewire_kernels.triton.launch import LayoutLaunch, derived, layout_launch, run
from pagewire_kernels.triton.layers import active

MAX_ROWS = 4
MAX_INPUTS = 16384
DTYPES = (torch.bfloat16, torch.float16)

_TILE = 16384
"""Weights per program, 64 per thread."""


@triton.jit
def _sums(weights, row, bias, out, is_out, output, HAS_BIAS: tl.constexpr):
    """The product of a tile of weights with a row, rounded as it would be stored, in float32."""
    sums = tl.sum(weights.to(tl.float32) * row[None, :], axis=1)
    if HAS_BIAS:
        sums += tl.load(bias + out, is_out, other=0.0).to(tl.float32)
    return sums.to(output.dtype.element_ty)


@triton.jit
def _few_rows(
    output,
    rows,
    weight,
    bias,
    row_stride,
    weight_stride,
    NUM_ROWS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Program (tile of outputs)."""
    out = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    column = tl.arange(0, TILE_INPUTS)
    is_out, is_column = out < NUM_OUTPUTS, column < NUM_INPUTS
    at = weight + out.to(tl.int64)[:, None] * weight_stride + column[None, :]
    mask = is_out[:, None] & is_column[None, :]
    weights = tl.load(at, mask, other=0.0)
    if ACTIVATION is not None:
        up_weights = tl.load(at + NUM_OUTPUTS * weight_stride, mask, other=0.0)
    for i in tl.static_range(NUM_ROWS):
        row = tl.load(rows + i * row_stride + column, is_column, other=0.0).to(tl.float32)
        product = _sums(weights, row, bias, out, is_out, output, HAS_BIAS)
        if ACTIVATION is not None:
            up = _sums(up_weights, row, bias + NUM_OUTPUTS, out, is_out, output, HAS_BIAS)
            gated = active(product.to(tl.float32), ACTIVATION) * up.to(tl.float32)
            product = gated.to(output.dtype.element_ty)
        tl.store(output + i * NUM_OUTPUTS + out, product, is_out)


def can_multiply(weight: Tensor) -> bool:
    """Whether the kernel supports a weight, [out_features, in_features]."""
    return weight.dtype in DTYPES and 0 < weight.shape[1] <= MAX_INPUTS and weight.stride(1) == 1


def are_few(rows: Tensor) -> bool:
    """Whether the kernel is for as many rows, outside of what torch compiles."""
    return rows.shape[0] <= MAX_ROWS and rows.stride(1) == 1 and not torch.compiler.is_compiling()


def multiply(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """rows @ weight.T + bias, summed in float32 and rounded once.

    rows: [num_rows, in_features] that `are_few`; weight: [out_features, in_features], one that
    `can_multiply`; bias: [out_features]; output_dtype: float32, or None for that of the rows.
    Returns [num_rows, out_features]. Raises TypeError or ValueError for other tensors.
    """
    output = rows.new_empty((rows.shape[0], weight.shape[0]), dtype=output_dtype or rows.dtype)
    return _product(None, output, rows, weight, bias)


def multiply_gated(rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(gate) * up, where the product holds gate, then up, each rounded as it would be
    stored. Arguments as for `multiply`. Returns [num_rows, out_features / 2]."""
    output = rows.new_empty((rows.shape[0], weight.shape[0] // 2))
    return _product(activation, output, rows, weight, bias)


def _product(
    activation: str | None, output: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    launch = derived(_LAUNCHES[activation], output, rows, weight, bias)
    if launch is not None:
        run(launch, (output, rows, weight, output if bias is None else bias))
    return output


def _launch(
    output: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> LayoutLaunch | None:
    num_outputs, num_inputs = weight.shape
    expect_tensors(
        ("rows", rows, DTYPES, (None, num_inputs)),
        ("weight", weight, (rows.dtype,), weight.shape),
        ("bias", bias, (rows.dtype,), (num_outputs,)),
    )
    expect(len(rows) <= MAX_ROWS, f"rows: expected at most {MAX_ROWS}, got {len(rows)}")
    expect(can_multiply(weight), f"weight: expected at most {MAX_INPUTS} inputs, got {num_inputs}")
    if output.numel() == 0:
        return None
    tile_inputs = triton.next_power_of_2(num_inputs)
    tile_outputs = max(1, _TILE // tile_inputs // (1 if activation is None else 2))
    return layout_launch(
        _few_rows,
        (triton.cdiv(output.shape[1], tile_outputs),),
        (rows.stride(0), weight.stride(0)),
        NUM_ROWS=len(rows),
        NUM_OUTPUTS=output.shape[1],
        NUM_INPUTS=num_inputs,
        HAS_BIAS=bias is not None,
        ACTIVATION=activation,
        TILE_OUTPUTS=tile_outputs,
        TILE_INPUTS=tile_inputs,
        num_warps=8,
        enable_fp_fusion=False,
    )


_LAUNCHES = {
    activation: partial(_launch, activation=activation) for activation in (None, *ACTIVATIONS)
}
