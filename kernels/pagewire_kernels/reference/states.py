"""Layers with a state, token by token in plain torch: causal convolutions, Mamba, the gated delta
rule, and the gated linear recurrent unit.

The rows of a step are those of `AttentionMetadata` of the state's cache group, whose block tables
hold the pages of states, int32 [num_seqs, num_pages_of_a_state]. A sequence whose first row is at
position 0 starts from zeros, whatever its pages hold. When a call returns, they hold the state
after its last row, and those of `AttentionMetadata.saves` the states after rows before. A page of
-1 is neither read nor written: states in it start from zeros.

All is computed in float32, each token from the state before it alone, so that a token's result does
not depend on the step in which it is computed.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from pagewire_kernels.batch import AttentionMetadata, StateUnits

MAX_CONVOLUTION_WIDTH = 8

GATES = ("silu", "sigmoid")
"""Activations of the gates of norms."""


def causal_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    units: StateUnits,
    metadata: AttentionMetadata,
    activation: str | None = None,
) -> Tensor:
    """Convolve each channel over the last `width` tokens of its sequence.

    x: [num_tokens, num_channels]; weight: [width, num_channels], of the oldest token first; bias:
    [num_channels]; units: [width - 1, num_channels / num_units] each, in x's dtype: the inputs
    before the next token, the oldest first; activation: "silu" or None. Returns x's shape and
    dtype.
    """
    width, num_channels = weight.shape
    check_convolution(width, activation)
    num_units = len(units.places)
    states = _States(units, metadata, (width - 1, num_channels // num_units))
    y = torch.empty_like(x)
    offset = 0 if bias is None else bias.float()
    for seqs, rows in states.steps():
        inputs = x[rows].view(len(rows), num_units, 1, -1)
        window = torch.cat([states.values[seqs], inputs], dim=2)
        states.values[seqs] = window[:, :, 1:]
        taps = window.transpose(1, 2).reshape(len(rows), width, num_channels).float()
        total = torch.zeros_like(taps[:, 0]) + offset
        for i in range(width):
            total = total + taps[:, i] * weight[i].float()
        y[rows] = (total if activation is None else _silu(total)).to(x.dtype)
    return y


def check_convolution(width: int, activation: str | None) -> None:
    """Raise ValueError unless there are kernels for this width and activation."""
    if not 2 <= width <= MAX_CONVOLUTION_WIDTH:
        raise ValueError(f"convolution width: expected 2 to {MAX_CONVOLUTION_WIDTH}, got {width}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation of a convolution: expected silu or none, got {activation!r}")


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
    """Selective state space with a decay for each channel and element (Gu and Dao 2023).

    x, dt, gate: [num_tokens, num_channels]; b, c: [num_tokens, state_size]; a: float32
    [state_size, num_channels], negative; d, dt_bias: float32 [num_channels]; units: float32
    [state_size, num_channels / num_units] each. With delta = softplus(dt + dt_bias), a state s
    becomes exp(delta * a) * s + delta * x * b; the result is the sum of c * s over its elements,
    plus d * x, times silu(gate) if there is a gate. Returns x's shape and dtype.
    """
    num_units, (state_size, num_channels) = len(units.places), a.shape
    states = _States(units, metadata, (state_size, num_channels // num_units))
    y = torch.empty_like(x)
    for seqs, rows in states.steps():
        inputs = x[rows].float()
        delta = softplus(dt[rows].float() + dt_bias)
        state = states.values[seqs].transpose(1, 2).reshape(len(rows), state_size, num_channels)
        decay = torch.exp(delta[:, None] * a)
        state = state * decay + (delta * inputs)[:, None] * b[rows].float()[:, :, None]
        parts = state.view(len(rows), state_size, num_units, -1)
        states.values[seqs] = parts.transpose(1, 2)
        total = _sum(state, c[rows].float()) + d * inputs
        y[rows] = (total if gate is None else total * _silu(gate[rows].float())).to(x.dtype)
    return y


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
    """Selective state space with a decay for each head (Dao and Gu 2024).

    x, gate: [num_tokens, num_heads, head_dim]; dt: [num_tokens, num_heads]; b, c: [num_tokens,
    num_groups, state_size], each for num_heads / num_groups consecutive heads; a, d, dt_bias:
    float32 [num_heads], a negative; units: float32 [state_size, head_dim] each, one per head;
    dt_limits: of softplus(dt + dt_bias). As `mamba1_scan` otherwise. Returns x's shape and dtype.
    """
    (_, num_heads, head_dim), (_, num_groups, state_size) = x.shape, b.shape
    states = _States(units, metadata, (state_size, head_dim))
    y = torch.empty_like(x)
    repeats = num_heads // num_groups
    for seqs, rows in states.steps():
        inputs = x[rows].float()
        delta = softplus(dt[rows].float() + dt_bias).clamp(*dt_limits)[:, :, None]
        keys, queries = (
            part[rows].float().repeat_interleave(repeats, dim=1)[..., None] for part in (b, c)
        )
        decay = torch.exp(delta * a[:, None])[..., None]
        state = states.values[seqs] * decay + (delta * inputs)[:, :, None] * keys
        states.values[seqs] = state
        total = _sum(state, queries[..., 0]) + d[:, None] * inputs
        y[rows] = (total if gate is None else total * _silu(gate[rows].float())).to(x.dtype)
    return y


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
    """Delta rule with a decay (Yang et al. 2024), of a head or of each element of its keys (Kimi
    Team 2025).

    query, key: [num_tokens, num_key_heads, key_dim], each for num_heads / num_key_heads consecutive
    heads; value: [num_tokens, num_heads, value_dim]; decay: [num_tokens, num_heads, width], with a
    width of 1 or key_dim; beta: [num_tokens, num_heads]; a_log: float32 [num_heads]; dt_bias:
    float32 [num_heads, width]; units: float32 [key_dim, value_dim] each, one per head.

    With queries and keys normalized to length 1, t = decay + dt_bias and r = exp(a_log), d is
    exp(-r * softplus(t)), or with a bound below 0 exp(decay_bound * sigmoid(r * t)). A state s
    first becomes d * s, and then s + beta_scale * sigmoid(beta) * k (v - k s), where k s is the
    product of key and state. The result is that of the query and the state, divided by the square
    root of key_dim. Returns value's shape and dtype.
    """
    (_, num_heads, value_dim), (_, num_key_heads, key_dim) = value.shape, key.shape
    states = _States(units, metadata, (key_dim, value_dim))
    y, repeats = torch.empty_like(value), num_heads // num_key_heads
    rate = torch.exp(a_log)[:, None]
    for seqs, rows in states.steps():
        queries, keys = (
            _unit_length(part[rows].float()).repeat_interleave(repeats, dim=1)
            for part in (query, key)
        )
        times = decay[rows].float() + dt_bias
        is_bounded = decay_bound < 0
        logs = decay_bound * _sigmoid(rate * times) if is_bounded else -rate * softplus(times)
        decays = torch.exp(logs)
        state = states.values[seqs] * decays[..., None]
        gates = beta_scale * _sigmoid(beta[rows].float())
        change = (value[rows].float() - _sum(state, keys)) * gates[..., None]
        state = state + keys[..., None] * change[:, :, None]
        states.values[seqs] = state
        y[rows] = _sum(state, queries * key_dim**-0.5).to(value.dtype)
    return y


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
    """Real-gated linear recurrent unit, RG-LRU (De et al. 2024).

    x, input_gate, decay_gate: [num_tokens, num_channels], the gates without their biases, and
    before the sigmoid; input_bias, decay_bias, rate: float32 [num_channels], the rate negative;
    units: float32 [1, num_channels / num_units] each. With a decay a = exp(rate *
    sigmoid(decay_gate + decay_bias)), a state s becomes a * s + sqrt(1 - a^2) * sigmoid(input_gate
    + input_bias) * x, which is also the result; the token at position 0 has no factor sqrt(1 -
    a^2). Returns x's shape and dtype.
    """
    num_units, num_channels = len(units.places), len(rate)
    states = _States(units, metadata, (1, num_channels // num_units))
    y, starts = torch.empty_like(x), metadata.query_start.long()
    first_positions = metadata.context_lens - metadata.query_start.diff()
    for seqs, rows in states.steps():
        inputs = x[rows].float() * _sigmoid(input_gate[rows].float() + input_bias)
        log_decay = rate * _sigmoid(decay_gate[rows].float() + decay_bias)
        factor = (1 - torch.exp(2 * log_decay)).clamp(min=0).sqrt()
        is_first = (first_positions[seqs] == 0) & (rows == starts[seqs])
        inputs = inputs * torch.where(is_first[:, None], 1, factor)
        state = states.values[seqs].flatten(1) * torch.exp(log_decay) + inputs
        states.values[seqs] = state.view(len(rows), num_units, 1, -1)
        y[rows] = state.to(x.dtype)
    return y


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    gates_first: bool,
    activation: str = "silu",
) -> Tensor:
    """RMS norm of groups of elements, and a gate: norm(x * silu(gate)) * weight, or norm(x) *
    weight * silu(gate) if the gate is not first.

    x, gate: [num_tokens, num_groups, group_size]; weight: [num_groups, group_size], or
    [group_size] for all groups; activation: of the gate, one of `GATES`. Returns x's shape and
    dtype.
    """
    wide = gate.float()
    gates = _silu(wide) if activation == "silu" else _sigmoid(wide)
    wide = x.float()
    if gates_first:
        wide = wide * gates
    root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = wide * root * weight.float()
    return (normed if gates_first else normed * gates).to(x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), which is x in float32 where x is large."""
    return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))


