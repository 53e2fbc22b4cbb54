"""What LoRA adapters add to the rows of products, by the slot of each row's adapter.

Bound by latency in decodes, and by reading and writing the product in prefills. Two kernels: the
first multiplies rows by A, the second multiplies that by B and adds it to the product. A program
has some rows that follow each other, whatever their adapters are, and goes through the slots that
these have: of rows that are sorted by expert, those of a few experts. Rows need no order, and
neither the launches nor their grids depend on the adapters, which may change between replays of a
CUDA graph.

A row's sums depend on that row and its adapter alone: tiles have fixed sizes, and the inputs are
divided among programs in parts of a fixed size, which the second kernel adds in order.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.interface import FLOATS
from pagewire_kernels.slot_deltas import RANK_UNIT, DeltaTable
from pagewire_kernels.triton.checks import dense, expect, expect_tensors
from pagewire_kernels.triton.launch import LayoutLaunch, derived, layout_launch, run

_TILE_ROWS = 16
_TILE_OUTPUTS = 64
_SPLIT_INPUTS = 512
"""Inputs of a program, so that there are enough programs for one row."""


@triton.jit
def _next_slot(slot_of_row, slot, NUM_SLOTS: tl.constexpr):
    """The least slot of a row that is greater than `slot`; NUM_SLOTS: there is none."""
    return tl.min(tl.where(slot_of_row > slot, slot_of_row, NUM_SLOTS), axis=0)


# Not specialized by num_rows: code specialized for one row might sum in another order.
@triton.jit(do_not_specialize=["num_rows"])
def _multiply_a(
    partial,
    rows,
    slots,
    a,
    ranks,
    num_rows,
    row_stride,
    slot_stride,
    NUM_SLOTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
    SPLIT_INPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Program (tile of rows, tile of the ranks of all parts, split of the inputs)."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    rank = tl.program_id(1) * TILE_RANKS + tl.arange(0, TILE_RANKS)
    first_rank = tl.program_id(1) * TILE_RANKS % MAX_RANK
    split = tl.program_id(2)
    slot_of_row = tl.load(slots + row, row < num_rows, other=-1)
    row_at = rows + row.to(tl.int64)[:, None] * row_stride
    to = partial + (split.to(tl.int64) * num_rows + row[:, None]) * NUM_RANKS + rank[None, :]
    slot = _next_slot(slot_of_row, -1, NUM_SLOTS)
    while slot < NUM_SLOTS:
        is_here = slot_of_row == slot
        if first_rank < tl.load(ranks + slot):
            a_at = a + tl.cast(slot, tl.int64) * slot_stride + rank[:, None] * NUM_INPUTS
            total = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
            for start in range(0, SPLIT_INPUTS, TILE_INPUTS):
                column = split * SPLIT_INPUTS + start + tl.arange(0, TILE_INPUTS)
                is_column = column[None, :] < NUM_INPUTS
                x = tl.load(row_at + column[None, :], is_here[:, None] & is_column, other=0.0)
                weight = tl.load(a_at + column[None, :], is_column, other=0.0)
                weight = weight.to(rows.dtype.element_ty)
                total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
            tl.store(to, total, is_here[:, None])
        slot = _next_slot(slot_of_row, slot, NUM_SLOTS)


@triton.jit(do_not_specialize=["num_rows"])
def _add_b(
    output,
    partial,
    slots,
    b,
    scales,
    ranks,
    tiles,
    factors,
    bias,
    num_rows,
    output_stride,
    slot_stride,
    NUM_OUTPUTS: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_RANKS: tl.constexpr,
):
    """Program (tile of rows, tile of the outputs of a part)."""
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    first_output = tl.load(tiles + 3 * tl.program_id(1))
    end_output = tl.load(tiles + 3 * tl.program_id(1) + 1)
    part = tl.load(tiles + 3 * tl.program_id(1) + 2)
    out = first_output + tl.arange(0, TILE_OUTPUTS)
    is_out = out < end_output
    slot_of_row = tl.load(slots + row, row < num_rows, other=-1)
    at = output + row.to(tl.int64)[:, None] * output_stride + out[None, :]
    slot = _next_slot(slot_of_row, -1, NUM_SLOTS)
    while slot < NUM_SLOTS:
        is_here = slot_of_row == slot
        num_ranks = tl.load(ranks + slot)
        if num_ranks > 0:
            scale = tl.load(scales + slot * NUM_PARTS + part)
            b_at = b + tl.cast(slot, tl.int64) * slot_stride + out.to(tl.int64)[:, None] * MAX_RANK
            total = tl.zeros([TILE_ROWS, TILE_OUTPUTS], tl.float32)
            for start in range(0, num_ranks, TILE_RANKS):
                rank = start + tl.arange(0, TILE_RANKS)
                inner = tl.zeros([TILE_ROWS, TILE_RANKS], tl.float32)
                for split in range(NUM_SPLITS):
                    place = tl.cast(split, tl.int64) * num_rows + row[:, None]
                    place = (place * NUM_PARTS + part) * MAX_RANK + rank[None, :]
                    inner += tl.load(partial + place, is_here[:, None], other=0.0)
                weight = tl.load(b_at + rank[None, :], is_out[:, None], other=0.0).to(tl.float32)
                total = tl.dot(inner * scale, tl.trans(weight), total, input_precision="ieee")
            is_changed = is_here[:, None] & is_out[None, :]
            total += tl.load(at, is_changed, other=0.0).to(tl.float32)
            if HAS_FACTORS:
                factor = tl.load(factors + slot * NUM_OUTPUTS + out, is_out, other=1.0)[None, :]
                fixed = tl.zeros([1, TILE_OUTPUTS], tl.float32)
                if HAS_BIAS:
                    fixed = tl.load(bias + out, is_out, other=0.0).to(tl.float32)[None, :]
                scaled = (total - fixed) * factor + fixed
                total = tl.where(factor == 1.0, total, scaled)
            tl.store(at, total.to(output.dtype.element_ty), is_changed)
        slot = _next_slot(slot_of_row, slot, NUM_SLOTS)


def add_deltas(
    y: Tensor, x: Tensor, slots: Tensor, table: DeltaTable, bias: Tensor | None = None
) -> None:
    """As `reference.add_deltas`. A row's bits do not depend on the other rows.

    Raises TypeError or ValueError for tensors that the kernels would misread.
    """
    x = dense(x)
    _, num_parts, max_rank, num_inputs = table.a.shape
    num_splits = triton.cdiv(num_inputs, _SPLIT_INPUTS)
    partial = torch.empty(
        num_splits, len(x), num_parts * max_rank, dtype=torch.float32, device=x.device
    )
    launch = derived(_launch_a, x, slots, table.a, table.ranks)
    if launch is not None:
        run(launch, (partial, x, slots, table.a, table.ranks))
        _add_products(y, partial, slots, table, bias)


def add_embedding_deltas(
    y: Tensor, token_ids: Tensor, slots: Tensor, table: DeltaTable, bias: Tensor | None = None
) -> None:
    """As `reference.add_embedding_deltas`. A row's bits do not depend on the other rows."""
    of_rows = table.a[slots.clamp(min=0), token_ids]
    _add_products(y, of_rows.float().unsqueeze(0), slots, table, bias)


