"""An MLP's activation, and a gated one's with its product.

Bound by memory bandwidth: one or two elements read and one written for each of the result.
"""

import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.triton.checks import FLOATS, expect, expect_dtype, expect_rows

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")

_TILE = 1024


@triton.jit
def _active(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        active = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        active = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        active = tl.where(x < 0.0, 0.0, x)  # a NaN stays one
    else:
        # 0.5 * (1 + tanh(y)) is the logistic function of 2 * y (Hendrycks and Gimpel 2016).
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        active = x / (1.0 + tl.exp(-inner))
    return active


@triton.jit
def _activate(x, num_elements, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """Program (part of all elements), in place."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < num_elements
    values = _active(tl.load(x + at, mask, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(x + at, values.to(x.dtype.element_ty), mask)


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
    active = _active(gate, ACTIVATION)
    tl.store(output + row * SIZE + column, (active * up).to(output.dtype.element_ty), mask)


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x), in place; as `reference.activate`."""
    _check(activation, "x", x)
    expect(x.is_contiguous(), f"x: expected dense rows, got strides {x.stride()}")
    if x.numel():
        _activate[(triton.cdiv(x.numel(), _TILE),)](
            x,
            x.numel(),
            ACTIVATION=activation,
            TILE=_TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return x


def act_and_mul(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up; as `reference.act_and_mul`."""
    _check(activation, "gate_up", gate_up)
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


def _check(activation: str, name: str, rows: Tensor) -> None:
    expected = ", ".join(ACTIVATIONS)
    expect(activation in ACTIVATIONS, f"activation: expected one of {expected}, got {activation!r}")
    expect_dtype(name, rows, *FLOATS)
    expect_rows(name, rows, None, None)
