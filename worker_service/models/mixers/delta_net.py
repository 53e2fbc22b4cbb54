"""Gated delta nets (Yang et al. 2024): linear attention, whose state of a head is a matrix, which
each token corrects towards its value.

Queries, keys and values pass through a causal convolution first; the output is normed head by head
and multiplied by a gate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn

from worker_service.distributed.layout import Layout, Shard, consecutive
from worker_service.models.interface import ModelContext
from worker_service.models.kv_cache_spec import LayerState, StateArray
from worker_service.models.layers.norms import RMSNorm
from worker_service.models.layers.vector import Vector
from worker_service.models.linear.linear import Linear, RowParallelLinear
from worker_service.models.mixers.convolution import CausalConvolution, convolution_state
from worker_service.models.native import LayerInputs, MixerPlace


class DeltaStorage(Enum):
    """How a checkpoint stores the weights of a gated delta net, and how `LayerSpec.names` lists
    them."""

    SEPARATE = auto()
    """`inputs` are two tensors: queries, keys and values, then output gates. `gates` are two: those
    of changes, then decays."""

    BY_KEY_HEAD = auto()
    """`inputs` are one tensor: for each head of keys, its queries, keys, values and output gates.
    So are `gates`: those of changes, then decays."""

    GATES_BY_KEY_HEAD = auto()
    """`inputs` as `SEPARATE`, and `gates` as `BY_KEY_HEAD`."""

    BY_PART = auto()
    """`inputs` are four tensors: queries, keys, values, then output gates. `convolution` is three,
    of queries, keys and values. `gates` as `SEPARATE`."""

    JOINED = auto()
    """`inputs` and `gates` are one tensor: queries, keys, values, output gates, gates of changes,
    then decays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GatedDeltaNetSpec:
    """A gated delta net in place of attention. Implements `decoder.MixerSpec`.

    Attributes of `GatedDeltaNet` with tensors, for `LayerSpec.names`: `inputs` and `gates`, see
    `DeltaStorage`, `convolution`, `decay` (logarithms of rates), `decay_bias`, `norm`, `output`.
    """

    num_key_heads: int
    num_heads: int
    """Of values; a multiple of those of queries and keys."""

    key_dim: int
    value_dim: int
    """Elements of a head."""

    width: int
    """Rows that a sum of the convolution extends over."""

    eps: float
    """Of the norm of heads."""

    storage: DeltaStorage
    beta_scale: float = 1.0
    """The factor of changes. Beyond 1, a state may change its sign in the direction of a key: it
    has negative eigenvalues (Grazzi et al. 2024)."""

    rotary: None = None
    """Nothing is rotated."""

    @property
    def group(self) -> int:
        """Heads of values for each one of keys."""
        return self.num_heads // self.num_key_heads

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the heads."""
        self.key_heads(layout)

    def key_heads(self, layout: Layout) -> Shard:
        """A rank's heads of queries and keys."""
        return layout.even_shard(self.num_key_heads, "heads of keys of a gated delta net")

    def channels(self, layout: Layout) -> list[Shard]:
        """A rank's queries, keys and values, in tensors of their own or following each other."""
        keys = self.key_heads(layout).times(self.key_dim)
        values = self.key_heads(layout).times(self.group * self.value_dim)
        parts = [keys, keys, values]
        return parts if self.storage is DeltaStorage.BY_PART else consecutive(parts)

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerState, ...]:
        """The convolution's inputs, and the matrix of each head."""
        layout = context.communicator.layout
        num_channels = sum(part.size for part in self.channels(layout))
        inputs = convolution_state(num_channels, self.width, context.dtype)
        heads = StateArray(
            num_units=self.key_heads(layout).size * self.group,
            shape=(self.key_dim, self.value_dim),
            dtype=torch.float32,
        )
        return (LayerState(arrays=(inputs, heads)),)

    def build(self, place: MixerPlace) -> "GatedDeltaNet":
        """See `decoder.MixerSpec`."""
        return GatedDeltaNet(self, place)


