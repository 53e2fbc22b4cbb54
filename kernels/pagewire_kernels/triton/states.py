"""Layers with a state, token by token: causal convolutions, Mamba, the delta rule, RG-LRU, gated
norms.

Bound by the latency of one token after the other in prefills, and by reading and writing states in
decodes. A program computes a few channels of one sequence, or of one head of it, whose state it
holds in registers. Results are bitwise independent of the batch and of chunks, since each token is
computed from the state before it in an order that depends on shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, StateUnits
from pagewire_kernels.interface import FLOATS
from pagewire_kernels.reference.states import check_convolution
from pagewire_kernels.triton.checks import expect, expect_tensors
from pagewire_kernels.triton.layers import softplus

_CHANNELS = 64
"""Channels of a program of a convolution, and of Mamba."""

_STATE_ELEMENTS = 4096
"""Elements of a state that a program of Mamba-2, or of the delta rule, holds, at most."""


@triton.jit
def _unit(places, tables, table_width, page_stride, seq, unit):
    """The first element of a unit in the pages; negative if it has no page."""
    column = tl.load(places + 2 * unit)
    page = tl.load(tables + seq.to(tl.int64) * table_width + column).to(tl.int64)
    return tl.where(page < 0, -1, page * page_stride + tl.load(places + 2 * unit + 1))


@triton.jit
def _kept_channels(place, num_rows, length, COUNT: tl.constexpr):
    """How many of a unit's channels are read, and how many are written."""
    num_written = tl.where(place < 0, 0, COUNT)
    return tl.where(length > num_rows, num_written, 0), num_written


@triton.jit
def _load_state(kept_in, seq, unit, num_rows, length, element, within, SIZE, CHANNELS):
    """A tile of a unit's state of [SIZE, CHANNELS] before the first row of a sequence, where its
    elements are in the pages and in the unit, and which of them are written after the last row."""
    pages, places, tables, _, _, table_width, page_stride = kept_in
    place = _unit(places, tables, table_width, page_stride, seq, unit)
    num_read, num_written = _kept_channels(place, num_rows, length, CHANNELS)
    offsets, has_element = element[:, None] * CHANNELS + within[None, :], (element < SIZE)[:, None]
    kept = pages + place + offsets
    state = tl.load(kept, has_element & (within < num_read)[None, :], other=0.0)
    return state, kept, offsets, has_element & (within < num_written)[None, :]


@triton.jit
def _save(kept_in, unit, row, offsets, state, mask):
    """Copy a part of a unit's state after a row to where it is saved, if it is."""
    pages, places, _, saves, saved_tables, table_width, page_stride = kept_in
    saved = tl.load(saves + row)
    if saved >= 0:
        place = _unit(places, saved_tables, table_width, page_stride, saved, unit)
        if place >= 0:
            tl.store(pages + place + offsets, state, mask)


@triton.jit
def _input(window, source, CHANNELS, WIDTH: tl.constexpr):
    """The inputs of a convolution in a row of a sequence; of negative rows, those in its state."""
    inputs, x_stride, state, num_read, within = window
    is_new = within < tl.where(source < 0, 0, CHANNELS)
    is_old = within < tl.where(source < 0, num_read, 0)
    new = tl.load(inputs + source.to(tl.int64) * x_stride, is_new, other=0.0)
    old = tl.load(state + (source + WIDTH - 1) * CHANNELS, is_old, other=0.0)
    return tl.where(is_new, new, old)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _unit_length(x):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit(do_not_specialize=["table_width"])
