"""Decoders: layers of attention and a feed-forward part, composed from specifications.

A family of decoders is data, a `DecoderSettings`: which parts a layer has, where its norms are, how
it sees positions, and what its tensors are called. `decoder_families` has the families.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import accumulate, chain
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Layout, Shard, consecutive
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.models.altup import AltUp, AltUpSpec, Streams
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import KVCacheSpec, LayerKV, LayerState
from worker_service.models.layers import (
    ACTIVATIONS,
    LayerNorm,
    PagedAttention,
    RMSNorm,
    RotarySettings,
    RotaryTable,
    Vector,
    Xielu,
    halves_order,
    norm_shards,
    norm_targets,
)
from worker_service.models.linear import GatedLinear, Linear, RowParallelLinear
from worker_service.models.native import (
    LayerInputs,
    MixerPlace,
    ModelSettings,
    NativeLayer,
    NativeModel,
    part_targets,
)
from worker_service.models.per_layer import (
    LayerScalar,
    PerLayerEmbeddings,
    PerLayerGate,
    PerLayerSpec,
)

KV_SCALE_NAMES = r".*\.self_attn\.(?:[kv]_proj\.)?[kv]_scale"
"""Canonical names of the scales of keys and values in an fp8 cache, one number each."""

_NAMES = """
embed_tokens     wte word_embeddings embed_in embeddings
embed_positions  wpe
embedding_norm   word_embeddings_layernorm
layers           h blocks
norm             ln_f final_layer_norm norm_f final_layernorm final_norm
project_in
project_out
embed_tokens_per_layer
per_layer_model_projection
per_layer_projection_norm
altup_projections
altup_unembed_projections
"""
"""Names of the modules of a model, which are the canonical ones after `model.`, and of the same
modules in other families."""

_CANONICAL = {
    name: names[0] for names in map(str.split, _NAMES.strip().splitlines()) for name in names
}
_DENSE_MLP = re.compile(r"\.block_sparse_moe\.(?=(?:gate|up|down)_proj\.)")
"""The module of an MLP in place of experts, as transformers writes Kimi Linear."""

_MODULE = re.compile(r"(?:(?:model|transformer|gpt_neox|backbone)\.)?(?:decoder\.)?(\w+)(\..+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class NormSpec:
    """An RMS norm, or a layer norm."""

    eps: float
    is_rms: bool = True
    affine: bool = True
    """Whether there is a weight, and possibly a bias."""

    bias: bool = True
    """Whether a layer norm has a bias."""

    offset: float = 0.0
    """What is added to the weight."""

    def build(self, size: int, context: ModelContext, kernels: Kernels) -> RMSNorm | LayerNorm:
        """The norm of rows of this size."""
        if self.is_rms:
            return RMSNorm(size, self.eps, context, kernels.layers, self.offset, affine=self.affine)
        return LayerNorm(
            size, self.eps, context, kernels.layers, self.affine, self.bias, self.offset
        )


class QKVStorage(Enum):
    """How a checkpoint stores the weights of queries, keys and values."""

    SEPARATE = auto()
    CONSECUTIVE = auto()
    """In one tensor, one after the other."""

    BY_GROUP = auto()
    """In one tensor: for each head of keys, the heads of queries that attend to it, then that of
    keys, then that of values."""


class NormPlace(Enum):
    """Where the norms of a layer are."""

    BEFORE = auto()
    """Before each part, whose output is added to the residual stream."""

    AROUND = auto()
    """Before each part, and of its output."""

    AFTER = auto()
    """Of the output of each part alone."""

    AFTER_SUM = auto()
    """Of the sum of each part's output and the residual stream, which continues with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Attention over the paged cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """The factor of attention scores."""

    rotary: RotarySettings | None = None
    """None: queries and keys are not rotated."""

    window: int | None = None
    """Tokens that a token sees, itself included; None: all before it."""

    chunk: int | None = None
    """Tokens of a chunk, from a multiple of it to the next one, which see those before them in it
    alone; None: there are no chunks."""

    soft_cap: float | None = None
    """The limit that attention scores approach; None: there is none."""

    has_sinks: bool = False
    """Whether each head has a score that takes part in the softmax without a value."""

    alibi_slopes: tuple[float, ...] = ()
    """By head, what is subtracted from scores for each token between query and key; empty: nothing
    (Press et al. 2022)."""

    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: NormSpec | None = None
    """The RMS norm of each head of queries and keys, if there is one."""

    norm_spans_heads: bool = False
    """Whether `head_norm` is that of all heads of queries, and of keys, together."""

    norm_follows_rotary: bool = False
    """Whether `head_norm` is that of rotated heads."""

    norms_values: bool = False
    """Whether values have the norm of heads, too, without a weight."""

    source: int | None = None
    """The layer whose keys and values are attended to; None: the layer has its own."""

    gates_output: bool = False
    """Whether the output is multiplied by the sigmoid of a product of the row, whose weight follows
    that of the queries, head by head. The storage is then separate."""

    storage: QKVStorage = QKVStorage.SEPARATE
    has_pairs: bool = False
    """Whether the checkpoint's weights rotate neighbouring elements against each other, instead of
    those of the two halves: their rows are rearranged when they are loaded."""

    @property
    def group(self) -> int:
        """Heads of queries that attend to one of keys."""
        return self.num_heads // self.num_kv_heads

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerKV, ...]:
        """See `MixerSpec`."""
        if self.source is not None:
            return ()
        layout = context.communicator.layout
        window, chunk = (
            span if span is not None and span < max_model_len else None
            for span in (self.window, self.chunk)
        )
        kv = LayerKV(
            num_kv_heads=layout.kv_head_shard(self.num_kv_heads).size,
            head_dim=self.head_dim,
            window=window,
            chunk=chunk,
        )
        return (kv,)

    def build(self, place: MixerPlace) -> "Attention":
        """See `MixerSpec`."""
        return Attention(self, place)

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the heads."""
        layout.even_shard(self.num_heads, "attention heads")
        layout.kv_head_shard(self.num_kv_heads)


class Mixer(Protocol):
    """The module that a `MixerSpec` builds."""

    def __call__(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""


@runtime_checkable
class PagedMixer(Mixer, Protocol):
    """Attention over the paged cache."""

    paged: PagedAttention

    def write_kv(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write what rows leave in the layer's caches. Returns their queries."""


