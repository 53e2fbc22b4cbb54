"""Attention over the paged cache."""

from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn

from worker_service.distributed.layout import Layout, Shard, consecutive
from worker_service.models.interface import ModelContext
from worker_service.models.kv_cache_spec import LayerKV
from worker_service.models.layers.norms import NormSpec, RMSNorm, norm_shards
from worker_service.models.layers.paged_attention import PagedAttention
from worker_service.models.layers.rotary import RotarySettings, halves_order
from worker_service.models.layers.vector import Vector
from worker_service.models.linear.linear import Linear, RowParallelLinear
from worker_service.models.native import LayerInputs, MixerPlace


class QKVStorage(Enum):
    """How a checkpoint stores the weights of queries, keys and values."""

    SEPARATE = auto()
    CONSECUTIVE = auto()
    """In one tensor, one after the other."""

    BY_GROUP = auto()
    """In one tensor: for each head of keys, the heads of queries that attend to it, then that of
    keys, then that of values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """Attention over the paged cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """The factor of attention scores."""

    value_dim: int | None = None
    """Elements of a head of values, if they are fewer than those of keys. The cache has as many of
    both; what follows those of values is not read."""

    value_scale: float = 1.0
    """The factor of values."""

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

    gate_is_separate: bool = False
    """Whether that weight is a tensor of its own, behind that of the queries, without a bias."""

    gates_heads: bool = False
    """Whether that weight has one row for each head, whose elements share a gate."""

    has_softplus_gates: bool = False
    """Whether the output is multiplied by softplus of that product instead of its sigmoid."""

    storage: QKVStorage = QKVStorage.SEPARATE
    has_pairs: bool = False
    """Whether the checkpoint's weights rotate neighbouring elements against each other, instead of
    those of the two halves: their rows are rearranged when they are loaded."""

    rotates_back: bool = False
    """Whether the checkpoint's weights rotate the two halves in the other direction: these change
    places when they are loaded."""

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