class GatedDeltaNet(nn.Module):
    """See `GatedDeltaNetSpec`. Each rank has some heads of keys, and those of values for them."""

    def __init__(self, spec: GatedDeltaNetSpec, place: MixerPlace) -> None:
        super().__init__()
        context, kernels = place.context, place.kernels.layers
        s, layout = spec, context.communicator.layout
        key_heads, channels = s.key_heads(layout), s.channels(layout)
        heads = key_heads.times(s.group)
        values, rows = heads.times(s.value_dim), Shard.full(place.inputs)
        parts, gates, sources = [*channels, values], [heads, heads], [0, 0, 0, 1]
        if s.storage is DeltaStorage.JOINED:
            keys = key_heads.times(s.key_dim)
            joined = consecutive([keys, keys, values, values, heads, heads])
            parts, gates, sources = joined[:4], joined[4:], [0] * 4
        if s.storage is DeltaStorage.BY_KEY_HEAD:
            sizes = s.key_dim, s.key_dim, s.group * s.value_dim, s.group * s.value_dim
            self.inputs = _by_key_head(rows, key_heads, sizes, context)
        else:
            of_parts = None if s.storage is DeltaStorage.BY_PART else sources
            self.inputs = Linear(rows, parts, bias=False, context=context, sources=of_parts)
        if s.storage is DeltaStorage.JOINED:
            self.gates = Linear(rows, gates, bias=False, context=context, sources=[0, 0])
        elif s.storage in (DeltaStorage.SEPARATE, DeltaStorage.BY_PART):
            self.gates = Linear(rows, gates, bias=False, context=context)
        else:
            self.gates = _by_key_head(rows, key_heads, (s.group, s.group), context)
        self.convolution = CausalConvolution(
            channels, s.width, bias=False, context=context, kernels=kernels, activation="silu"
        )
        self.decay, self.decay_bias = Vector(heads, context), Vector(heads, context)
        self.norm = RMSNorm(s.value_dim, s.eps, context, kernels)
        self.output = RowParallelLinear(values, place.size, bias=False, context=context)
        self._spec, self._kernels, self._num_heads = s, kernels, heads.size
        self._key_size = key_heads.size * s.key_dim

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        s, (convolution, heads) = self._spec, inputs.states
        value_size = self._num_heads * s.value_dim
        channels, gate = self.inputs(x).split_with_sizes(
            [2 * self._key_size + value_size, value_size], 1
        )
        beta, decay = self.gates(x).chunk(2, dim=1)
        channels = self.convolution(channels, convolution, inputs.metadata)
        query, key, value = channels.split_with_sizes([self._key_size] * 2 + [value_size], 1)
        y = self._kernels.gated_delta_rule(
            query.unflatten(1, (-1, s.key_dim)),
            key.unflatten(1, (-1, s.key_dim)),
            value.unflatten(1, (-1, s.value_dim)),
            decay.unsqueeze(2),
            beta,
            self.decay.numbers,
            self.decay_bias.numbers.unsqueeze(1),
            heads,
            inputs.metadata,
            beta_scale=s.beta_scale,
        )
        gates = gate.unflatten(1, (-1, s.value_dim))
        y = self._kernels.gated_rms_norm(
            y, gates, self.norm.weight, self.norm.eps, gates_first=False
        )
        return self.output(y.flatten(1))