class MixerSpec(Protocol):
    """How the tokens of a sequence affect each other in a layer: attention, of keys and values or
    of latents, or a part that keeps a state, such as a convolution."""

    @property
    def rotary(self) -> RotarySettings | None:
        """Of the table that `build` expects; None: there is none."""

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the part."""

    def kept(self, context: ModelContext, max_model_len: int) -> tuple[LayerKV | LayerState, ...]:
        """What a rank keeps of a sequence: keys and values, a state, or both."""

    def build(self, place: MixerPlace) -> Mixer:
        """The part, a `nn.Module`. `LayerSpec.names` lists its attributes that have tensors."""


class FeedForwardSpec(Protocol):
    """What follows attention in a layer."""

    @property
    def activation(self) -> str | None:
        """The activation's name in `config.json`; None for one whose parameters are learned."""

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the part."""

    def build(self, size: int, context: ModelContext, kernels: Kernels) -> nn.Module:
        """The part: a module that maps rows, [num_tokens, size], to rows of this shape, the same on
        every rank. `LayerSpec.names` lists its attributes that have tensors: linear layers, norms,
        or others that are `native.HasTargets`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPSpec:
    """A multilayer perceptron: two linear layers around an activation, the first of which may be
    multiplied by the activation of a third, the gate. Implements `FeedForwardSpec`."""

    inner_size: int
    activation: str | None
    """None: xIELU, which has no gate."""

    is_gated: bool = True
    bias: bool = False
    is_fused: bool = False
    """Whether one tensor has the rows of the gate, then those of the layer that it multiplies."""

    gate_scale: float = 1.0
    """The factor of a gate before its activation."""

    gate_deviations: float | None = None
    """Standard deviations from its mean beyond which a gate's numbers count, from there on; None:
    all count."""

    output_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.activation is None and self.is_gated:
            raise UnsupportedModel("config.json: expected the name of an activation, got none")

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the columns."""
        layout.even_shard(self.inner_size, "columns of the MLP")

    def build(self, size: int, context: ModelContext, kernels: Kernels) -> "MLP":
        """The MLP of rows of this size."""
        return MLP(self, size, context, kernels)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """A layer: two parts, or one of them."""

    attention: MixerSpec | None
    """Attention, or another part in its place."""

    feed_forward: FeedForwardSpec | None
    norm: NormSpec
    names: Mapping[str, str]
    """Names of the checkpoint's tensors within the layer, by the path of attributes from
    `DecoderLayer`; see `native.part_targets`."""

    norm_place: NormPlace = NormPlace.BEFORE
    norms_feed_forward: bool = True
    """Whether the feed-forward part gets the norm of the residual stream, not the stream itself."""

    is_parallel: bool = False
    """Whether the feed-forward part has the input of attention, not its output. It shares the norm
    of attention if `names` has none of its own."""

    residual_multiplier: float = 1.0
    """The factor of what is added to the residual stream."""

    per_layer: PerLayerSpec | None = None
    """The embedding that the layer has of its own, if it has one."""

    has_scalar: bool = False
    """Whether the residual stream is multiplied by a number behind the layer."""

    altup: AltUpSpec | None = None
    """The streams of which the residual stream consists, if there are several. The layer has norms
    around both parts, and an embedding of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftHeadSpec:
    """A head that drafts tokens for a decoder; see `draft_head.py`."""

    layer: LayerSpec
    layer_name: str
    """Canonical name of the layer."""

    names: Mapping[str, str]
    """Canonical names by attributes of `DraftHead`: `hidden_norm`, `norm` before the LM head, and
    those that there are of `fusion` (of captured hidden states), `embedding_norm` (otherwise that
    before the layer's attention) and `projection` (of embedding and hidden state to the layer's
    input; otherwise its attention reads both)."""

    tensor_names: str
    """A pattern of the canonical names of all its tensors."""

    embedding_name: str
    head_name: str
    """Canonical names of the weights of its own embedding and LM head, if it has them."""

    norms_residual: bool = False
    """Without a projection: whether the residual stream starts with the normalized hidden state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSettings(ModelSettings):
    """Shape of a decoder."""

    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    embedding_norm: NormSpec | None = None
    embedding_scale: float = 1.0
    """The factor of embeddings, which is rounded to their dtype."""

    scales_virtual_tokens: bool | None = False
    """Whether it applies to embeddings that stand in place of those of tokens, too; None: there can
    be none."""

    logits_scale: float = 1.0
    logits_soft_cap: float | None = None
    """The limit that logits approach; None: there is none."""

    position_offset: int | None = None
    """The row of the table of learned positions for position 0; None: there is no table."""

    norm_name: str = "model.norm"
    """Canonical name of the norm after the last layer."""

    draft_head: DraftHeadSpec | None = None
    """The head in the model's own checkpoint that drafts tokens, if one is read."""

    ignores_further_layers: bool = False
    """Whether checkpoints may hold layers after the last one, which predict further tokens, and
    which the model itself does not use."""

    is_transposed: bool = False
    """Whether the checkpoint stores the weights of layers as [in_features, out_features]."""

    per_layer: PerLayerSpec | None = None
    """The embeddings that layers have of their own, if they have some."""

    altup: AltUpSpec | None = None
    """See `LayerSpec`."""

    @property
    def activations(self) -> set[str]:
        parts = [layer.feed_forward for layer in self.layers if layer.feed_forward is not None]
        return {part.activation for part in parts if part.activation is not None}

    @property
    def sources(self) -> list[int | None]:
        """Of each layer, the layer whose keys and values it attends to; None: its own, if any."""
        mixers = (layer.attention for layer in self.layers)
        return [part.source if isinstance(part, AttentionSpec) else None for part in mixers]

    def require_shards(self, layout: Layout) -> None:
        ModelSettings.require_shards(self, layout)
        self._require_stages(layout)
        for layer in self.layers:
            for part in (layer.attention, layer.feed_forward):
                if part is not None:
                    part.require_shards(layout)

    def _require_stages(self, layout: Layout) -> None:
        """Raise InvalidOption if layers need what another stage has."""
        num_stages = layout.pipeline_parallel_size
        first_layer = layout.layer_range(self.num_layers).start
        for layer in layout.layer_range(self.num_layers):
            source = self.sources[layer]
            if source is not None and source < first_layer:
                raise InvalidOption(
                    f"pipeline_parallel_size: layer {layer} attends to keys and values of layer"
                    f" {source}, which {num_stages} stages separate"
                )