def _unit_length(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _silu(x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return functional.silu(x)
    return x / torch.exp(-x).add_(1)  # see `layers._silu`


def _sigmoid(x: Tensor) -> Tensor:
    return torch.exp(-x).add_(1).reciprocal_()


def _sum(state: Tensor, c: Tensor) -> Tensor:
    """The sum of c * state over the elements of a state, in order.

    state: [..., state_size, n]; c: [..., state_size]. Returns [..., n].
    """
    total = torch.zeros_like(state[..., 0, :])
    for i in range(state.shape[-2]):
        total = total + state[..., i, :] * c[..., i, None]
    return total


class _States:
    """The units of all sequences, [num_seqs, num_units, *shape], outside of their pages."""

    def __init__(
        self, units: StateUnits, metadata: AttentionMetadata, shape: tuple[int, int]
    ) -> None:
        self._pages, self._metadata = units.pages, metadata
        self._columns, firsts = units.places.unbind(1)
        self._elements = firsts[:, None] + torch.arange(shape[0] * shape[1], device=firsts.device)
        pages = self._pages_of(metadata.block_tables)
        is_begun = metadata.context_lens > metadata.query_start.diff()
        is_read = (pages >= 0) & is_begun[:, None, None]
        stored = self._pages[pages.clamp(min=0), self._elements]
        values = torch.where(is_read, stored, 0)
        self.values = values.view(*values.shape[:2], *shape)

    def steps(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of a step in their order in sequences: numbers of sequences, and a row of each.
        The caller sets their `values`, which are then saved and, after the last row, kept."""
        metadata = self._metadata
        starts = metadata.query_start.long()
        lengths = starts.diff()
        for offset in range(int(lengths.max()) if len(lengths) else 0):
            seqs = (lengths > offset).nonzero().squeeze(1)
            rows = starts[seqs] + offset
            yield seqs, rows
            if (saves := metadata.saves) is not None:
                is_saved = saves.rows[rows] >= 0
                self._write(saves.tables[saves.rows[rows][is_saved]], seqs[is_saved])
        seqs = (lengths > 0).nonzero().squeeze(1)
        self._write(metadata.block_tables[seqs], seqs)

    def _pages_of(self, tables: Tensor) -> Tensor:
        return tables[:, self._columns].long()[:, :, None]

    def _write(self, tables: Tensor, seqs: Tensor) -> None:
        """Write the units of some sequences to pages. tables: [n, num_pages_of_a_state]."""
        pages = self._pages_of(tables).expand(-1, -1, self._elements.shape[1])
        kept = pages >= 0
        elements = self._elements.expand_as(pages)
        self._pages[pages[kept], elements[kept]] = self.values[seqs].flatten(2)[kept]
