"""Latent attention (DeepSeek-AI 2024): keys and values of all heads are products of one latent.

The cache holds the latent of each token, and the end of keys that all heads share, which is
rotated. A key of a head is its product with the latent, followed by that end. Keys and values of
all tokens are never computed: queries are multiplied by the weights of keys, and sums of latents by
those of values, between which attention has a single head of keys, whose first elements are its
values. Prefills, chunks and decodes compute the same products, so a row has the same bits in each.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn

from pagewire_kernels.quantized_weight import QuantizedWeight
from worker_service.distributed.layout import Layout, Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import LayerKV
from worker_service.models.layers.norms import RMSNorm
from worker_service.models.layers.paged_attention import PagedAttention
from worker_service.models.layers.rotary import RotarySettings, halves_order
from worker_service.models.layers.vector import Vector
from worker_service.models.linear.additions import LinearPart
from worker_service.models.linear.heads import HeadsProduct
from worker_service.models.linear.linear import Linear, RowParallelLinear
from worker_service.models.native import LayerInputs, MixerPlace

_MAX_SCALED = 32
"""Elements of a query that are scaled together: the tables of factors are half as wide."""


class OutputGates(Enum):
    """Gates of the output, which is multiplied by their sigmoid."""

    OF_ELEMENTS = auto()
    """Of each element of the output: products of the row, whose weight is behind those of
    `inputs`."""

    OF_HEADS = auto()
    """As `OF_ELEMENTS`, but of each head."""

    OF_QUERIES = auto()
    """Of each element of the output: products of latents of queries, normed and then as they are,
    of which queries are products, too. Those of a head follow its queries in the weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentAttentionSpec:
    """Latent attention over the paged cache. Implements `decoder.MixerSpec`.

    Attributes of `LatentAttention` with tensors, for `LayerSpec.names`: `inputs` (queries, or their
    latents, then latents with the end of keys, then gates, if there are any), `latent_norm`,
    `expansion`, `output`, with latents of queries `query_norm` and `query`, and, if there are any,
    `end_norm` and `sinks`.
    """

    num_heads: int
    latent_dim: int
    """Elements of the latent of keys and values."""

    query_latent_dim: int | None
    """Elements of the latent of queries; None: they are products of the hidden state."""

    key_dim: int
    """Elements of a head of keys that are a product of the latent."""

    rotary_dim: int
    """The elements after them, which are rotated, and shared by all heads."""

    value_dim: int
    scale: float
    """The factor of attention scores."""

    rotary: RotarySettings
    eps: float
    """Of the RMS norms of latents."""

    latent_scale: float = 1.0
    """The factor of normed latents of keys and values."""

    bias: bool = False
    """Whether the products that make latents, and the output, have biases."""

    has_pairs: bool = True
    """As `AttentionSpec.has_pairs`."""

    norms_ends: bool = False
    """Whether the end of keys has an RMS norm of its own, before it is rotated."""

    has_sinks: bool = False
    """As `AttentionSpec.has_sinks`."""

    gates: OutputGates | None = None
    """What the output is multiplied by; None: nothing. There are no biases with gates."""

    window: int | None = None
    """As `AttentionSpec.window`."""

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the heads."""
        layout.even_shard(self.num_heads, "attention heads")

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerKV, ...]:
        """What a token leaves in the cache of each rank: all that it leaves anywhere."""
        size, window = self.latent_dim + self.rotary_dim, self.window
        if window is not None and window >= max_model_len:
            window = None
        return (LayerKV(num_kv_heads=1, head_dim=size, has_values=False, window=window),)

    def build(self, place: MixerPlace) -> "LatentAttention":
        """See `decoder.MixerSpec`."""
        return LatentAttention(self, place)


class LatentAttention(nn.Module):
    """See `LatentAttentionSpec`. Each rank has some heads, and all latents."""

    def __init__(self, spec: LatentAttentionSpec, place: MixerPlace) -> None:
        super().__init__()
        context, kernels, rotary = place.context, place.kernels, place.rotary
        assert rotary is not None, "its settings are given"
        s, layout = spec, context.communicator.layout
        heads = layout.even_shard(s.num_heads, "attention heads")
        head_dim, latents = s.key_dim + s.rotary_dim, Shard.full(s.latent_dim + s.rotary_dim)
        query_order, latent_order = (
            halves_order(count, first + s.rotary_dim, first, s.rotary_dim) if s.has_pairs else None
            for count, first in ((heads.size, s.key_dim), (1, s.latent_dim))
        )
        queries = heads.times(head_dim)
        is_direct = s.query_latent_dim is None
        first = queries if s.query_latent_dim is None else Shard.full(s.query_latent_dim)
        gates, is_of_queries = [], s.gates is OutputGates.OF_QUERIES
        if s.gates is not None and not is_of_queries:
            gates = [heads if s.gates is OutputGates.OF_HEADS else heads.times(s.value_dim)]
        assert not gates or not s.bias, "gates have no biases"
        self._parts = first.size, latents.size, sum(shard.size for shard in gates)
        self.inputs = Linear(
            Shard.full(place.inputs),
            [first, latents, *gates],
            bias=s.bias,
            context=context,
            orders=[query_order if is_direct else None, latent_order, *(None for _ in gates)],
        )
        self.query_norm: RMSNorm | None = None
        self.query: Linear | None = None
        if s.query_latent_dim is not None:
            self.query_norm = RMSNorm(s.query_latent_dim, s.eps, context, kernels.layers)
            if is_of_queries:
                query_order = _with_gates(query_order, heads.size, head_dim, s.value_dim)
                first = Shard.full(2 * s.query_latent_dim)
                queries = heads.times(head_dim + s.value_dim)
            self.query = Linear(first, [queries], bias=False, context=context, orders=[query_order])
        self.latent_norm = RMSNorm(
            s.latent_dim, s.eps, context, kernels.layers, scale=s.latent_scale
        )
        self.end_norm: RMSNorm | None = None
        if s.norms_ends:
            order = halves_order(1, s.rotary_dim, 0, s.rotary_dim) if s.has_pairs else None
            self.end_norm = RMSNorm(s.rotary_dim, s.eps, context, kernels.layers, order=order)
        self.expansion = Expansion(s, heads, context)
        self.output = RowParallelLinear(
            heads.times(s.value_dim), place.size, bias=s.bias, context=context
        )
        self.sinks = Vector(heads, context) if s.has_sinks else None
        sinks = None if self.sinks is None else self.sinks.numbers
        self.paged = PagedAttention(
            kernels.attention_of(s.window),
            scale=s.scale,
            sliding_window=s.window,
            sinks=sinks,
            value_dim=s.latent_dim,
        )
        self._spec, self._rotary, self._kernels = s, rotary, kernels.layers
        num_gates = heads.size * s.value_dim
        self._query_parts = (heads.size * head_dim, num_gates) if is_of_queries else None
        self._gate_order: Tensor | None = None
        if s.gates is OutputGates.OF_HEADS:
            order = torch.arange(heads.size, dtype=torch.int32, device=context.device)
            self._gate_order = order.repeat_interleave(s.value_dim)
        self._scales: tuple[Tensor, Tensor] | None = None
        self._scaled_size = math.gcd(head_dim, _MAX_SCALED)
        if rotary.scales_queries:
            assert head_dim % 2 == 0, "the kernel that scales them rotates pairs"
            self._scales = rotary.query_scales(self._scaled_size)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        query, latents, gates = self._project(x)
        query, paged = self._write(query, latents, inputs), self.paged
        paged.value_scale = paged.key_scale  # values are keys
        attended = paged.attend(query, inputs.caches, inputs.metadata).view(query.shape)
        values = self.expansion.values(attended[:, :, : self._spec.latent_dim]).flatten(1)
        if self._gate_order is not None:
            gates = self._kernels.take_columns(gates, self._gate_order)
        if gates.shape[1]:
            values = self._kernels.multiply_sigmoid(values, gates)
        return self.output(values)

    def write_kv(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write the latents of rows to the layer's cache. Returns the queries of latents."""
        query, latents, _ = self._project(x)
        return self._write(query, latents, inputs)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, latents with the end of keys, and gates, of which there may be none:
        [num_tokens, columns] each."""
        query, latents, gates = self.inputs(x).split_with_sizes(self._parts, 1)
        if self.query is not None and self.query_norm is not None:
            normed = self.query_norm(query)
            if self._query_parts is None:
                query = self.query(normed)
            else:
                product = self.query(self._kernels.concatenate([normed, query]))
                query, gates = product.split_with_sizes(self._query_parts, 1)
        return query, latents, gates

    def _write(self, query: Tensor, latents: Tensor, inputs: LayerInputs) -> Tensor:
        s = self._spec
        if self.end_norm is not None:
            latent, end = latents.split_with_sizes((s.latent_dim, s.rotary_dim), 1)
            latents = self._kernels.concatenate([latent, self.end_norm(end)])
        if self._scales is not None:
            parts = query.unflatten(1, (-1, self._scaled_size))
            self._kernels.rotate(parts, parts[:, :0], inputs.positions, *self._scales)
        heads = query.unflatten(1, (-1, s.key_dim + s.rotary_dim))
        query = self.expansion.absorb(heads[:, :, : s.key_dim])
        cache, _ = inputs.caches
        self._kernels.write_latents(
            heads[:, :, s.key_dim :],
            query[:, :, s.latent_dim :],
            latents,
            self.latent_norm.weight,
            cache,
            inputs.metadata.slot_mapping,
            inputs.positions,
            self._rotary.cos,
            self._rotary.sin,
            eps=s.eps,
            scale=self.paged.key_scale,
        )
        return query


def _with_gates(order: Tensor | None, num_heads: int, head_dim: int, gate_dim: int) -> Tensor:
    """The order of rows, all queries and then all gates, where a weight has those of a head behind
    each other. order: of the rows of queries alone; None: as they are."""
    rows = torch.arange(num_heads * head_dim) if order is None else order
    width = head_dim + gate_dim
    gates = torch.arange(num_heads)[:, None] * width + torch.arange(head_dim, width)
    return torch.cat([rows // head_dim * width + rows % head_dim, gates.flatten()])


class Expansion(nn.Module):
    """The weights of keys and values by head, which multiply latents. They are stored as one
    weight, which may be quantized, but are multiplied dense. Implements `linear.Packable`."""

    weight: Tensor | None
    """[num_heads * (key_dim + value_dim), latent_dim]; None once it is packed."""

    def __init__(self, spec: LatentAttentionSpec, heads: Shard, context: ModelContext) -> None:
        """heads: those of this rank."""
        super().__init__()
        self._sizes = spec.key_dim, spec.value_dim
        self._num_heads, self._num_spare = heads.size, spec.rotary_dim
        self._latent_dim = spec.latent_dim
        self._rows, self._heads, self._context = heads.times(sum(self._sizes)), heads, context
        self.weight = context.empty_weight(self._rows.size, spec.latent_dim)
        self._name = ""
        self.products: tuple[HeadsProduct, ...] = ()
        """With the weights of keys, then of values; empty until they are packed. Adapters change
        both: the products with queries, and those with sums of latents, are linear, too."""

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the weight of the module with this name, or of the modules of keys,
        [num_heads, latent_dim, key_dim], and of values, [num_heads, value_dim, latent_dim]."""
        assert self.weight is not None
        assert not transposed
        self._name = names[0].replace(".k_b_proj", ".kv_b_proj")
        if len(names) == 1:
            yield WeightTarget(f"{names[0]}.weight", self.weight, shard=self._rows, keep=self._keep)
            return
        keys, values = self.weight.unflatten(0, (self._num_heads, -1)).split(self._sizes, dim=1)
        for name, part in zip(names, (keys.mT, values), strict=True):
            yield WeightTarget(f"{name}.weight", part, shard=self._heads)

    def _keep(self, part: QuantizedWeight) -> None:
        assert self.weight is not None
        self._context.dequantized["keys and values of latents"] += self.weight.nbytes
        self.weight.copy_(part.in_order().dequantize())

    def pack(self) -> None:
        """Pack the weights for this machine, unless they are packed already."""
        if self.weight is None:
            return
        weights = self.weight.unflatten(0, (self._num_heads, -1))
        keys, values = weights.split(self._sizes, dim=1)
        of_keys, of_values = zip(*map(self._parts_of, range(self._num_heads)), strict=True)
        self.products = (
            HeadsProduct(keys.mT, self._context, of_keys),
            HeadsProduct(values, self._context, of_values),
        )
        self.weight = None

    def _parts_of(self, head: int) -> tuple[tuple[str, LinearPart], tuple[str, LinearPart]]:
        """The parts of the checkpoint's weight that are a head's of keys, and of values."""
        (key_dim, value_dim), latent = self._sizes, Shard.full(self._latent_dim)
        first, total = self._rows.start + head * (key_dim + value_dim), self._rows.total
        rows, columns = slice(first, first + key_dim), slice(0, latent.size)
        keys = LinearPart([latent.size, total], rows, latent, None, columns, head, True)
        shard, outputs = Shard(first + key_dim, value_dim, total), slice(0, value_dim)
        values = LinearPart([total, latent.size], columns, shard, None, outputs, head)
        return (self._name, keys), (self._name, values)

    def absorb(self, query: Tensor) -> Tensor:
        """Multiply queries by the weights of keys. query: [num_tokens, num_heads, key_dim]. Returns
        [num_tokens, num_heads, latent_dim + rotary_dim], without the end of each head."""
        keys, _ = self.products
        return keys.apply(query, self._num_spare)

    def values(self, latents: Tensor) -> Tensor:
        """Multiply sums of latents by the weights of values. latents: [num_tokens, num_heads,
        latent_dim]. Returns [num_tokens, num_heads, value_dim]."""
        _, values = self.products
        return values.apply(latents)