class Attention(nn.Module):
    """Attention of a layer; queries, keys and values are one product."""

    def __init__(self, spec: AttentionSpec, place: MixerPlace) -> None:
        super().__init__()
        context, kernels, rotary = place.context, place.kernels, place.rotary
        s, layout = spec, context.communicator.layout
        heads = layout.even_shard(s.num_heads, "attention heads")
        kv_heads = layout.kv_head_shard(s.num_kv_heads)
        attended, kv_rows = heads.times(s.head_dim), kv_heads.times(s.head_dim)
        outputs: list[Shard] = [attended, kv_rows, kv_rows]
        sources: list[int] | None = None
        orders: list[Tensor | None] = [_halves(s, heads), _halves(s, kv_heads), None]
        if s.source is not None:
            outputs, orders = outputs[:1], orders[:1]
        if s.storage is QKVStorage.CONSECUTIVE:
            outputs, sources = consecutive(outputs), [0] * 3
        elif s.storage is QKVStorage.BY_GROUP:
            outputs, orders = [kv_heads.times((s.group + 2) * s.head_dim)], [_by_kind(s, kv_heads)]
        num_gates = heads.size if s.gates_output else 0
        if s.gates_output:
            assert s.storage is QKVStorage.SEPARATE
            assert not s.has_pairs
            outputs[0], orders[0] = attended.times(2), _gates_order(heads.size, s.head_dim)
        self.qkv = Linear(
            Shard.full(place.inputs),
            outputs,
            bias=s.qkv_bias,
            context=context,
            sources=sources,
            orders=orders,
        )
        self.output = RowParallelLinear(attended, place.size, bias=s.output_bias, context=context)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if s.head_norm is not None:
            norm = s.head_norm
            assert norm.is_rms, "the kernels have no other norm of heads"
            one_head = Shard.full(s.head_dim)
            self.query_norm, self.key_norm = (
                RMSNorm(
                    shard.size,
                    norm.eps,
                    context,
                    kernels.layers,
                    norm.offset,
                    affine=norm.affine,
                    shard=shard,
                )
                for shard in ((attended, kv_rows) if s.norm_spans_heads else (one_head, one_head))
            )
        self.sinks = Vector(heads, context) if s.has_sinks else None
        self._norm_spans_heads, self._communicator = s.norm_spans_heads, context.communicator
        self.paged = PagedAttention(
            kernels.attention_of(s.window),
            scale=s.scale,
            sliding_window=s.window,
            soft_cap=s.soft_cap,
            sinks=None if self.sinks is None else self.sinks.numbers,
            alibi_slopes=_slopes(s, heads, context),
        )
        self._head_dim = s.head_dim
        num_written = 0 if s.source is not None else kv_heads.size
        self._num_heads = [heads.size, num_gates, num_written, num_written]
        self._writes = s.source is None
        self._value_norm: RMSNorm | None = None
        if s.norms_values and self._writes:
            assert s.head_norm is not None, "it has the size of theirs"
            assert rotary is not None, "its kernel rotates, too"
            self._identity = rotary.identity
            eps = s.head_norm.eps
            self._value_norm = RMSNorm(s.head_dim, eps, context, kernels.layers, affine=False)
        if not self._writes:
            self.key_norm = None
        self._rotary, self._kernels = rotary, kernels.layers
        self._unrotated: tuple[Tensor, Tensor] | None = None
        if s.norm_follows_rotary and s.head_norm is not None and rotary is not None:
            self._unrotated = rotary.identity

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        query, gate, key, value = self._project(x)
        query = self._write(query, key, value, inputs)
        attended = self.paged.attend(query, inputs.caches, inputs.metadata)
        if gate.shape[1]:
            attended = self._kernels.multiply_sigmoid(attended, gate.flatten(1))
        return self.output(attended)

    def write_kv(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write the keys and values of rows to the layer's caches. Returns their queries."""
        query, _, key, value = self._project(x)
        return self._write(query, key, value, inputs)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, gates, of which there may be none, keys and values, [num_tokens, num_heads,
        head_dim] each."""
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        return heads.split_with_sizes(self._num_heads, 1)

    def _write(self, query: Tensor, key: Tensor, value: Tensor, inputs: LayerInputs) -> Tensor:
        """Write keys and values, if there are any. Returns the queries, normed and rotated."""
        query_norm, key_norm = self.query_norm, self.key_norm
        if not self._writes:
            assert self._rotary is not None
            self._rotate_heads(query, inputs, (self._rotary.cos, self._rotary.sin), query_norm)
            return query
        if self._value_norm is not None:
            self._rotate_heads(value, inputs, self._identity, self._value_norm)
        if self._norm_spans_heads and query_norm is not None and key_norm is not None:
            rows, norms = (query.flatten(1), key.flatten(1)), (query_norm, key_norm)
            if self._communicator.layout.tensor_parallel_size > 1:
                normed = norm_shards(rows, norms, self._communicator)
            else:
                normed = [norm(part) for norm, part in zip(norms, rows, strict=True)]
            query, key = normed[0].view_as(query), normed[1].view_as(key)
            query_norm = key_norm = None
        if self._rotary is None:
            self.paged.write(key, value, inputs.caches, inputs.metadata)
            return query
        table, rotated = self._rotary, query
        cos, sin = table.cos, table.sin
        if self._unrotated is not None:
            # The kernel below applies norms before RoPE, which then rotates nothing.
            self._kernels.rotate(query, key, inputs.positions, cos, sin)
            cos, sin = self._unrotated
        elif table.scales_queries:
            rotated = query[:, :0]  # only keys remain to be rotated
            self._kernels.rotate(query, rotated, inputs.positions, table.query_cos, table.query_sin)
        self._kernels.rotate_and_write_kv(
            rotated,
            key,
            value,
            *inputs.caches,
            inputs.metadata.slot_mapping,
            inputs.positions,
            cos,
            sin,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            eps=1e-6 if query_norm is None else query_norm.eps,
            key_scale=self.paged.key_scale,
            value_scale=self.paged.value_scale,
        )
        return query

    def _rotate_heads(
        self,
        heads: Tensor,
        inputs: LayerInputs,
        table: tuple[Tensor, Tensor],
        norm: RMSNorm | None,
    ) -> None:
        """Apply a norm, if there is one, and RoPE to heads in place."""
        self._kernels.rotate(
            heads,
            heads[:, :0],
            inputs.positions,
            *table,
            query_norm=None if norm is None else norm.weight,
            eps=1e-6 if norm is None else norm.eps,
        )


def _slopes(spec: AttentionSpec, heads: Shard, context: ModelContext) -> Tensor | None:
    """The ALiBi slopes of these heads: float32 [num_heads]."""
    if not spec.alibi_slopes:
        return None
    slopes = spec.alibi_slopes[heads.start : heads.start + heads.size]
    return torch.tensor(slopes, dtype=torch.float32, device=context.device)


def _halves(spec: AttentionSpec, heads: Shard) -> Tensor | None:
    """The order of the rows of these heads in which the elements that are rotated against each
    other are those of two halves; None if they are so already."""
    if not spec.has_pairs or spec.rotary is None:
        return None
    return halves_order(heads.size, spec.head_dim, 0, spec.rotary.rotary_dim)


def _gates_order(num_heads: int, head_dim: int) -> Tensor:
    """The order of rows that are stored as those of a head, then those of its gate: all heads, then
    all gates."""
    return torch.arange(2 * num_heads * head_dim).view(num_heads, 2, -1).transpose(0, 1).flatten()


def _by_kind(spec: AttentionSpec, kv_heads: Shard) -> Tensor:
    """The order of rows that are stored by group: queries, then keys, then values."""
    shape = kv_heads.size, spec.group + 2, spec.head_dim
    rows = torch.arange(kv_heads.size * shape[1] * shape[2]).view(shape)
    return torch.cat([part.flatten() for part in rows.split([spec.group, 1, 1], dim=1)])


class MLP(nn.Module):
    """See `MLPSpec`."""

    def __init__(self, spec: MLPSpec, size: int, context: ModelContext, kernels: Kernels) -> None:
        super().__init__()
        s, layout = spec, context.communicator.layout
        inner = layout.even_shard(s.inner_size, "columns of the MLP")
        activation = None if s.activation is None else ACTIVATIONS[s.activation]
        self._activation, self._kernels = activation, kernels.layers
        self._is_gated, self._inner_size = s.is_gated, inner.size
        self._gate_scale, self._output_scale = s.gate_scale, s.output_scale
        self._gate_deviations, self._communicator = s.gate_deviations, context.communicator
        self.xielu = Xielu(context, kernels.layers) if activation is None else None
        if s.is_gated:
            assert activation is not None, "xIELU has no gate"
            outputs = consecutive([inner] * 2) if s.is_fused else [inner] * 2
            sources = [0] * 2 if s.is_fused else None
            if s.gate_scale == 1.0 and s.gate_deviations is None:
                self.up: Linear = GatedLinear(
                    size,
                    outputs,
                    activation,
                    kernels.layers,
                    bias=s.bias,
                    context=context,
                    sources=sources,
                )
            else:
                rows = Shard.full(size)
                self.up = Linear(rows, outputs, bias=s.bias, context=context, sources=sources)
        else:
            self.up = Linear(Shard.full(size), [inner], bias=s.bias, context=context)
        self.down = RowParallelLinear(inner, size, bias=s.bias, context=context)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, size]; returns the same shape."""
        x = self.up(x)
        if self.xielu is not None:
            x = self.xielu(x)
        elif self._activation is not None and not self._is_gated:
            x = self._kernels.activate(x, self._activation)
        elif self._activation is not None and not isinstance(self.up, GatedLinear):
            gate = x[:, : self._inner_size]
            if self._gate_scale != 1.0:
                self._kernels.scale(gate, self._gate_scale)
            if self._gate_deviations is not None:
                self._sparsify(gate, self._gate_deviations)
            x = self._kernels.act_and_mul(x, self._activation)
        y: Tensor = self.down(x)
        return y if self._output_scale == 1.0 else self._kernels.scale(y, self._output_scale)

    def _sparsify(self, gate: Tensor, num_deviations: float) -> None:
        """See `reference.sparsify`; mean and deviation are those of the columns of all ranks."""
        num_ranks = self._communicator.layout.tensor_parallel_size
        if num_ranks == 1:
            self._kernels.sparsify(gate, num_deviations)
            return
        wide = gate.float()
        mean = self._communicator.sum(wide.mean(1, keepdim=True)) / num_ranks
        squares = (wide - mean).square().mean(1, keepdim=True)
        deviation = (self._communicator.sum(squares) / num_ranks).sqrt()
        gate.copy_((wide - (mean + deviation * num_deviations)).clamp_(min=0))


class DecoderLayer(NativeLayer):
    """Attention, and what follows it, with their norms."""

    def __init__(
        self,
        spec: LayerSpec,
        size: int,
        context: ModelContext,
        kernels: Kernels,
        rotary: RotaryTable | None,
        *,
        attention_inputs: int | None = None,
        is_transposed: bool = False,
    ) -> None:
        """size: of the hidden states; rotary: the table of `spec.attention.rotary`;
        attention_inputs: width of the inputs of attention, None for the size; is_transposed: see
        `DecoderSettings`."""
        super().__init__()

        place, (mixer, feed_forward) = spec.norm_place, (spec.attention, spec.feed_forward)
        has_norms = {
            "attention_norm": place is not NormPlace.AFTER and mixer is not None,
            "feed_forward_norm": place is not NormPlace.AFTER
            and feed_forward is not None
            and spec.norms_feed_forward
            and not (spec.is_parallel and "feed_forward_norm" not in spec.names),
            "attention_output_norm": place in (NormPlace.AROUND, NormPlace.AFTER),
            "feed_forward_output_norm": place in (NormPlace.AROUND, NormPlace.AFTER),
        }
        for name, has_norm in has_norms.items():
            setattr(self, name, spec.norm.build(size, context, kernels) if has_norm else None)
        self.attention: Mixer | None = None
        if mixer is not None:
            inputs = attention_inputs or size
            self.attention = mixer.build(MixerPlace(inputs, size, context, kernels, rotary))
        self.feed_forward: nn.Module | None = None
        if feed_forward is not None:
            self.feed_forward = feed_forward.build(size, context, kernels)
        self.per_layer: PerLayerGate | None = None
        if spec.per_layer is not None:
            self.per_layer = PerLayerGate(spec.per_layer, size, context, kernels.layers)
        self.scalar = LayerScalar(context, kernels.layers) if spec.has_scalar else None
        self.altup: AltUp | None = None
        if spec.altup is not None:
            self.altup = AltUp(spec.altup, size, context, kernels.layers)
        self._spec, self._kernels = spec, kernels.layers
        self._is_transposed = is_transposed
        self.num_kept = 0 if mixer is None else len(mixer.kept(context, 1))

    attention_norm: RMSNorm | LayerNorm | None
    feed_forward_norm: RMSNorm | LayerNorm | None
    attention_output_norm: RMSNorm | LayerNorm | None
    feed_forward_output_norm: RMSNorm | LayerNorm | None

    def forward(
        self, residual: Tensor, x: Tensor | None, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        if self.altup is not None:
            return self._alternate(self.altup, residual, inputs), None
        if self.attention is None or self.feed_forward is None:
            return residual, self._part(residual, x, inputs)
        if self._spec.norm_place is NormPlace.AFTER_SUM:
            assert x is None, "a norm of the sum leaves nothing to be added"
            residual = self._normed(self.attention_norm, residual, self.attention(residual, inputs))
            x = self.feed_forward(residual)
            return self._normed(self.feed_forward_norm, residual, x), None
        x = self._normed(self.attention_norm, residual, x)
        if not self._spec.is_parallel:
            return self._finish(residual, self.attend_and_mix(x, residual, inputs), inputs)
        mixed = x if self.feed_forward_norm is None else self.feed_forward_norm(residual)
        attended = self.attention(x, inputs)
        return residual, self._kernels.add(attended, self.feed_forward(mixed))

    def _alternate(self, altup: AltUp, streams: Tensor, inputs: LayerInputs) -> Tensor:
        """The streams after the layer: [num_tokens, num_streams * size]."""
        assert self.attention is not None, "the layer has both parts"
        assert self.feed_forward is not None, "as above"
        assert self.per_layer is not None, "it has an embedding"
        assert inputs.embedding is not None, "as above"
        streams = altup.predict(streams)
        active = altup.active_of(streams)
        normed = self._normed(self.attention_norm, active, None)
        attended = self._output(self.attention(normed, inputs), self.attention_output_norm)
        joined = altup.join(attended, active, normed)
        x = self.feed_forward(self._normed(self.feed_forward_norm, joined, None))
        x = self._kernels.add(joined, self._output(x, self.feed_forward_output_norm))
        gating = altup.correct(streams, x)
        altup.add_to_others(streams, self.per_layer(gating, inputs.embedding))
        return streams

    def _finish(
        self, residual: Tensor, x: Tensor, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        """What follows both parts in a layer with an embedding of its own, or a factor."""
        if self.per_layer is not None:
            assert inputs.embedding is not None
            residual = self._kernels.add(residual, x)
            x = self.per_layer(residual, inputs.embedding)
        if self.scalar is None:
            return residual, x
        return self.scalar(self._kernels.add(residual, x)), None

    def _part(self, residual: Tensor, x: Tensor | None, inputs: LayerInputs) -> Tensor:
        """What the only part of the layer adds to the residual stream."""
        if self.attention is not None:
            normed = self._normed(self.attention_norm, residual, x)
            return self._output(self.attention(normed, inputs), self.attention_output_norm)
        assert self.feed_forward is not None, "a layer has a part"
        normed = self._normed(self.feed_forward_norm, residual, x)
        return self._output(self.feed_forward(normed), self.feed_forward_output_norm)

    def attend_and_mix(self, x: Tensor, residual: Tensor, inputs: LayerInputs) -> Tensor:
        """Add the attention output for `x`, which is normed, to `residual`, then return the output
        of the feed-forward part."""
        assert self.attention is not None, "the layer has both parts"
        assert self.feed_forward is not None, "as above"
        x = self._output(self.attention(x, inputs), self.attention_output_norm)
        x = self.feed_forward(self._normed(self.feed_forward_norm, residual, x))
        return self._output(x, self.feed_forward_output_norm)

    def _normed(
        self, norm: RMSNorm | LayerNorm | None, residual: Tensor, x: Tensor | None
    ) -> Tensor:
        """Add x, if given, to the residual stream in place. Returns the norm of the sum, or the sum
        itself without a norm."""
        if norm is not None:
            normed: Tensor = norm(residual, x)
            return normed
        return residual if x is None else self._kernels.add(residual, x)

    def _output(self, x: Tensor, norm: RMSNorm | LayerNorm | None) -> Tensor:
        """What is added to the residual stream for the output of a part."""
        x = x if norm is None else norm(x)
        multiplier = self._spec.residual_multiplier
        return x if multiplier == 1.0 else self._kernels.scale(x, multiplier)

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        return part_targets(self, self._spec.names, f"{name}.", transposed=self._is_transposed)


class RotaryTables:
    """The tables of cosines and sines of a model, one for layers of equal settings."""

    def __init__(self, num_positions: int, context: ModelContext) -> None:
        self._num_positions, self._context = num_positions, context
        self._found: list[tuple[RotarySettings, RotaryTable]] = []

    def table(self, settings: RotarySettings | None) -> RotaryTable | None:
        """The table of these settings; None without any."""
        if settings is None:
            return None
        for known, table in self._found:
            if known == settings:
                return table
        dtype, device = self._context.dtype, self._context.device
        table = RotaryTable(settings, self._num_positions, dtype, device)
        self._found.append((settings, table))
        return table


class DecoderModel(NativeModel):
    """A decoder of any family."""

    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        rf"lm_head\.weight|.*rotary_emb\.inv_freq|.*\.(attn|attention)\.(masked_)?bias|{KV_SCALE_NAMES}"
    )
    """Among them causal masks, which old checkpoints hold."""

    embedding_name = "model.embed_tokens.weight"
    layers_name = "model.layers"

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Llama's name, whether or not the checkpoint has an LM head, whose names have a prefix."""
        match = _MODULE.fullmatch(name := _DENSE_MLP.sub(".mlp.", name))
        if match is not None and match[1] == "embed_out":
            return f"lm_head{match[2]}"
        if match is None or match[1] not in _CANONICAL:
            return name
        return f"model.{_CANONICAL[match[1]]}{match[2]}"

    def __init__(
        self,
        settings: DecoderSettings,
        max_model_len: int,
        context: ModelContext,
        kernels: Kernels,
    ) -> None:
        super().__init__(settings, max_model_len, context, kernels)
        s, layout = settings, context.communicator.layout
        self.norm_name = s.norm_name
        self._embedding_scale = torch.tensor(s.embedding_scale, dtype=context.dtype).item()
        has_none = s.per_layer is not None or s.scales_virtual_tokens is None
        self.virtual_token_size = None if has_none else s.embedding_size
        self.virtual_token_scale = self._embedding_scale if s.scales_virtual_tokens else 1.0
        self._logits_scale = s.logits_scale
        self._logits_soft_cap = s.logits_soft_cap
        self._position_offset = s.position_offset or 0
        self._sources = s.sources
        unused = [r"mtp\..*"]
        shared = "|".join(str(i) for i, source in enumerate(s.sources) if source is not None)
        if shared:  # checkpoints may hold what transformers would not use
            unused.append(rf"model\.layers\.(?:{shared})\.self_attn\.[kv]_(?:proj|norm)\..*")
        if s.ignores_further_layers:
            ours = "|".join(map(str, range(s.num_layers)))
            unused.append(rf"model\.layers\.(?!(?:{ours})\.)\d+\..*")
        self.unused_names = re.compile("|".join(unused))
        if s.draft_head is not None:
            self.head_names = re.compile(s.draft_head.tensor_names)
        self.position_embedding: Tensor | None = None
        self.embedding_norm: RMSNorm | LayerNorm | None = None
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        projects = s.embedding_size != s.hidden_size
        size, inner = Shard.full(s.embedding_size), Shard.full(s.hidden_size)
        if layout.is_first_stage:
            if s.position_offset is not None:
                num_positions = s.max_model_len + s.position_offset
                self.position_embedding = context.empty(num_positions, s.hidden_size)
            if s.embedding_norm is not None:
                self.embedding_norm = s.embedding_norm.build(s.hidden_size, context, kernels)
            if projects:
                self.project_in = Linear(size, [inner], bias=False, context=context)
        tables = RotaryTables(max_model_len, context)
        for layer in (s.layers[i] for i in self._layer_range):
            mixer = layer.attention
            rotary = None if mixer is None else tables.table(mixer.rotary)
            self.layers.append(
                DecoderLayer(
                    layer, s.hidden_size, context, kernels, rotary, is_transposed=s.is_transposed
                )
            )
        self.streams: Streams | None = None
        width = s.hidden_size
        if s.altup is not None:
            self.streams = Streams(s.altup, s.hidden_size, context, kernels.layers)
            width *= s.altup.num_streams
        self.per_layer: PerLayerEmbeddings | None = None
        self._per_layer_size = 0 if s.per_layer is None else s.per_layer.size
        self._embeddings: Tensor | None = None
        """[num_tokens, num_layers * size], those of this stage's layers and later ones."""
        following = s.num_layers - self._layer_range.start
        self._received_width = width + following * self._per_layer_size
        self._received_like = context.empty(self._received_width)
        if s.per_layer is not None and layout.is_first_stage:
            mixers = (layer.attention for layer in s.layers if layer.attention is not None)
            table = tables.table(next(mixers).rotary)
            assert table is not None
            self.per_layer = PerLayerEmbeddings(
                s.per_layer, s.num_layers, s.hidden_size, table, context, kernels.layers
            )
        if layout.is_last_stage:
            if s.final_norm is not None:
                self.norm = s.final_norm.build(s.hidden_size, context, kernels)
            if projects:
                self.project_out = Linear(inner, [size], bias=False, context=context)

    def _cache_spec(
        self, settings: ModelSettings, max_model_len: int, context: ModelContext
    ) -> KVCacheSpec:
        assert isinstance(settings, DecoderSettings)
        mixers = [layer.attention for layer in settings.layers]
        kept = [() if part is None else part.kept(context, max_model_len) for part in mixers]
        ends = [0, *accumulate(map(len, kept))]  # before each layer, and at the end
        return KVCacheSpec(
            layers=tuple(chain.from_iterable(kept)),
            dtype=context.kv_dtype,
            stage=range(ends[self._layer_range.start], ends[self._layer_range.stop]),
        )

    def embed(self, batch: StepBatch) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(batch.token_ids)
        if self._embedding_scale != 1.0:
            x = self._kernels.layers.scale(x, self._embedding_scale)
        if batch.has_virtual_tokens and self.adapters is not None:
            x = self.adapters.put_prompts(x, batch)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.position_embedding is not None:
            positions = self.position_embedding[self._position_offset :]
            x = self._kernels.layers.embed(positions, batch.positions, x)
        return x if self.embedding_norm is None else self.embedding_norm(x)

    def layer_inputs(self, batch: StepBatch) -> Iterator[LayerInputs]:
        found = list(super().layer_inputs(batch))
        start = self._layer_range.start
        for i, inputs in zip(self._layer_range, found, strict=True):
            source = self._sources[i]
            inputs = inputs if source is None else found[source - start]
            if self._embeddings is not None:
                size = self._per_layer_size
                first = (i - start) * size
                inputs = inputs._replace(embedding=self._embeddings[:, first : first + size])
            yield inputs

    def run_layers(self, residual: Tensor, batch: StepBatch) -> Tensor:
        layout, size = self.communicator.layout, self._per_layer_size
        following = (self.num_layers - self._layer_range.start) * size
        if self.per_layer is not None:
            self._embeddings = self.per_layer(batch.token_ids, residual, batch.positions)
        elif size:
            residual, self._embeddings = residual.tensor_split([-following], dim=1)
        if self.streams is not None and layout.is_first_stage:
            residual = self.streams.expand(residual)
        x = super().run_layers(residual, batch)
        embeddings, self._embeddings = self._embeddings, None
        if embeddings is not None and not layout.is_last_stage:
            x = torch.cat([x, embeddings[:, len(self._layer_range) * size :]], dim=1)
        return x if self.project_out is None else self.project_out(x)

    def finish(self, residual: Tensor, x: Tensor | None) -> Tensor:
        if self.streams is None or self.norm is None:
            return super().finish(residual, x)
        normed: Tensor = self.norm(self.streams.reduce(residual))
        return normed

    def capture(self, layers: Sequence[int]) -> None:
        if self.streams is not None:
            raise InvalidOption(
                f"speculative: expected no head for {self.architecture}, whose residual stream"
                " consists of several"
            )
        super().capture(layers)

    def _apply_head(self, hidden_states: Tensor) -> Tensor:
        logits = super()._apply_head(hidden_states)
        if not self.communicator.layout.samples:
            return logits
        kernels, cap = self._kernels.layers, self._logits_soft_cap
        if self._logits_scale != 1.0:
            logits = kernels.scale(logits, self._logits_scale)
        return logits if cap is None else kernels.soft_cap(logits, cap)

    def weight_targets(self) -> Iterator[WeightTarget]:
        yield from super().weight_targets()
        if self.per_layer is not None:
            yield from self.per_layer.weight_targets()
        if self.streams is not None:
            yield from self.streams.weight_targets()
        if self.position_embedding is not None:
            yield WeightTarget("model.embed_positions.weight", self.position_embedding)
        if self.embedding_norm is not None:
            yield from norm_targets("model.embedding_norm", self.embedding_norm)
        for name in ("project_in", "project_out"):
            if (linear := getattr(self, name)) is not None:
                yield from linear.targets(f"model.{name}")

    def kv_scale_holders(self) -> Iterator[tuple[str, PagedAttention]]:
        for name, layer in self.named_layers():
            assert isinstance(layer, DecoderLayer)
            source = self._sources[int(name.rpartition(".")[2])]
            holder = name if source is None else f"{self.layers_name}.{source}"
            if isinstance(layer.attention, PagedMixer):
                yield f"{holder}.self_attn", layer.attention.paged