class Attention(nn.Module):
    """Attention of a layer; queries, keys and values are one product."""

    def __init__(self, spec: AttentionSpec, place: MixerPlace) -> None:
        super().__init__()
        context, rotary = place.context, place.rotary
        s, layout = spec, context.communicator.layout
        heads = layout.even_shard(s.num_heads, "attention heads")
        kv_heads = layout.kv_head_shard(s.num_kv_heads)
        self._writes = s.source is None
        num_written = kv_heads.size if self._writes else 0
        gate_dim = 1 if s.gates_heads else s.head_dim
        value_dim = s.value_dim or s.head_dim
        self._head_dim, self._num_heads, self._num_kv_heads = s.head_dim, heads.size, num_written
        self._sizes = [
            heads.size * s.head_dim,
            heads.size * gate_dim if s.gates_output else 0,
            num_written * s.head_dim,
            num_written * value_dim,
        ]
        self.qkv: nn.Module = _projection(s, heads, kv_heads, place)
        attended = heads.times(value_dim)
        self._value_scale = s.value_scale
        self._wide_values = self._narrow_values = self._wide_gates = None
        if value_dim < s.head_dim:
            assert not s.norms_values, "these have the size of keys"
            self._wide_values = _columns(kv_heads, value_dim, s.head_dim, context)
            self._narrow_values = _columns(heads, s.head_dim, value_dim, context)
        if s.gates_heads:
            self._wide_gates = _columns(heads, 1, value_dim, context)
        self.output = RowParallelLinear(attended, place.size, bias=s.output_bias, context=context)
        self.query_norm = self.key_norm = self._value_norm = None
        if s.head_norm is not None:
            assert s.head_norm.is_rms, "the kernels have no other norm of heads"
            self.query_norm = _head_norm(s, heads, place)
            if self._writes:
                self.key_norm = _head_norm(s, kv_heads, place)
        self._norm_spans_heads, self._communicator = s.norm_spans_heads, context.communicator
        if s.norms_values and self._writes:
            assert s.head_norm is not None, "it has the size of theirs"
            assert rotary is not None, "its kernel rotates, too"
            self._identity, eps = rotary.identity, s.head_norm.eps
            kernels = place.kernels.layers
            self._value_norm = RMSNorm(s.head_dim, eps, context, kernels, affine=False)
        self._unrotated: tuple[Tensor, Tensor] | None = None
        if s.norm_follows_rotary and s.head_norm is not None and rotary is not None:
            self._unrotated = rotary.identity
        self._rotary, self._kernels = rotary, place.kernels.layers
        self._has_softplus_gates = s.has_softplus_gates
        self.sinks = Vector(heads, context) if s.has_sinks else None
        self.paged = PagedAttention(
            place.kernels.attention_of(s.window),
            scale=s.scale,
            sliding_window=s.window,
            soft_cap=s.soft_cap,
            sinks=None if self.sinks is None else self.sinks.numbers,
            alibi_slopes=_slopes(s, heads, context),
        )

    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    _value_norm: RMSNorm | None
    _wide_values: Tensor | None
    _narrow_values: Tensor | None
    _wide_gates: Tensor | None

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x: [num_tokens, inputs]; returns [num_tokens, size]."""
        query, gate, key, value = self._project(x)
        query = self._write(query, key, value, inputs)
        attended = self.paged.attend(query, inputs.caches, inputs.metadata)
        attended = self._arranged(attended, self._narrow_values)
        if gate.shape[1]:
            gate = self._arranged(gate, self._wide_gates)
            kernels, has_softplus = self._kernels, self._has_softplus_gates
            multiply = kernels.multiply_softplus if has_softplus else kernels.multiply_sigmoid
            attended = multiply(attended, gate)
        return self.output(attended)

    def write_kv(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write the keys and values of rows to the layer's caches. Returns their queries."""
        query, _, key, value = self._project(x)
        return self._write(query, key, value, inputs)

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values, [num_tokens, num_heads, head_dim] each; behind the queries
        gates, [num_tokens, columns], of which there may be none."""
        query, gate, key, value = self.qkv(x).split_with_sizes(self._sizes, 1)
        if self._value_scale != 1.0:
            value = self._kernels.scale(value, self._value_scale)
        value, num_kv_heads = self._arranged(value, self._wide_values), self._num_kv_heads
        return (
            query.unflatten(1, (self._num_heads, self._head_dim)),
            gate,
            key.unflatten(1, (num_kv_heads, self._head_dim)),
            value.unflatten(1, (num_kv_heads, self._head_dim)),
        )

    def _arranged(self, x: Tensor, columns: Tensor | None) -> Tensor:
        """These columns of x; None: all."""
        return x if columns is None else self._kernels.take_columns(x, columns)

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


def _projection(spec: AttentionSpec, heads: Shard, kv_heads: Shard, place: MixerPlace) -> Linear:
    """The product of queries, with their gates, keys and values."""
    s, sources = spec, None
    queries, kv_rows = heads.times(s.head_dim), kv_heads.times(s.head_dim)
    outputs: list[Shard] = [queries, kv_rows, kv_heads.times(s.value_dim or s.head_dim)]
    orders: list[Tensor | None] = [_halves(s, heads), _halves(s, kv_heads), None]
    if s.source is not None:
        outputs, orders = outputs[:1], orders[:1]
    if s.storage is QKVStorage.CONSECUTIVE:
        outputs, sources = consecutive(outputs), [0] * 3
    elif s.storage is QKVStorage.BY_GROUP:
        outputs, orders = [kv_heads.times((s.group + 2) * s.head_dim)], [_by_kind(s, kv_heads)]
    if s.gates_output:
        assert s.storage is QKVStorage.SEPARATE
        assert not s.has_pairs
        if s.gate_is_separate:
            assert not s.qkv_bias
            gates = heads if s.gates_heads else queries
            outputs, orders = [queries, gates, *outputs[1:]], [orders[0], None, *orders[1:]]
        else:
            outputs[0], orders[0] = queries.times(2), _gates_order(heads.size, s.head_dim)
    return Linear(
        Shard.full(place.inputs),
        outputs,
        bias=s.qkv_bias,
        context=place.context,
        sources=sources,
        orders=orders,
    )


def _columns(heads: Shard, size: int, new_size: int, context: ModelContext) -> Tensor:
    """The columns that give heads of `size` elements `new_size`: the first ones, or more, which
    repeat them. int32 [num_heads * new_size]."""
    of_head = torch.arange(new_size, dtype=torch.int32, device=context.device) % size
    first = torch.arange(heads.size, dtype=torch.int32, device=context.device) * size
    return (first[:, None] + of_head).flatten()


def _head_norm(spec: AttentionSpec, heads: Shard, place: MixerPlace) -> RMSNorm:
    """The norm of each of these heads, or of all of them together."""
    norm = spec.head_norm
    assert norm is not None, "the caller has checked it"
    shard = heads.times(spec.head_dim) if spec.norm_spans_heads else Shard.full(spec.head_dim)
    return RMSNorm(
        shard.size,
        norm.eps,
        place.context,
        place.kernels.layers,
        norm.offset,
        affine=norm.affine,
        shard=shard,
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
    if spec.rotates_back:
        rows = torch.arange(heads.size * spec.head_dim).view(heads.size, 2, -1)
        return rows.flip(1).flatten()
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
