"""RMS norm and layer norm, fused with the residual addition before them, and activations.

All are bound by memory bandwidth. A norm with a residual saves one read of a row compared with a
separate addition; one program computes a row, which it holds in registers. An activation reads one
or two elements and writes one.
"""

from functools import partial
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.triton.checks import FLOATS, expect, expect_dtype, expect_rows
from pagewire_kernels.triton.launch import LayoutLaunch, derived, layout_launch, run

MAX_SIZE = 32768
"""The longest row that fits into a program's registers, in elements."""


@triton.jit
def _row(x, residual, mask, HAS_RESIDUAL: tl.constexpr):
    """Load a row in float32; add it to the residual, rounded to its dtype, if there is one."""
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
    """x / rms(x) * weight, after adding x to the residual if given; as `reference.rms_norm`."""
    launch = derived(_rms_norm_launch, x, weight, residual)
    output = x.new_empty(x.shape)
    if launch is not None:
        run(launch, (output, x, x if residual is None else residual, weight), eps)
    return output


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
) -> Tensor:
    """(x - mean) / deviation * weight + bias; as `reference.layer_norm`."""
    launch = derived(_layer_norm_launch, x, weight, bias, residual)
    output = x.new_empty(x.shape)
    if launch is not None:
        absent = (x if tensor is None else tensor for tensor in (residual, weight, bias))
        run(launch, (output, x, *absent), eps)
    return output


def _rms_norm_launch(x: Tensor, weight: Tensor, residual: Tensor | None) -> LayoutLaunch | None:
    _check_norm(x, weight, None, residual)
    return _norm_launch(_rms_norm, x, weight, residual)


def _layer_norm_launch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> LayoutLaunch | None:
    expect((weight is None) == (bias is None), "weight and bias: expected both or neither")
    _check_norm(x, weight, bias, residual)
    return _norm_launch(_layer_norm, x, weight, residual, IS_AFFINE=weight is not None)


def _norm_launch(
    kernel: Any, x: Tensor, weight: Tensor | None, residual: Tensor | None, **options: bool
) -> LayoutLaunch | None:
    """The launch of a norm; None if there are no rows."""
    num_rows, size = x.shape
    if num_rows == 0:
        return None
    if weight is not None:  # a number also in compiled code, where the shape of x is symbols
        size = weight.shape[0]
    tile = triton.next_power_of_2(size)
    return layout_launch(
        kernel,
        (num_rows,),
        (size, x.stride(0), (x if residual is None else residual).stride(0)),
        HAS_RESIDUAL=residual is not None,
        SIZE=size,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
        enable_fp_fusion=False,
        **options,
    )


def _check_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None
) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            expect_rows(name, tensor, x.shape[-1])
            expect_dtype(name, tensor, *FLOATS)
    expect_dtype("x", x, *FLOATS)
    expect_rows("x", x, None, None)
    expect(x.shape[1] <= MAX_SIZE, f"x: expected rows of at most {MAX_SIZE}, got {x.shape[1]}")
    if residual is not None:
        expect_dtype("residual", residual, x.dtype)
        expect_rows("residual", residual, *x.shape)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")

_TILE = 1024


@triton.jit
def active(x, ACTIVATION: tl.constexpr):
    """activation(x), in float32."""
    if ACTIVATION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        result = tl.where(x < 0.0, 0.0, x)  # propagates NaN
    else:
        # 0.5 * (1 + tanh(y)) is the logistic function of 2 * y (Hendrycks and Gimpel 2016).
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        result = x / (1.0 + tl.exp(-inner))
    return result


@triton.jit
def _activate(x, num_elements, ACTIVATION: tl.constexpr, TILE: tl.constexpr):
    """Program (tile of all elements), in place."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = at < num_elements
    values = active(tl.load(x + at, mask, other=0.0).to(tl.float32), ACTIVATION)
    tl.store(x + at, values.to(x.dtype.element_ty), mask)


@triton.jit
def _act_and_mul(
    output, gate_up, row_stride, SIZE: tl.constexpr, ACTIVATION: tl.constexpr, TILE: tl.constexpr
):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    gate = tl.load(gate_up + row * row_stride + column, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + column, mask, other=0.0).to(tl.float32)
    gated = active(gate, ACTIVATION) * up
    tl.store(output + row * SIZE + column, gated.to(output.dtype.element_ty), mask)


def activate(x: Tensor, activation: str) -> Tensor:
    """activation(x), in place; as `reference.activate`."""
    _check_activation(activation)
    _check_rows("x", x)
    expect(x.is_contiguous(), f"x: expected a contiguous tensor, got strides {x.stride()}")
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
    _check_activation(activation)
    launch = derived(_ACT_AND_MUL_LAUNCHES[activation], gate_up)
    num_rows, width = gate_up.shape
    output = gate_up.new_empty((num_rows, width // 2))
    if launch is not None:
        run(launch, (output, gate_up))
    return output


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        expected = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation: expected one of {expected}, got {activation!r}")


def _act_and_mul_launch(gate_up: Tensor, activation: str) -> LayoutLaunch | None:
    _check_rows("gate_up", gate_up)
    num_rows, width = gate_up.shape
    expect(width % 2 == 0, f"gate_up: expected an even number of columns, got {width}")
    if gate_up.numel() == 0:
        return None
    size = width // 2
    return layout_launch(
        _act_and_mul,
        (num_rows, triton.cdiv(size, _TILE)),
        (gate_up.stride(0),),
        SIZE=size,
        ACTIVATION=activation,
        TILE=_TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


_ACT_AND_MUL_LAUNCHES = {
    activation: partial(_act_and_mul_launch, activation=activation) for activation in ACTIVATIONS
}


def _check_rows(name: str, rows: Tensor) -> None:
    expect_dtype(name, rows, *FLOATS)
    expect_rows(name, rows, None, None)