@dataclass(frozen=True, kw_only=True, slots=True)
class KimiDeltaSpec:
    """Kimi delta attention (Kimi Team 2025), a gated delta net with a decay for each element of
    keys, in place of attention. Implements `decoder.MixerSpec`.

    Attributes of `KimiDeltaAttention` with tensors, for `LayerSpec.names`: `inputs` (queries, keys,
    values), `narrow` (what decays and output gates are products of, or these themselves, then gates
    of changes), `decays` and `gates` where there are such products, `convolution` (of queries,
    keys, values), `decay`, `decay_bias`, `norm`, `output`.
    """

    num_heads: int
    head_dim: int
    width: int
    """Rows that a sum of the convolution extends over."""

    eps: float
    """Of the norm of heads."""

    is_narrow: bool = True
    """Whether decays and output gates are products of `head_dim` elements, which are products of
    the row; otherwise the row's."""

    decay_bound: float = 0.0
    """The least logarithm of a decay, below 0, of which it is a part; 0: there is none."""

    decay_axes: tuple[int, int] = (2, 1)
    """Axes of size 1 before and behind those of heads that the tensor of `decay` has."""

    rotary: None = None
    """Nothing is rotated."""

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the heads."""
        self.heads(layout)

    def heads(self, layout: Layout) -> Shard:
        """A rank's heads."""
        return layout.even_shard(self.num_heads, "heads of Kimi delta attention")

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerState, ...]:
        """The convolution's inputs, and the matrix of each head."""
        num_heads, size = self.heads(context.communicator.layout).size, self.head_dim
        inputs = convolution_state(3 * num_heads * size, self.width, context.dtype)
        heads = StateArray(num_units=num_heads, shape=(size, size), dtype=torch.float32)
        return (LayerState(arrays=(inputs, heads)),)

    def build(self, place: MixerPlace) -> "KimiDeltaAttention":
        """See `decoder.MixerSpec`."""
        return KimiDeltaAttention(self, place)


class KimiDeltaAttention(nn.Module):
    """See `KimiDeltaSpec`. Each rank has some heads."""

    def __init__(self, spec: KimiDeltaSpec, place: MixerPlace) -> None:
        super().__init__()
        context, kernels = place.context, place.kernels.layers
        heads, rows = spec.heads(context.communicator.layout), Shard.full(place.inputs)
        values = heads.times(spec.head_dim)
        narrow = Shard.full(spec.head_dim) if spec.is_narrow else values
        self.inputs = Linear(rows, [values] * 3, bias=False, context=context)
        self.narrow = Linear(rows, [narrow, narrow, heads], bias=False, context=context)
        self.decays: Linear | None = None
        self.gates: Linear | None = None
        if spec.is_narrow:
            self.decays = Linear(narrow, [values], bias=False, context=context)
            self.gates = Linear(narrow, [values], bias=False, context=context)
        self.convolution = CausalConvolution(
            [values] * 3,
            spec.width,
            bias=False,
            context=context,
            kernels=kernels,
            activation="silu",
        )
        before, after = spec.decay_axes
        self.decay = Vector(heads, context, axes_before=before, axes_after=after)
        self.decay_bias = Vector(values, context)
        self.norm = RMSNorm(spec.head_dim, spec.eps, context, kernels)
        self.output = RowParallelLinear(values, place.size, bias=False, context=context)
        self._kernels, self._head_dim = kernels, spec.head_dim
        self._sizes, self._decay_bound = [narrow.size, narrow.size, heads.size], spec.decay_bound

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        convolution, states = inputs.states
        shape = -1, self._head_dim
        channels = self.convolution(self.inputs(x), convolution, inputs.metadata)
        query, key, value = (part.unflatten(1, shape) for part in channels.chunk(3, dim=1))
        decays, gates, beta = self.narrow(x).split_with_sizes(self._sizes, 1)
        if self.decays is not None and self.gates is not None:
            decays, gates = self.decays(decays), self.gates(gates)
        y = self._kernels.gated_delta_rule(
            query,
            key,
            value,
            decays.unflatten(1, shape),
            beta,
            self.decay.numbers,
            self.decay_bias.numbers.view(shape),
            states,
            inputs.metadata,
            decay_bound=self._decay_bound,
        )
        y = self._kernels.gated_rms_norm(
            y,
            gates.unflatten(1, shape),
            self.norm.weight,
            self.norm.eps,
            gates_first=False,
            activation="sigmoid",
        )
        return self.output(y.flatten(1))


def _by_key_head(
    rows: Shard, key_heads: Shard, sizes: Sequence[int], context: ModelContext
) -> Linear:
    """A product whose parts, of these sizes for each head of keys, follow each other by head in the
    checkpoint, and of all heads here."""
    heads = torch.arange(key_heads.size * sum(sizes)).view(key_heads.size, -1)
    order = torch.cat([part.flatten() for part in heads.split_with_sizes(list(sizes), 1)])
    outputs = [key_heads.times(sum(sizes))]
    return Linear(rows, outputs, bias=False, context=context, orders=[order])