def _launch_a(x: Tensor, slots: Tensor, a: Tensor, ranks: Tensor) -> LayoutLaunch | None:
    num_slots, num_parts, max_rank, num_inputs = a.shape
    expect_tensors(
        ("x", x, FLOATS, (None, num_inputs)),
        ("slots", slots, (torch.int32,), (len(x),)),
        ("a", a, FLOATS, a.shape),
        ("ranks", ranks, (torch.int32,), (num_slots,)),
    )
    expect(max_rank % RANK_UNIT == 0, f"a: expected multiples of {RANK_UNIT}, got {max_rank}")
    expect(a[0].is_contiguous(), f"a: expected contiguous slots, got strides {a.stride()}")
    if x.numel() == 0:
        return None
    num_ranks, is_float32 = num_parts * max_rank, x.dtype == torch.float32
    grid = (
        triton.cdiv(len(x), _TILE_ROWS),
        num_ranks // RANK_UNIT,
        triton.cdiv(num_inputs, _SPLIT_INPUTS),
    )
    return layout_launch(
        _multiply_a,
        grid,
        (len(x), x.stride(0), a.stride(0)),
        NUM_SLOTS=num_slots,
        NUM_INPUTS=num_inputs,
        NUM_RANKS=num_ranks,
        MAX_RANK=max_rank,
        TILE_ROWS=_TILE_ROWS,
        TILE_RANKS=RANK_UNIT,
        SPLIT_INPUTS=_SPLIT_INPUTS,
        TILE_INPUTS=64 if is_float32 else 128,
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )


