"""A gated MLP's activation and product.

Bound by memory bandwidth: two elements read and one written for each element of the result.
"""

import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.gpu.checks import FLOATS, expect, expect_dtype, expect_rows

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")

_TILE = 1024


@triton.jit
def _act_and_mul(
    output, gate_up, row_stride, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    """Program (row, part of it)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    gate = tl.load(gate_up + row * row_stride + column, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + column, mask, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        active = gate / (1.0 + tl.exp(-gate))
    elif ACTIVATION == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(y)) is the logistic function of 2 * y (Hendrycks and Gimpel 2016).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-inner))
    tl.store(output + row * SIZE + column, (active * up).to(output.dtype.element_ty), mask)


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up; as `reference.act_and_mul`."""
    expected = ", ".join(ACTIVATIONS)
    expect(activation in ACTIVATIONS, f"activation: expected one of {expected}, got {activation!r}")
    expect_dtype("gate_up", gate_up, *FLOATS)
    expect_rows("gate_up", gate_up, None, None)
    num_rows, width = gate_up.shape
    expect(width % 2 == 0, f"gate_up: expected an even number of columns, got {width}")
    output = gate_up.new_empty((num_rows, width // 2))
    if output.numel() == 0:
        return output
    _act_and_mul[(num_rows, triton.cdiv(width // 2, _TILE))](
        output,
        gate_up,
        gate_up.stride(0),
        SIZE=width // 2,
        ACTIVATION=activation,
        TILE=_TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return output