def _convolve(
    y,
    x,
    weight,
    bias,
    pages,
    places,
    tables,
    starts,
    lengths,
    saves,
    saved_tables,
    x_stride,
    page_stride,
    table_width,
    CHANNELS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (sequence, unit, tile of its channels)."""
    seq, unit = tl.program_id(0), tl.program_id(1)
    within = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask, channel = within < PER_UNIT, unit * PER_UNIT + within
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    num_rows = end - first
    if num_rows > 0:
        place = _unit(places, tables, table_width, page_stride, seq, unit)
        state = pages + place + within
        length = tl.load(lengths + seq)
        num_read, num_written = _kept_channels(place, num_rows, length, PER_UNIT)
        inputs = x + first.to(tl.int64) * x_stride + channel
        window = inputs, x_stride, state, num_read, within
        outputs = y + first.to(tl.int64) * CHANNELS + channel
        row = num_rows - num_rows  # a scalar of the device, also in Triton's interpreter
        for _ in range(first, end):
            total = tl.zeros([TILE], tl.float32)
            if HAS_BIAS:
                total = tl.load(bias + channel, mask, other=0.0)
            for i in tl.static_range(WIDTH):
                source = _input(window, row + i - (WIDTH - 1), PER_UNIT, WIDTH)
                taps = tl.load(weight + i * CHANNELS + channel, mask, other=0.0)
                total += source.to(tl.float32) * taps
            if HAS_SILU:
                total = _silu(total)
            tl.store(outputs + row.to(tl.int64) * CHANNELS, total.to(y.dtype.element_ty), mask)
            row += 1
            if HAS_SAVES:
                saved = tl.load(saves + first + row - 1)
                if saved >= 0:
                    target = _unit(places, saved_tables, table_width, page_stride, saved, unit)
                    num_saved = tl.where(target < 0, 0, PER_UNIT)
                    for i in tl.static_range(WIDTH - 1):
                        source = _input(window, row + i - (WIDTH - 1), PER_UNIT, WIDTH)
                        place_saved = pages + target + i * PER_UNIT + within
                        tl.store(place_saved, source, within < num_saved)
        # In this order, an input is read before its place is overwritten.
        for i in tl.static_range(WIDTH - 1):
            source = _input(window, num_rows + i - (WIDTH - 1), PER_UNIT, WIDTH)
            tl.store(state + i * PER_UNIT, source, within < num_written)


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    units: StateUnits,
    metadata: AttentionMetadata,
    activation: str | None = None,
) -> Tensor:
    """Convolve each channel over the last tokens of its sequence; as
    `reference.causal_convolution`."""
    width, num_channels = weight.shape
    check_convolution(width, activation)
    expect_tensors(
        ("x", x, FLOATS, (None, num_channels)),
        ("weight", weight, (torch.float32,), (width, num_channels)),
        ("bias", bias, (torch.float32,), (num_channels,)),
    )
    expect(weight.is_contiguous(), "weight: expected a contiguous tensor")
    per_unit = _per_unit(units, x.dtype, num_channels)
    y = x.new_empty(x.shape)
    grid = len(metadata.context_lens), len(units.places), triton.cdiv(per_unit, _CHANNELS)
    _convolve[grid](
        y,
        x,
        weight,
        x if bias is None else bias,
        *_addressed(units, metadata),
        x.stride(0),
        units.pages.stride(0),
        metadata.block_tables.stride(0),
        CHANNELS=num_channels,
        PER_UNIT=per_unit,
        WIDTH=width,
        HAS_BIAS=bias is not None,
        HAS_SILU=activation is not None,
        HAS_SAVES=metadata.saves is not None,
        TILE=_CHANNELS,
        num_warps=2,
        enable_fp_fusion=False,
    )
    return y


@triton.jit(do_not_specialize=["table_width"])
def _scan_channels(
    y,
    x,
    dt,
    b,
    c,
    gate,
    a,
    d,
    dt_bias,
    pages,
    places,
    tables,
    starts,
    lengths,
    saves,
    saved_tables,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    gate_stride,
    page_stride,
    table_width,
    CHANNELS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (sequence, unit, tile of its channels)."""
    seq, unit = tl.program_id(0), tl.program_id(1)
    within = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask, channel = within < PER_UNIT, unit * PER_UNIT + within
    element = tl.arange(0, PADDED)
    has_element = element < SIZE
    both = has_element[:, None] & mask[None, :]
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if end > first:
        kept_in = pages, places, tables, saves, saved_tables, table_width, page_stride
        num_rows, length = end - first, tl.load(lengths + seq)
        state, kept, offsets, is_written = _load_state(
            kept_in, seq, unit, num_rows, length, element, within, SIZE, PER_UNIT
        )
        rates = tl.load(a + element[:, None] * CHANNELS + channel[None, :], both, other=0.0)
        skip = tl.load(d + channel, mask, other=0.0)
        offset = tl.load(dt_bias + channel, mask, other=0.0)
        at = first.to(tl.int64)
        for _ in range(first, end):
            inputs = tl.load(x + at * x_stride + channel, mask, other=0.0).to(tl.float32)
            step = tl.load(dt + at * dt_stride + channel, mask, other=0.0).to(tl.float32)
            delta = softplus(step + offset)
            keys = tl.load(b + at * b_stride + element, has_element, other=0.0).to(tl.float32)
            queries = tl.load(c + at * c_stride + element, has_element, other=0.0).to(tl.float32)
            decay = tl.exp(delta[None, :] * rates)
            state = state * decay + (delta * inputs)[None, :] * keys[:, None]
            total = tl.sum(state * queries[:, None], axis=0) + skip * inputs
            if HAS_GATE:
                gates = tl.load(gate + at * gate_stride + channel, mask, other=0.0)
                total *= _silu(gates.to(tl.float32))
            tl.store(y + at * CHANNELS + channel, total.to(y.dtype.element_ty), mask)
            if HAS_SAVES:
                _save(kept_in, unit, at, offsets, state, both)
            at += 1
        tl.store(kept, state, is_written)


def mamba1_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor | None,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    units: StateUnits,
    metadata: AttentionMetadata,
) -> Tensor:
    """Selective state space with a decay for each channel and element; as
    `reference.mamba1_scan`."""
    state_size, num_channels = a.shape
    rows, states = (len(x), num_channels), (len(x), state_size)
    expect_tensors(
        ("x", x, FLOATS, rows),
        ("dt", dt, (x.dtype,), rows),
        ("b", b, (x.dtype,), states),
        ("c", c, (x.dtype,), states),
        ("gate", gate, (x.dtype,), rows),
        ("a", a, (torch.float32,), (state_size, num_channels)),
        ("d", d, (torch.float32,), (num_channels,)),
        ("dt_bias", dt_bias, (torch.float32,), (num_channels,)),
    )
    expect(a.is_contiguous(), "a: expected a contiguous tensor")
    per_unit = _per_unit(units, torch.float32, num_channels)
    y, gates = x.new_empty(x.shape), x if gate is None else gate
    grid = len(metadata.context_lens), len(units.places), triton.cdiv(per_unit, _CHANNELS)
    _scan_channels[grid](
        y,
        x,
        dt,
        b,
        c,
        gates,
        a,
        d,
        dt_bias,
        *_addressed(units, metadata),
        *(tensor.stride(0) for tensor in (x, dt, b, c, gates)),
        units.pages.stride(0),
        metadata.block_tables.stride(0),
        CHANNELS=num_channels,
        PER_UNIT=per_unit,
        SIZE=state_size,
        PADDED=triton.next_power_of_2(state_size),
        HAS_GATE=gate is not None,
        HAS_SAVES=metadata.saves is not None,
        TILE=_CHANNELS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


@triton.jit(do_not_specialize=["table_width", "min_dt", "max_dt"])
def _scan_heads(
    y,
    x,
    dt,
    b,
    c,
    gate,
    a,
    d,
    dt_bias,
    pages,
    places,
    tables,
    starts,
    lengths,
    saves,
    saved_tables,
    min_dt,
    max_dt,
    x_stride,
    x_head_stride,
    dt_stride,
    b_stride,
    b_group_stride,
    c_stride,
    c_group_stride,
    gate_stride,
    gate_head_stride,
    page_stride,
    table_width,
    HEADS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (sequence, head, tile of its elements)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    within = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask, element = within < HEAD_DIM, tl.arange(0, PADDED)
    has_element, group = element < SIZE, head // PER_GROUP
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if end > first:
        kept_in = pages, places, tables, saves, saved_tables, table_width, page_stride
        num_rows, length = end - first, tl.load(lengths + seq)
        state, kept, offsets, is_written = _load_state(
            kept_in, seq, head, num_rows, length, element, within, SIZE, HEAD_DIM
        )
        rate, skip = tl.load(a + head), tl.load(d + head)
        offset = tl.load(dt_bias + head)
        at = first.to(tl.int64)
        for _ in range(first, end):
            source = x + at * x_stride + head * x_head_stride + within
            inputs = tl.load(source, mask, other=0.0).to(tl.float32)
            step = tl.load(dt + at * dt_stride + head).to(tl.float32)
            delta = softplus(step + offset)
            delta = tl.where(delta < min_dt, min_dt, tl.where(delta > max_dt, max_dt, delta))
            place_b = b + at * b_stride + group * b_group_stride + element
            keys = tl.load(place_b, has_element, other=0.0).to(tl.float32)
            place_c = c + at * c_stride + group * c_group_stride + element
            queries = tl.load(place_c, has_element, other=0.0).to(tl.float32)
            state = state * tl.exp(delta * rate) + (delta * inputs)[None, :] * keys[:, None]
            total = tl.sum(state * queries[:, None], axis=0) + skip * inputs
            if HAS_GATE:
                gates = gate + at * gate_stride + head * gate_head_stride + within
                total *= _silu(tl.load(gates, mask, other=0.0).to(tl.float32))
            target = y + (at * HEADS + head) * HEAD_DIM + within
            tl.store(target, total.to(y.dtype.element_ty), mask)
            if HAS_SAVES:
                is_state = has_element[:, None] & mask[None, :]
                _save(kept_in, head, at, offsets, state, is_state)
            at += 1
        tl.store(kept, state, is_written)


def mamba2_scan(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    gate: Tensor | None,
    a: Tensor,
    d: Tensor,
    dt_bias: Tensor,
    units: StateUnits,
    metadata: AttentionMetadata,
    *,
    dt_limits: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Selective state space with a decay for each head; as `reference.mamba2_scan`."""
    (num_rows, num_heads, head_dim), (num_groups, state_size) = x.shape, b.shape[1:]
    vectors = num_rows, num_groups, state_size
    expect_tensors(
        ("x", x, FLOATS, (None, None, None)),
        ("dt", dt, (x.dtype,), (num_rows, num_heads)),
        ("b", b, (x.dtype,), vectors),
        ("c", c, (x.dtype,), vectors),
        ("gate", gate, (x.dtype,), x.shape),
        *(
            (name, tensor, (torch.float32,), (num_heads,))
            for name, tensor in (("a", a), ("d", d), ("dt_bias", dt_bias))
        ),
    )
    expect(
        num_heads % num_groups == 0 and len(units.places) == num_heads,
        f"units: expected one of each of {num_heads} heads in {num_groups} groups",
    )
    _per_unit(units, torch.float32, num_heads)
    y, gates = x.new_empty(x.shape), x if gate is None else gate
    padded = triton.next_power_of_2(state_size)
    tile = min(triton.next_power_of_2(head_dim), max(1, _STATE_ELEMENTS // padded))
    grid = len(metadata.context_lens), num_heads, triton.cdiv(head_dim, tile)
    _scan_heads[grid](
        y,
        x,
        dt,
        b,
        c,
        gates,
        a,
        d,
        dt_bias,
        *_addressed(units, metadata),
        *map(float, dt_limits),
        x.stride(0),
        x.stride(1),
        dt.stride(0),
        *b.stride()[:2],
        *c.stride()[:2],
        *gates.stride()[:2],
        units.pages.stride(0),
        metadata.block_tables.stride(0),
        HEADS=num_heads,
        PER_GROUP=num_heads // num_groups,
        HEAD_DIM=head_dim,
        SIZE=state_size,
        PADDED=padded,
        HAS_GATE=gate is not None,
        HAS_SAVES=metadata.saves is not None,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


@triton.jit
def _decay(step, rate, bound, IS_BOUNDED: tl.constexpr):
    """What a state is multiplied by, of a step of time."""
    if IS_BOUNDED:
        return tl.exp(bound * _sigmoid(rate * step))
    return tl.exp(-rate * softplus(step))


@triton.jit(do_not_specialize=["table_width"])
def _correct_heads(
    y,
    query,
    key,
    value,
    decay,
    beta,
    a_log,
    dt_bias,
    pages,
    places,
    tables,
    starts,
    lengths,
    saves,
    saved_tables,
    scale,
    beta_scale,
    decay_bound,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    decay_stride,
    decay_head_stride,
    beta_stride,
    page_stride,
    table_width,
    HEADS: tl.constexpr,
    PER_KEY_HEAD: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BY_ELEMENT: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (sequence, head, tile of its values)."""
    seq, head = tl.program_id(0), tl.program_id(1)
    within = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask, element = within < VALUE_DIM, tl.arange(0, PADDED)
    has_element, key_head = element < SIZE, head // PER_KEY_HEAD
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if end > first:
        kept_in = pages, places, tables, saves, saved_tables, table_width, page_stride
        num_rows, length = end - first, tl.load(lengths + seq)
        state, kept, offsets, is_written = _load_state(
            kept_in, seq, head, num_rows, length, element, within, SIZE, VALUE_DIM
        )
        rate = tl.exp(tl.load(a_log + head))
        at = first.to(tl.int64)
        for _ in range(first, end):
            source = key + at * key_stride + key_head * key_head_stride + element
            keys = _unit_length(tl.load(source, has_element, other=0.0).to(tl.float32))
            source = query + at * query_stride + key_head * query_head_stride + element
            queries = _unit_length(tl.load(source, has_element, other=0.0).to(tl.float32)) * scale
            times = decay + at * decay_stride + head * decay_head_stride
            if BY_ELEMENT:
                step = tl.load(times + element, has_element, other=0.0).to(tl.float32)
                step += tl.load(dt_bias + head * SIZE + element, has_element, other=0.0)
                state *= _decay(step, rate, decay_bound, IS_BOUNDED)[:, None]
            else:
                step = tl.load(times).to(tl.float32) + tl.load(dt_bias + head)
                state *= _decay(step, rate, decay_bound, IS_BOUNDED)
            gate = _sigmoid(tl.load(beta + at * beta_stride + head).to(tl.float32)) * beta_scale
            source = value + at * value_stride + head * value_head_stride + within
            values = tl.load(source, mask, other=0.0).to(tl.float32)
            change = (values - tl.sum(state * keys[:, None], axis=0)) * gate
            state += keys[:, None] * change[None, :]
            total = tl.sum(state * queries[:, None], axis=0)
            target = y + (at * HEADS + head) * VALUE_DIM + within
            tl.store(target, total.to(y.dtype.element_ty), mask)
            if HAS_SAVES:
                is_state = has_element[:, None] & mask[None, :]
                _save(kept_in, head, at, offsets, state, is_state)
            at += 1
        tl.store(kept, state, is_written)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    units: StateUnits,
    metadata: AttentionMetadata,
    *,
    beta_scale: float = 1.0,
    decay_bound: float = 0.0,
) -> Tensor:
    """Delta rule with a decay of each head, or of each element of its keys; as
    `reference.gated_delta_rule`."""
    (num_rows, num_heads, value_dim), (num_key_heads, key_dim) = value.shape, key.shape[1:]
    keys, width = (num_rows, num_key_heads, key_dim), decay.shape[-1]
    expect_tensors(
        ("value", value, FLOATS, (None, None, None)),
        ("query", query, (value.dtype,), keys),
        ("key", key, (value.dtype,), keys),
        ("decay", decay, (value.dtype,), (num_rows, num_heads, width)),
        ("beta", beta, (value.dtype,), (num_rows, num_heads)),
        ("a_log", a_log, (torch.float32,), (num_heads,)),
        ("dt_bias", dt_bias, (torch.float32,), (num_heads, width)),
    )
    expect(width in (1, key_dim), f"decay: expected 1 or {key_dim} of a head, got {width}")
    expect(dt_bias.is_contiguous(), "dt_bias: expected a contiguous tensor")
    expect(
        num_heads % num_key_heads == 0 and len(units.places) == num_heads,
        f"units: expected one of each of {num_heads} heads for {num_key_heads} of keys",
    )
    _per_unit(units, torch.float32, num_heads)
    y, padded = value.new_empty(value.shape), triton.next_power_of_2(key_dim)
    tile = min(triton.next_power_of_2(value_dim), max(1, _STATE_ELEMENTS // padded))
    grid = len(metadata.context_lens), num_heads, triton.cdiv(value_dim, tile)
    _correct_heads[grid](
        y,
        query,
        key,
        value,
        decay,
        beta,
        a_log,
        dt_bias,
        *_addressed(units, metadata),
        key_dim**-0.5,
        float(beta_scale),
        float(decay_bound),
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *decay.stride()[:2],
        beta.stride(0),
        units.pages.stride(0),
        metadata.block_tables.stride(0),
        HEADS=num_heads,
        PER_KEY_HEAD=num_heads // num_key_heads,
        SIZE=key_dim,
        PADDED=padded,
        VALUE_DIM=value_dim,
        BY_ELEMENT=width > 1,
        IS_BOUNDED=decay_bound < 0,
        HAS_SAVES=metadata.saves is not None,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


@triton.jit(do_not_specialize=["table_width"])
def _scan_gated(
    y,
    x,
    input_gate,
    decay_gate,
    input_bias,
    decay_bias,
    rate,
    pages,
    places,
    tables,
    starts,
    lengths,
    saves,
    saved_tables,
    x_stride,
    input_gate_stride,
    decay_gate_stride,
    page_stride,
    table_width,
    CHANNELS: tl.constexpr,
    PER_UNIT: tl.constexpr,
    HAS_SAVES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (sequence, unit, tile of its channels)."""
    seq, unit = tl.program_id(0), tl.program_id(1)
    within = tl.program_id(2) * TILE + tl.arange(0, TILE)
    mask, channel = within < PER_UNIT, unit * PER_UNIT + within
    first, end = tl.load(starts + seq), tl.load(starts + seq + 1)
    if end > first:
        kept_in = pages, places, tables, saves, saved_tables, table_width, page_stride
        place = _unit(places, tables, table_width, page_stride, seq, unit)
        length = tl.load(lengths + seq)
        num_read, num_written = _kept_channels(place, end - first, length, PER_UNIT)
        state = tl.load(pages + place + within, within < num_read, other=0.0)
        rates = tl.load(rate + channel, mask, other=0.0)
        input_offset = tl.load(input_bias + channel, mask, other=0.0)
        decay_offset = tl.load(decay_bias + channel, mask, other=0.0)
        position = length - (end - first)
        at = first.to(tl.int64)
        for _ in range(first, end):
            inputs = tl.load(x + at * x_stride + channel, mask, other=0.0).to(tl.float32)
            gates = tl.load(input_gate + at * input_gate_stride + channel, mask, other=0.0)
            inputs *= _sigmoid(gates.to(tl.float32) + input_offset)
            gates = tl.load(decay_gate + at * decay_gate_stride + channel, mask, other=0.0)
            log_decay = rates * _sigmoid(gates.to(tl.float32) + decay_offset)
            rest = 1.0 - tl.exp(2.0 * log_decay)
            factor = tl.sqrt_rn(tl.maximum(rest, 0.0, propagate_nan=tl.PropagateNan.ALL))
            inputs *= tl.where(position == 0, 1.0, factor)
            state = state * tl.exp(log_decay) + inputs
            tl.store(y + at * CHANNELS + channel, state.to(y.dtype.element_ty), mask)
            if HAS_SAVES:
                _save(kept_in, unit, at, within, state, mask)
            at += 1
            position += 1
        tl.store(pages + place + within, state, within < num_written)


def rglru_scan(
    x: Tensor,
    input_gate: Tensor,
    decay_gate: Tensor,
    input_bias: Tensor,
    decay_bias: Tensor,
    rate: Tensor,
    units: StateUnits,
    metadata: AttentionMetadata,
) -> Tensor:
    """Real-gated linear recurrent unit; as `reference.rglru_scan`."""
    num_channels = len(rate)
    gates = {"input_gate": input_gate, "decay_gate": decay_gate}
    columns = {"input_bias": input_bias, "decay_bias": decay_bias, "rate": rate}
    expect_tensors(
        ("x", x, FLOATS, (None, num_channels)),
        *((name, rows, (x.dtype,), x.shape) for name, rows in gates.items()),
        *((name, column, (torch.float32,), (num_channels,)) for name, column in columns.items()),
    )
    per_unit = _per_unit(units, torch.float32, num_channels)
    y = x.new_empty(x.shape)
    grid = len(metadata.context_lens), len(units.places), triton.cdiv(per_unit, _CHANNELS)
    _scan_gated[grid](
        y,
        x,
        *gates.values(),
        *columns.values(),
        *_addressed(units, metadata),
        *(rows.stride(0) for rows in (x, *gates.values())),
        units.pages.stride(0),
        metadata.block_tables.stride(0),
        CHANNELS=num_channels,
        PER_UNIT=per_unit,
        HAS_SAVES=metadata.saves is not None,
        TILE=_CHANNELS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y


@triton.jit
def _gated_norm(
    y,
    x,
    gate,
    weight,
    eps,
    x_stride,
    x_group_stride,
    gate_stride,
    gate_group_stride,
    weight_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    GATES_FIRST: tl.constexpr,
    HAS_SIGMOID: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (row, group)."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, TILE)
    mask = column < SIZE
    values = tl.load(x + row * x_stride + group * x_group_stride + column, mask, other=0.0)
    gates = tl.load(gate + row * gate_stride + group * gate_group_stride + column, mask, other=0.0)
    values, gates = values.to(tl.float32), gates.to(tl.float32)
    gates = _sigmoid(gates) if HAS_SIGMOID else _silu(gates)
    if GATES_FIRST:
        values *= gates
    variance = tl.sum(values * values, axis=0) / SIZE
    weights = tl.load(weight + group * weight_stride + column, mask, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(variance + eps) * weights
    if not GATES_FIRST:
        values *= gates
    target = y + (row * GROUPS + group) * SIZE + column
    tl.store(target, values.to(y.dtype.element_ty), mask)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gates_first: bool,
    activation: str = "silu",
) -> Tensor:
    """RMS norm of groups of elements, and a gate; as `reference.gated_rms_norm`."""
    num_rows, num_groups, size = x.shape
    expect_tensors(
        ("x", x, FLOATS, (None, None, None)),
        ("gate", gate, (x.dtype,), x.shape),
        ("weight", weight, FLOATS, (num_groups, size) if weight.ndim == 2 else (size,)),
    )
    y = x.new_empty(x.shape)
    if x.numel():
        _gated_norm[(num_rows, num_groups)](
            y,
            x,
            gate,
            weight,
            float(eps),
            *x.stride()[:2],
            *gate.stride()[:2],
            weight.stride(0) if weight.ndim == 2 else 0,
            GROUPS=num_groups,
            SIZE=size,
            GATES_FIRST=gates_first,
            HAS_SIGMOID=activation == "sigmoid",
            TILE=triton.next_power_of_2(size),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return y


def _per_unit(units: StateUnits, dtype: torch.dtype, num_channels: int) -> int:
    """Channels of a unit."""
    num_units = len(units.places)
    expect_tensors(
        ("pages", units.pages, (dtype,), (None, None)),
        ("places", units.places, (torch.int64,), (num_units, 2)),
    )
    expect(units.places.is_contiguous(), "places: expected a contiguous tensor")
    expect(
        num_channels % num_units == 0,
        f"places: expected units that divide {num_channels} channels, got {num_units}",
    )
    return num_channels // num_units


def _addressed(units: StateUnits, metadata: AttentionMetadata) -> tuple[Tensor, ...]:
    """The tensors that say where states are, and which rows are whose."""
    columns = metadata.block_tables, metadata.query_start, metadata.context_lens
    saves = metadata.saves or (metadata.block_tables, metadata.block_tables)  # not read
    return units.pages, units.places, *columns, *saves