def _add_products(
    y: Tensor, partial: Tensor, slots: Tensor, table: DeltaTable, bias: Tensor | None
) -> None:
    """Add the products of B with the sum of `partial`, float32 [num_splits, num_rows, num_ranks]:
    the parts of the products with A."""
    tiles = _tiles(table.outputs, y.device)
    tensors = (y, partial, slots, table.b, table.scales, table.ranks, tiles)
    launch = derived(_launch_b, *tensors, table.factors, bias)
    if launch is not None:
        # In place of those that are absent, any tensor: it is not read.
        factors = table.scales if table.factors is None else table.factors
        run(launch, (*tensors, factors, table.scales if bias is None else bias))


def _launch_b(
    y: Tensor,
    partial: Tensor,
    slots: Tensor,
    b: Tensor,
    scales: Tensor,
    ranks: Tensor,
    tiles: Tensor,
    factors: Tensor | None,
    bias: Tensor | None,
) -> LayoutLaunch | None:
    (num_splits, num_rows, _), (num_slots, num_outputs, max_rank) = partial.shape, b.shape
    num_parts = scales.shape[1]
    expect_tensors(
        ("y", y, FLOATS, (num_rows, None)),
        ("slots", slots, (torch.int32,), (num_rows,)),
        ("b", b, FLOATS, b.shape),
        ("scales", scales, (torch.float32,), (num_slots, num_parts)),
        ("ranks", ranks, (torch.int32,), (num_slots,)),
        ("factors", factors, (torch.float32,), (num_slots, num_outputs)),
        ("bias", bias, FLOATS, (None,)),
    )
    expect(
        y.shape[1] >= num_outputs,
        f"y: expected at least {num_outputs} columns, got {y.shape[1]}",
    )
    if bias is not None:
        expect(len(bias) >= num_outputs, f"bias: expected {num_outputs} or more, got {len(bias)}")
    expect(b[0].is_contiguous(), f"b: expected contiguous slots, got strides {b.stride()}")
    if num_rows == 0 or len(tiles) == 0:
        return None
    return layout_launch(
        _add_b,
        (triton.cdiv(num_rows, _TILE_ROWS), len(tiles)),
        (num_rows, y.stride(0), b.stride(0)),
        NUM_OUTPUTS=num_outputs,
        HAS_FACTORS=factors is not None,
        HAS_BIAS=bias is not None,
        NUM_SLOTS=num_slots,
        NUM_PARTS=num_parts,
        NUM_SPLITS=num_splits,
        MAX_RANK=max_rank,
        TILE_ROWS=_TILE_ROWS,
        TILE_OUTPUTS=_TILE_OUTPUTS,
        TILE_RANKS=RANK_UNIT,
        num_warps=4,
        enable_fp_fusion=False,
    )


@cache
def _tiles(outputs: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """int32 [n, 3]: first output, end of the outputs, and part, by tile of outputs."""
    tiles = [
        (first, end, part)
        for part, (start, end) in enumerate(outputs)
        for first in range(start, end, _TILE_OUTPUTS)
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device)
