"""Mixture of experts: products of rows sorted by expert, and the sums of their results.

Pairs of row and expert are sorted by expert, then by row: a pair's place in this order is its slot.
A tile of rows has slots of one expert. Its number of tiles is known on the device only, so that as
many programs are launched as there can be, of which some end at once: nothing synchronizes with
the device. Decodes are bound by reading the weights of the chosen experts, prefills by arithmetic.
The results of a row are added up in the order of experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.interface import FLOATS
from pagewire_kernels.reference import Gate, Routing, route
from pagewire_kernels.slot_deltas import AddOfExperts
from pagewire_kernels.triton.checks import dense, expect_tensors
from pagewire_kernels.triton.layers import apply_gate

_FEW_ROWS = 16
"""Rows of a tile if experts have few, and of every tile if rows must have the same bits in any
batch."""

_MANY_ROWS = 64


# Not specialized by num_slots: code specialized for one slot might sum in another order.
@triton.jit(do_not_specialize=["num_slots"])
def _multiply(
    output,
    rows,
    row_of,
    weight,
    bias,
    expert_of_tile,
    first_tiles,
    starts,
    num_slots,
    row_stride,
    NUM_EXPERTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    NUM_INPUTS: tl.constexpr,
    GATHERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Program (tile of outputs, tile of slots).

    output: [num_slots, NUM_OUTPUTS]; rows: those of slots, or with GATHERS those that `row_of` has
    for each slot; weight: [NUM_EXPERTS, NUM_OUTPUTS, NUM_INPUTS]; first_tiles: the first tile of
    each expert; starts: its first slot, [NUM_EXPERTS + 1].
    """
    tile = tl.program_id(1)
    expert = tl.load(expert_of_tile + tile)
    if expert >= NUM_EXPERTS:
        return
    within = (tile - tl.load(first_tiles + expert)) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    slot = tl.load(starts + expert) + within
    is_slot = slot < tl.load(starts + expert + 1)
    row = slot
    if GATHERS:
        row = tl.load(row_of + slot, mask=is_slot, other=0)
    row = tl.where(is_slot, row, 0)
    out = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    is_out = out < NUM_OUTPUTS
    row_at = rows + row.to(tl.int64)[:, None] * row_stride
    of_expert = expert.to(tl.int64) * NUM_OUTPUTS
    weight_at = weight + (of_expert + tl.where(is_out, out, 0))[:, None] * NUM_INPUTS
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
        total += tl.load(bias + of_expert + out, mask=is_out, other=0.0).to(tl.float32)[None, :]
    at = output + slot.to(tl.int64)[:, None] * NUM_OUTPUTS + out[None, :]
    tl.store(at, total.to(output.dtype.element_ty), mask=is_slot[:, None] & is_out[None, :])


@triton.jit
def _combine(
    output,
    results,
    slots,
    weights,
    shared,
    shared_gate,
    shared_stride,
    rows,
    row_stride,
    starts,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    SIZE: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ADDS_ZERO: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, tile of columns).

    slots, weights: [num_rows, NUM_CHOSEN]; rows: the outputs of zero experts, which have the slots
    after those of the NUM_EXPERTS others; starts: as for `_multiply`.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < SIZE
    total = tl.zeros([TILE], tl.float32)
    of_zero = 0.0
    for i in range(NUM_CHOSEN):
        slot = tl.load(slots + row * NUM_CHOSEN + i)
        weight = tl.load(weights + row * NUM_CHOSEN + i)
        is_product = mask
        if HAS_ZERO:
            end = tl.load(starts + NUM_EXPERTS)
            is_product = column < tl.where(slot < end, SIZE, 0)
            of_zero += tl.where(slot < end, 0.0, weight)
        result = tl.load(results + slot * SIZE + column, mask=is_product, other=0.0)
        total += weight * result
    if ADDS_ZERO:
        x = tl.load(rows + row * row_stride + column, mask=mask, other=0.0).to(tl.float32)
        total += of_zero * x
    if HAS_SHARED:
        x = tl.load(shared + row * shared_stride + column, mask=mask, other=0.0).to(tl.float32)
        if HAS_GATE:
            x *= tl.sigmoid(tl.load(shared_gate + row))
        total += x
    tl.store(output + row * SIZE + column, total.to(output.dtype.element_ty), mask=mask)


class _Slots(NamedTuple):
    """Pairs of row and expert, sorted, and their tiles; see `_multiply`."""

    row_of: Tensor
    expert_of: Tensor
    slots: Tensor
    """int64 [num_rows, num_chosen]: of each row, in the order of experts."""

    starts: Tensor
    expert_of_tile: Tensor
    first_tiles: Tensor
    tile_rows: int
    has_zero: bool
    """Whether the last slots are those of zero experts, whose results nothing reads. They are in no
    tile, and `expert_of` has another expert for them."""


