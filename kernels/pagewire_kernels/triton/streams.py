"""Rows of several streams, which a model mixes and corrects, and operations with the mean squares
or the deviations of rows."""

from math import isqrt

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.interface import FLOATS
from pagewire_kernels.reference.layers import MIN_MEAN_SQUARE, gate_counts
from pagewire_kernels.triton.checks import expect, expect_tensors

_TILE = 1024
_MAX_SIZE = 65536
"""The longest row that fits into a program's registers, in elements."""


@triton.jit(do_not_specialize=["x_stride", "num_deviations"])
def _sparsify(x, x_stride, num_deviations, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Program (row)."""
    column = tl.arange(0, TILE)
    mask, at = column < SIZE, x + tl.program_id(0).to(tl.int64) * x_stride + column
    values = tl.load(at, mask, other=0.0).to(tl.float32)
    mean = tl.sum(values, axis=0) / SIZE
    centred = tl.where(mask, values - mean, 0.0)
    deviation = tl.sqrt_rn(tl.sum(centred * centred, axis=0) / SIZE)
    beyond = values - (mean + deviation * num_deviations)
    beyond = tl.maximum(beyond, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(at, beyond.to(x.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["x_stride", "like_stride"])
def _match_rms(x, like, x_stride, like_stride, MIN, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Program (row)."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    mask, at = column < SIZE, x + row * x_stride + column
    values = tl.load(at, mask, other=0.0).to(tl.float32)
    wanted = tl.load(like + row * like_stride + column, mask, other=0.0).to(tl.float32)
    found = tl.sum(values * values, axis=0) / SIZE
    found = tl.maximum(found, MIN, propagate_nan=tl.PropagateNan.ALL)
    wanted_rms = tl.sqrt_rn(tl.sum(wanted * wanted, axis=0) / SIZE)
    tl.store(at, (values * wanted_rms / tl.sqrt_rn(found)).to(x.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["streams_stride", "factors_stride"])
def _mix(
    mixed,
    streams,
    factors,
    streams_stride,
    factors_stride,
    NUM: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of a stream's columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    streams += row * streams_stride + column
    mixed += row * NUM * SIZE + column
    factors += row * factors_stride
    for target in tl.static_range(NUM):
        total = tl.zeros((TILE,), tl.float32)
        for source in tl.static_range(NUM):
            factor = tl.load(factors + target * NUM + source).to(tl.float32)
            total += factor * tl.load(streams + source * SIZE, mask, other=0.0).to(tl.float32)
        total += tl.load(streams + target * SIZE, mask, other=0.0).to(tl.float32)
        tl.store(mixed + target * SIZE, total.to(mixed.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["streams_stride", "x_stride", "factors_stride"])
def _correct(
    streams,
    x,
    factors,
    streams_stride,
    x_stride,
    factors_stride,
    ACTIVE: tl.constexpr,
    NUM: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of a stream's columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    streams += row * streams_stride + column
    difference = tl.load(x + row * x_stride + column, mask, other=0.0).to(tl.float32)
    difference -= tl.load(streams + ACTIVE * SIZE, mask, other=0.0).to(tl.float32)
    for target in tl.static_range(NUM):
        factor = 1.0 + tl.load(factors + row * factors_stride + target).to(tl.float32)
        total = tl.load(streams + target * SIZE, mask, other=0.0).to(tl.float32)
        total += factor * difference
        tl.store(streams + target * SIZE, total.to(streams.dtype.element_ty), mask)


@triton.jit
def _line_sums(matrix, AXIS: tl.constexpr, offset):
    """Sums of the rows or columns of a matrix, plus an offset; 1 of those that are padding."""
    sums = tl.sum(matrix, axis=AXIS, keep_dims=True)
    return tl.where(sums > 0.0, sums + offset, 1.0)


@triton.jit(do_not_specialize=["streams_stride", "gates_stride"])
def _read(
    y,
    streams,
    gates,
    numbers,
    streams_stride,
    gates_stride,
    EPS,
    OFFSET,
    MAGNITUDE,
    NUM: tl.constexpr,
    PADDED: tl.constexpr,
    NUM_GATES: tl.constexpr,
    NUM_DIVISIONS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row)."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    mask = column < SIZE
    streams += row * streams_stride + column
    gates += row * gates_stride
    square = tl.zeros((TILE,), tl.float32)
    for source in tl.static_range(NUM):
        values = tl.load(streams + source * SIZE, mask, other=0.0).to(tl.float32)
        square += values * values
    inverse = 1.0 / tl.sqrt_rn(tl.sum(square, axis=0) / (NUM * SIZE) + EPS)
    total = tl.zeros((TILE,), tl.float32)
    for index in tl.static_range(2 * NUM if NUM_DIVISIONS > 0 else NUM_GATES):
        scaled = tl.load(gates + index) * inverse * tl.load(numbers + index)
        gate = 1.0 / (1.0 + tl.exp(-(scaled + tl.load(numbers + NUM_GATES + index))))
        if index < NUM:
            gate += OFFSET
            values = tl.load(streams + index * SIZE, mask, other=0.0).to(tl.float32)
            total += gate * values
        else:
            gate = gate * MAGNITUDE
            if NUM_DIVISIONS == 0:
                gate += OFFSET
        tl.store(gates + index, gate)
    if NUM_DIVISIONS > 0:
        source, target = tl.arange(0, PADDED)[:, None], tl.arange(0, PADDED)[None, :]
        at, is_there = 2 * NUM + source * NUM + target, (source < NUM) & (target < NUM)
        scaled = tl.load(gates + at, is_there, other=0.0) * inverse
        scaled *= tl.load(numbers + at, is_there, other=0.0)
        scaled += tl.load(numbers + NUM_GATES + at, is_there, other=0.0)
        scaled = tl.where(target < NUM, scaled, float("-inf"))
        scaled = tl.where(source < NUM, tl.exp(scaled - tl.max(scaled, axis=1)[:, None]), 0.0)
        matrix = tl.where(is_there, scaled / _line_sums(scaled, 1, 0.0) + OFFSET, 0.0)
        for division in range(NUM_DIVISIONS):
            if division > 0:
                matrix = matrix / _line_sums(matrix, 1, OFFSET)
            matrix = matrix / _line_sums(matrix, 0, OFFSET)
        tl.store(gates + at, matrix, is_there)
    tl.store(y + row * SIZE + column, total.to(y.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["streams_stride", "x_stride", "gates_stride"])
def _write(
    streams,
    x,
    gates,
    streams_stride,
    x_stride,
    gates_stride,
    MIXES: tl.constexpr,
    PADDED: tl.constexpr,
    NUM: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of a stream's columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    streams += row * streams_stride + column
    added = tl.load(x + row * x_stride + column, mask, other=0.0).to(tl.float32)
    gates += row * gates_stride
    if MIXES:
        # A column of a stream is replaced only after all that depend on it are computed.
        source = tl.arange(0, PADDED)[:, None]
        is_there = (source < NUM) & mask[None, :]
        before = tl.load(streams[None, :] + source * SIZE, is_there, other=0.0).to(tl.float32)
    for target in tl.static_range(NUM):
        total = tl.load(gates + target) * added
        if MIXES:
            weights = tl.load(gates + NUM + source * NUM + target, source < NUM, other=0.0)
            total += tl.sum(weights * before, axis=0)
        else:
            total += tl.load(streams + target * SIZE, mask, other=0.0).to(tl.float32)
        tl.store(streams + target * SIZE, total.to(streams.dtype.element_ty), mask)


def sparsify(x: Tensor, num_deviations: float) -> Tensor:
    """max(x - mean - num_deviations * deviation, 0), in place; as `reference.sparsify`."""
    expect_tensors(("x", x, FLOATS, (None, None)))
    if x.numel():
        _sparsify[(len(x),)](x, x.stride(0), num_deviations, **_of_row(x.shape[1]))
    return x


def match_rms(x: Tensor, like: Tensor) -> Tensor:
    """x * rms(like) / rms(x), in place; as `reference.match_rms`."""
    expect_tensors(("x", x, FLOATS, (None, None)), ("like", like, (x.dtype,), x.shape))
    if x.numel():
        strides = x.stride(0), like.stride(0)
        _match_rms[(len(x),)](x, like, *strides, MIN_MEAN_SQUARE, **_of_row(x.shape[1]))
    return x


def mix_streams(streams: Tensor, factors: Tensor) -> Tensor:
    """Add to each stream a weighted sum of all; as `reference.mix_streams`."""
    num_rows, width = streams.shape
    num = isqrt(factors.shape[1])
    expect_tensors(
        ("streams", streams, FLOATS, (None, None)),
        ("factors", factors, (streams.dtype,), (num_rows, num * num)),
    )
    mixed = torch.empty(num_rows, width, dtype=streams.dtype, device=streams.device)
    if mixed.numel():
        grid, sizes = _of_streams(num_rows, width, num)
        _mix[grid](mixed, streams, factors, streams.stride(0), factors.stride(0), **sizes)
    return mixed


def correct_streams(streams: Tensor, x: Tensor, factors: Tensor, active: int) -> Tensor:
    """Move each stream in place as x moves the active one; as `reference.correct_streams`."""
    (num_rows, width), num = streams.shape, factors.shape[1]
    expect_tensors(
        ("streams", streams, FLOATS, (None, None)),
        ("x", x, (streams.dtype,), (num_rows, width // num)),
        ("factors", factors, (streams.dtype,), (num_rows, num)),
    )
    if streams.numel():
        grid, sizes = _of_streams(num_rows, width, num)
        strides = streams.stride(0), x.stride(0), factors.stride(0)
        _correct[grid](streams, x, factors, *strides, ACTIVE=active, **sizes)
    return streams


def read_streams(
    streams: Tensor,
    gates: Tensor,
    numbers: Tensor,
    num_streams: int,
    *,
    eps: float,
    offset: float,
    magnitude: float,
    num_divisions: int = 0,
) -> Tensor:
    """The sum of the streams, each times its gate; as `reference.read_streams`."""
    (num_rows, width), num_gates = streams.shape, gates.shape[1]
    expect_tensors(
        ("streams", streams, FLOATS, (None, None)),
        ("gates", gates, (torch.float32,), (num_rows, None)),
        ("numbers", numbers, (torch.float32,), (2, num_gates)),
    )
    counts = gate_counts(num_streams, num_divisions)
    expect(num_gates in counts, f"gates: expected {counts[-1]} of a row, got {num_gates}")
    expect(numbers.is_contiguous(), "numbers: expected contiguous")
    expect(width % num_streams == 0, f"streams: expected {num_streams}, got rows of {width}")
    y = torch.empty(num_rows, width // num_streams, dtype=streams.dtype, device=streams.device)
    if y.numel():
        strides, sizes = (streams.stride(0), gates.stride(0)), _of_row(y.shape[1])
        counted = {"NUM": num_streams, "NUM_GATES": num_gates, **sizes}
        counted |= {"NUM_DIVISIONS": num_divisions, "PADDED": triton.next_power_of_2(num_streams)}
        _read[(num_rows,)](y, streams, gates, numbers, *strides, eps, offset, magnitude, **counted)
    return y


def write_streams(streams: Tensor, x: Tensor, gates: Tensor) -> Tensor:
    """Add x to each stream, times its gate, in place; as `reference.write_streams`."""
    (num_rows, width), num_gates = streams.shape, gates.shape[1]
    num = width // x.shape[1]
    expect_tensors(
        ("streams", streams, FLOATS, (None, None)),
        ("x", x, (streams.dtype,), (num_rows, width // num)),
        ("gates", gates, (torch.float32,), (num_rows, None)),
    )
    expect(num_gates in (num, num * (num + 1)), f"gates: expected {num} of a row, got {num_gates}")
    if streams.numel():
        grid, sizes = _of_streams(num_rows, width, num)
        strides = streams.stride(0), x.stride(0), gates.stride(0)
        mixing = {"MIXES": num_gates > num, "PADDED": triton.next_power_of_2(num)}
        _write[grid](streams, x, gates, *strides, **mixing, **sizes)
    return streams


def _of_row(size: int) -> dict[str, int]:
    """Constants of a program that computes a row of this size."""
    expect(size <= _MAX_SIZE, f"x: expected rows of at most {_MAX_SIZE}, got {size}")
    tile = triton.next_power_of_2(size)
    warps = min(16, max(1, tile // 512))
    return {"SIZE": size, "TILE": tile, "num_warps": warps, "enable_fp_fusion": False}


def _of_streams(num_rows: int, width: int, num: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid and the constants of programs that compute a part of all streams of a row."""
    expect(width % num == 0, f"streams: expected {num} of one size, got rows of {width}")
    size = width // num
    constants = {"NUM": num, "SIZE": size, "TILE": _TILE, "num_warps": 4, "enable_fp_fusion": False}
    return (num_rows, triton.cdiv(size, _TILE)), constants
