"""A batch-invariant linear layer: the result of a row does not depend on the other rows, bitwise.

Libraries choose a kernel, its tiles and whether it splits the inner dimension by the number of
rows, and thereby the order in which the products of a row are summed. Here tiles depend only on the
shape of the weight, and the inner dimension is traversed in order, so that a row's result is the
same alone, in a batch and in a prefill (He et al. 2025, "Defeating nondeterminism in LLM
inference"). Decodes are bound by reading the weight, `2 * in_features * out_features` bytes in
bfloat16; prefills by arithmetic, for which larger tiles would be faster.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.interface import FLOATS
from pagewire_kernels.triton.checks import dense, expect_tensors

_TILE_ROWS = 64
GROUP_ROWS = 8
"""Tiles of rows that are multiplied by a tile of the weight in turn, while it is in cache."""

_NARROW_OUTPUTS = 16384
"""Weights with fewer outputs have narrower tiles, so that there are enough programs to saturate
memory bandwidth."""


@triton.jit
def tile_of(
    num_rows,
    NUM_OUTPUTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """The program's tiles of rows and of outputs, in groups that share a tile of the weight."""
    num_output_tiles: tl.constexpr = (NUM_OUTPUTS + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    num_row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    group = tl.program_id(0) // (GROUP_ROWS * num_output_tiles)
    in_group = tl.program_id(0) % (GROUP_ROWS * num_output_tiles)
    group_rows = tl.minimum(num_row_tiles - group * GROUP_ROWS, GROUP_ROWS)
    return group * GROUP_ROWS + in_group % group_rows, in_group // group_rows


# Not specialized by num_rows: code specialized for one row might sum in another order.
@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    output,
    rows,
    weight,
    bias,
    num_rows,
    row_stride,
    weight_stride,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    """Program (tile of rows and outputs)."""
    row_tile, output_tile = tile_of(num_rows, NUM_OUTPUTS, TILE_ROWS, TILE_OUTPUTS, GROUP_ROWS)
    row = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    out = output_tile * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_row, is_out = row < num_rows, out < NUM_OUTPUTS
    row_at = rows + tl.where(is_row, row, 0).to(tl.int64)[:, None] * row_stride
    weight_at = weight + tl.where(is_out, out, 0).to(tl.int64)[:, None] * weight_stride
    total = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
    for start in range(0, NUM_INPUTS, TILE_INPUTS):
        column = start + tl.arange(0, TILE_INPUTS)
        if NUM_INPUTS % TILE_INPUTS == 0:
            x = tl.load(row_at + column[None, :])
            w = tl.load(weight_at + column[None, :])
        else:
            x = tl.load(row_at + column[None, :], mask=column[None, :] < NUM_INPUTS, other=0.0)
            w = tl.load(weight_at + column[None, :], mask=column[None, :] < NUM_INPUTS, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias + out, mask=is_out, other=0.0).to(tl.float32)[None, :]
    at = output + row.to(tl.int64)[:, None] * NUM_OUTPUTS + out[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=is_row[:, None] & is_out[None, :])


def linear(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """rows @ weight.T + bias, with bitwise batch-invariant rows; summed in float32, rounded once.

    rows: [num_rows, in_features]; weight: [out_features, in_features]; bias: [out_features];
    output_dtype: None for that of the rows. Returns [num_rows, out_features]. Raises TypeError or
    ValueError for unsupported tensors.
    """
    num_outputs, num_inputs = weight.shape
    expect_tensors(
        ("rows", rows, FLOATS, (None, num_inputs)),
        ("weight", weight, (rows.dtype,), (num_outputs, num_inputs)),
        ("bias", bias, FLOATS, (num_outputs,)),
    )
    output = rows.new_empty((len(rows), num_outputs), dtype=output_dtype or rows.dtype)
    if output.numel() == 0:
        return output
    is_float32 = rows.dtype == torch.float32
    tile_outputs = 64 if num_outputs < _NARROW_OUTPUTS or is_float32 else 128
    num_tiles = triton.cdiv(len(rows), _TILE_ROWS) * triton.cdiv(num_outputs, tile_outputs)
    _linear[(num_tiles,)](
        output,
        rows,
        weight,
        output if bias is None else bias,
        len(rows),
        rows.stride(0),
        weight.stride(0),
        NUM_OUTPUTS=num_outputs,
        NUM_INPUTS=num_inputs,
        HAS_BIAS=bias is not None,
        TILE_ROWS=_TILE_ROWS,
        TILE_OUTPUTS=tile_outputs,
        TILE_INPUTS=32 if is_float32 else 64,
        GROUP_ROWS=GROUP_ROWS,
        num_warps=4,
        num_stages=2 if is_float32 else 4,
        enable_fp_fusion=False,
    )
    return output


class InvariantWeight:
    """The weight of a linear layer, not repacked, for products by `linear`. Implements
    `PackedWeight`."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.out_features, self.in_features = weight.shape

    def apply(
        self, rows: Tensor, bias: Tensor | None = None, *, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """rows @ weight.T + bias. rows: [num_rows, in_features]. Returns [num_rows,
        out_features]."""
        return linear(dense(rows), self._weight, bias, output_dtype)