def _sort(chosen: Tensor, routing: Routing, tile_rows: int) -> _Slots:
    """chosen: int64 [num_rows, num_chosen]"""
    flat, num_experts = chosen.flatten(), routing.num_with_weights
    has_zero = routing.num_zero_experts > 0
    if has_zero:
        flat = flat.clamp(max=num_experts)
    expert_of, order = flat.sort(stable=True)
    places = torch.arange(len(flat), device=flat.device)
    slots = torch.empty_like(order).scatter_(0, order, places).view_as(chosen)
    counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
    starts = counts.cumsum(0) - counts
    num_tiles = (counts[:-1] + tile_rows - 1) // tile_rows
    ends = num_tiles.cumsum(0)
    max_tiles = min(len(flat), len(flat) // tile_rows + num_experts)
    tiles = torch.arange(max_tiles, device=flat.device)
    return _Slots(
        row_of=order // chosen.shape[1],
        expert_of=expert_of.clamp(max=num_experts - 1) if has_zero else expert_of,
        slots=slots,
        starts=starts,
        expert_of_tile=torch.searchsorted(ends, tiles, right=True),
        first_tiles=ends - num_tiles,
        tile_rows=tile_rows,
        has_zero=has_zero,
    )


class TritonExperts:
    """The experts of a layer on a GPU, in dense weights."""

    def __init__(self, gate_up: Tensor, down: Tensor, gate: Gate, *, batch_invariant: bool) -> None:
        """gate_up: of each expert gate, then up, [num_experts, 2 * inner_size, hidden_size], or if
        the gate does not multiply, up alone; down: [num_experts, hidden_size, inner_size], both
        contiguous; batch_invariant: whether the bits of a row must not depend on the other rows."""
        num_experts, num_first, hidden = gate_up.shape
        expect_tensors(
            ("gate_up", gate_up, FLOATS, (num_experts, num_first, hidden)),
            (
                "down",
                down,
                (gate_up.dtype,),
                (num_experts, hidden, num_first // (1 + gate.multiplies)),
            ),
        )
        self._gate_up, self._down = gate_up.contiguous(), down.contiguous()
        self._gate, self._is_invariant = gate, batch_invariant

    def apply(
        self,
        x: Tensor,
        logits: Tensor,
        routing: Routing,
        *,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        shared: Tensor | None = None,
        shared_gate: Tensor | None = None,
        add_to_gate_up: AddOfExperts | None = None,
        add_to_down: AddOfExperts | None = None,
    ) -> Tensor:
        """As `cpu.experts.NativeExperts.apply`. add_to_gate_up, add_to_down: add what adapters do.
        Raises TypeError or ValueError for unsupported tensors."""
        x, (num_experts, num_first, hidden) = dense(x), self._gate_up.shape
        expect_tensors(
            ("x", x, (self._gate_up.dtype,), (None, hidden)),
            ("logits", logits, (torch.float32,), (len(x), num_experts + routing.num_zero_experts)),
            ("gate_up_bias", gate_up_bias, FLOATS, (num_experts, num_first)),
            ("down_bias", down_bias, FLOATS, (num_experts, hidden)),
            ("shared", shared, FLOATS, (len(x), hidden)),
            ("shared_gate", shared_gate, (torch.float32,), (len(x), 1)),
        )
        if len(x) == 0:
            return x.new_empty(x.shape)
        chosen, weights = route(logits, routing, bias, factors)
        is_few = self._is_invariant or chosen.numel() <= _FEW_ROWS * num_experts
        slots = _sort(chosen, routing, _FEW_ROWS if is_few else _MANY_ROWS)
        rows = x
        if routing.scales_inputs:
            of_slots = (
                torch.empty_like(weights)
                .view(-1)
                .scatter_(0, slots.slots.flatten(), weights.flatten())
            )
            rows = (x[slots.row_of].float() * of_slots[:, None]).to(x.dtype)
            weights = torch.ones_like(weights)
        gate_up = self._multiply(
            rows, self._gate_up, gate_up_bias, slots, x.dtype, gathers=rows is x
        )
        if add_to_gate_up is not None:
            pairs = x[slots.row_of] if rows is x else rows
            add_to_gate_up(gate_up, pairs, slots.expert_of, slots.row_of)
        inner = apply_gate(gate_up, self._gate)
        results = self._multiply(inner, self._down, down_bias, slots, torch.float32, gathers=False)
        if add_to_down is not None:
            add_to_down(results, inner, slots.expert_of, slots.row_of)
        output = x.new_empty(x.shape)
        tile = min(triton.next_power_of_2(hidden), 1024)
        _combine[(len(x), triton.cdiv(hidden, tile))](
            output,
            results,
            slots.slots,
            weights.contiguous(),
            output if shared is None else shared,
            weights if shared_gate is None else shared_gate.contiguous(),
            0 if shared is None else shared.stride(0),
            x,
            x.stride(0),
            slots.starts,
            NUM_EXPERTS=num_experts,
            NUM_CHOSEN=routing.num_chosen,
            SIZE=hidden,
            HAS_ZERO=slots.has_zero,
            ADDS_ZERO=slots.has_zero and routing.adds_zero_experts,
            HAS_SHARED=shared is not None,
            HAS_GATE=shared_gate is not None,
            TILE=tile,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return output

    def _multiply(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        slots: _Slots,
        dtype: torch.dtype,
        *,
        gathers: bool,
    ) -> Tensor:
        num_experts, num_outputs, num_inputs = weight.shape
        num_slots, is_float32 = slots.slots.numel(), rows.dtype == torch.float32
        new = rows.new_zeros if slots.has_zero else rows.new_empty
        output = new((num_slots, num_outputs), dtype=dtype)
        _multiply[(triton.cdiv(num_outputs, 64), len(slots.expert_of_tile))](
            output,
            rows,
            slots.row_of,
            weight,
            output if bias is None else bias.contiguous(),
            slots.expert_of_tile,
            slots.first_tiles,
            slots.starts,
            num_slots,
            rows.stride(0),
            NUM_EXPERTS=num_experts,
            NUM_OUTPUTS=num_outputs,
            NUM_INPUTS=num_inputs,
            GATHERS=gathers,
            HAS_BIAS=bias is not None,
            TILE_ROWS=slots.tile_rows,
            TILE_OUTPUTS=64,
            TILE_INPUTS=32 if is_float32 else 64,
            num_warps=4,
            num_stages=2 if is_float32 else 4,
            enable_fp_fusion=False,
        )
        return output
