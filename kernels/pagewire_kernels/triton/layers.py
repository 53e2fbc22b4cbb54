"""RMS norm and layer norm, fused with the residual addition before them, activations, and sums of
rows.

All are bound by memory bandwidth. A norm with a residual saves one read of a row compared with a
separate addition; one program computes a row, which it holds in registers. An activation reads one
or two elements and writes one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.interface import FLOATS
from pagewire_kernels.reference import ACTIVATIONS, Gate
from pagewire_kernels.triton.checks import expect, expect_tensors
from pagewire_kernels.triton.launch import LayoutLaunch, derived, layout_launch, run

MAX_SIZE = 32768
"""The longest row that fits into a program's registers, in elements."""

_SUM_TILE = 128


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
def _norm(
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
    HAS_WEIGHT: tl.constexpr,
    IS_RMS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row): RMS norm, or layer norm, which has both weight and bias or neither."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    mask = column < SIZE
    values = _row(
        x + row * x_stride + column, residual + row * residual_stride + column, mask, HAS_RESIDUAL
    )
    if not IS_RMS:
        mean = tl.sum(values, axis=0) / SIZE
        values = tl.where(mask, values - mean, 0.0)
    variance = tl.sum(values * values, axis=0) / SIZE
    if HAS_WEIGHT:
        weights = tl.load(weight + column, mask, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(variance + eps)
    if HAS_WEIGHT:
        values = values * weights
        if not IS_RMS:
            values = values + tl.load(bias + column, mask, other=0.0).to(tl.float32)
    tl.store(output + row * output_stride + column, values.to(output.dtype.element_ty), mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight, after adding x to the residual if given; as `reference.rms_norm`."""
    return _normed(_rms_norm_launch, eps, x, residual, weight, None)


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
) -> Tensor:
    """(x - mean) / deviation * weight + bias; as `reference.layer_norm`."""
    return _normed(_layer_norm_launch, eps, x, residual, weight, bias)


def _normed(
    derive: Callable[..., LayoutLaunch | None], eps: float, x: Tensor, *others: Tensor | None
) -> Tensor:
    """others: residual, weight and bias."""
    launch = derived(derive, x, *others)
    output = x.new_empty(x.shape)
    if launch is not None:
        run(launch, (output, x, *(x if tensor is None else tensor for tensor in others)), eps)
    return output


def _norm_launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    is_rms: bool,
) -> LayoutLaunch | None:
    """The launch of a norm; None if there are no rows."""
    size = x.shape[-1]
    if not is_rms:
        expect((weight is None) == (bias is None), "weight and bias: expected both or neither")
    expect_tensors(
        ("x", x, FLOATS, (None, None)),
        ("weight", weight, FLOATS, (size,)),
        ("bias", bias, FLOATS, (size,)),
        ("residual", residual, (x.dtype,), x.shape),
    )
    expect(size <= MAX_SIZE, f"x: expected rows of at most {MAX_SIZE}, got {size}")
    if len(x) == 0:
        return None
    if weight is not None:  # a number also in compiled code, where the shape of x is symbols
        size = weight.shape[0]
    tile = triton.next_power_of_2(size)
    return layout_launch(
        _norm,
        (len(x),),
        (size, x.stride(0), (x if residual is None else residual).stride(0)),
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        IS_RMS=is_rms,
        SIZE=size,
        TILE=tile,
        num_warps=min(16, max(1, tile // 512)),
        enable_fp_fusion=False,
    )


_rms_norm_launch = partial(_norm_launch, is_rms=True)
_layer_norm_launch = partial(_norm_launch, is_rms=False)


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
    elif ACTIVATION == "relu2":
        result = tl.where(x < 0.0, 0.0, x * x)
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
    expect_tensors(("x", x, FLOATS, (None, None)))
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
    return _gated_launch(_act_and_mul, gate_up, ACTIVATION=activation)


def _gated_launch(kernel: Any, gate_up: Tensor, **constants: Any) -> LayoutLaunch | None:
    """The launch of a kernel that makes one column of two; None if there is nothing."""
    expect_tensors(("gate_up", gate_up, FLOATS, (None, None)))
    num_rows, width = gate_up.shape
    expect(width % 2 == 0, f"gate_up: expected an even number of columns, got {width}")
    if gate_up.numel() == 0:
        return None
    size = width // 2
    return layout_launch(
        kernel,
        (num_rows, triton.cdiv(size, _TILE)),
        (gate_up.stride(0),),
        SIZE=size,
        **constants,
        TILE=_TILE,
        num_warps=4,
        enable_fp_fusion=False,
    )


@triton.jit
def _clamped_silu_and_mul(
    output,
    gate_up,
    alpha,
    gate_limit,
    active_limit,
    up_limit,
    offset,
    row_stride,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    gate = tl.load(gate_up + row * row_stride + column, mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + SIZE + column, mask, other=0.0).to(tl.float32)
    gate = tl.where(gate > gate_limit, gate_limit, gate)  # propagates NaN
    up = tl.where(up > up_limit, up_limit, tl.where(up < -up_limit, -up_limit, up))
    activated = gate / (1.0 + tl.exp(-gate * alpha))
    activated = tl.where(activated > active_limit, active_limit, activated)
    gated = (up + offset) * activated
    tl.store(output + row * SIZE + column, gated.to(output.dtype.element_ty), mask)


def apply_gate(gate_up: Tensor, gate: Gate) -> Tensor:
    """The activation of rows that hold gate, then up, or up alone; as `Gate.apply`."""
    if not gate.multiplies:
        return activate(gate_up, gate.activation)
    if gate.limit is None:
        return act_and_mul(gate_up, gate.activation)
    launch = derived(_clamped_launch, gate_up)
    num_rows, width = gate_up.shape
    output = gate_up.new_empty((num_rows, width // 2))
    if launch is not None:
        run(launch, (output, gate_up), gate.alpha, *gate.limits, gate.limit, gate.offset)
    return output


def _clamped_launch(gate_up: Tensor) -> LayoutLaunch | None:
    return _gated_launch(_clamped_silu_and_mul, gate_up)


_ACT_AND_MUL_LAUNCHES = {
    activation: partial(_act_and_mul_launch, activation=activation) for activation in ACTIVATIONS
}


@triton.jit
def softplus(x):
    """log(1 + e^x): the digits of e^x that the sum has lost are added."""
    u = tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))
    total = 1.0 + u
    return tl.where(x > 20.0, x, tl.log(total) + (u - (total - 1.0)) / total)


@triton.jit(do_not_specialize=["products_stride", "x_stride"])
def _multiply_active(
    products,
    x,
    products_stride,
    x_stride,
    SIZE: tl.constexpr,
    IS_SOFTPLUS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask, target = column < SIZE, products + row * products_stride + column
    values = tl.load(target, mask, other=0.0).to(tl.float32)
    gates = tl.load(x + row * x_stride + column, mask, other=0.0).to(tl.float32)
    if IS_SOFTPLUS:
        values *= softplus(gates)
    else:
        values = values / (1.0 + tl.exp(-gates))
    tl.store(target, values.to(products.dtype.element_ty), mask)


def multiply_sigmoid(products: Tensor, x: Tensor) -> Tensor:
    """products * sigmoid(x), in place; as `reference.multiply_sigmoid`."""
    return _multiplied(products, x, is_softplus=False)


def multiply_softplus(products: Tensor, x: Tensor) -> Tensor:
    """products * softplus(x), in place; as `reference.multiply_softplus`."""
    return _multiplied(products, x, is_softplus=True)


def _multiplied(products: Tensor, x: Tensor, *, is_softplus: bool) -> Tensor:
    num_rows, size = products.shape
    expect_tensors(
        ("products", products, FLOATS, (None, None)), ("x", x, (products.dtype,), products.shape)
    )
    if products.numel():
        _multiply_active[(num_rows, triton.cdiv(size, _TILE))](
            products,
            x,
            products.stride(0),
            x.stride(0),
            SIZE=size,
            IS_SOFTPLUS=is_softplus,
            TILE=_TILE,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return products


@triton.jit(do_not_specialize=["x_stride"])
def _sum_rows(sums, x, starts, x_stride, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Program (text, tile of columns)."""
    text, column = tl.program_id(0), tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask, at = column < SIZE, sums + text.to(tl.int64) * SIZE + column
    total = tl.load(at, mask, other=0.0)
    first, end = tl.load(starts + text), tl.load(starts + text + 1)
    x += first.to(tl.int64) * x_stride
    for _ in range(first, end):
        total += tl.load(x + column, mask, other=0.0).to(tl.float32)
        x += x_stride
    tl.store(at, total, mask)


def sum_rows(hidden: Tensor, starts: Tensor, sums: Tensor) -> None:
    """Add the rows of each text to its sum, one after the other; as `reference.sum_rows`."""
    num_texts, size = sums.shape
    expect_tensors(
        ("hidden", hidden, FLOATS, (None, size)),
        ("starts", starts, (torch.int32,), (num_texts + 1,)),
        ("sums", sums, (torch.float32,), (num_texts, size)),
    )
    expect(sums.is_contiguous(), "sums: expected a contiguous tensor")
    grid = num_texts, triton.cdiv(size, _SUM_TILE)
    options = {"SIZE": size, "TILE": _SUM_TILE, "enable_fp_fusion": False}
    launch = layout_launch(_sum_rows, grid, (hidden.stride(0),), **options)
    run(launch, (sums, hidden, starts))
