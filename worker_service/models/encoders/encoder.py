"""Text encoders: every token attends to all tokens of its text, without a cache.

A family of encoders is data, an `EncoderSettings`: which parts a layer has, where its norms are,
how it sees positions, and what its tensors are called. `families.py` has the families.
"""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Layout, Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.models.layers.activations import ACTIVATIONS
from worker_service.models.layers.norms import LayerNorm, norm_targets
from worker_service.models.layers.rotary import RotarySettings, RotaryTable
from worker_service.models.linear.linear import (
    ActivatedLinear,
    GatedLinear,
    Linear,
    RowParallelLinear,
)
from worker_service.models.native import (
    LayerInputs,
    ModelSettings,
    NativeLayer,
    NativeModel,
    part_targets,
)
from worker_service.models.pooling import Dense, head_context
from worker_service.plan import PoolingHead, PoolingType
from worker_service.pooling_facts import PoolingFacts

NUM_BUCKETS = 32
"""Of distances between tokens, with a bias each, which MPNet adds to attention scores."""

_MAX_DISTANCE = 128

_NAMES = """
embeddings.word_embeddings        embeddings.tok_embeddings
embeddings.LayerNorm              embeddings.norm emb_ln
attention.self.query              attention.attn.q attention.q_lin
attention.self.key                attention.attn.k attention.k_lin
attention.self.value              attention.attn.v attention.v_lin
attention.output.dense            attention.attn.o attention.out_lin attn.Wo attn.out_proj
attention.output.dense            attention.o_proj
attention.output.LayerNorm        attention.LayerNorm sa_layer_norm attn_norm norm1 attn_ln
intermediate.dense                ffn.lin1 mlp.fc1 mlp.fc11
output.dense                      ffn.lin2 mlp.Wo mlp.fc2 mlp.down_proj
output.LayerNorm                  output_layer_norm mlp_norm norm2 mlp_ln
"""
"""Names of BERT, which are the canonical ones, and of the same layers in other families."""

_CANONICAL = {
    name: names[0] for names in map(str.split, _NAMES.strip().splitlines()) for name in names
}
_POSITIONS = "embeddings.position_embeddings.weight"
_TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
_BUCKET_BIAS = "encoder.relative_attention_bias.weight"

_NORMS = {"gamma": "weight", "beta": "bias"}
"""Names of tensors of old checkpoints, and their names today."""

_TENSOR = re.compile(
    r"(?:(?:bert|roberta|data2vec_text|electra|mpnet|distilbert|nomic_bert|gte|new|model)\.)?"
    r"(?:(?:(?:encoder|transformer)\.)?layers?\.(\d+)\.)?(.+)\.(weight|bias|gamma|beta)"
)


class HeadLayer(NamedTuple):
    """A layer of a classification head."""

    name: str
    num_outputs: int | None
    """None for a norm."""

    activation: str = "Identity"
    """One of `pooling.ACTIVATIONS`."""

    bias: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSettings(ModelSettings):
    """Shape of an encoder."""

    inner_size: int
    """Intermediate size of the MLP."""

    num_heads: int
    head_dim: int
    activation: str
    """The activation's name in `config.json`."""

    norm_eps: float
    sliding_windows: tuple[int | None, ...] = ()
    """By layer, the number of tokens on either side to which a token attends, None for all; empty
    if no layer has a window."""

    qkv: str = "attention.self.query attention.self.key attention.self.value"
    up: str = "intermediate.dense"
    """Names of the tensors of queries, keys and values, and of the MLP's first layer, of which
    there are two, the gate first, if it is gated. Equal names are consecutive parts of one
    tensor."""

    gate_follows: bool = False
    """Whether the gate is the second part of the one tensor of the MLP's first layer."""

    biases: Collection[str] = ("norm", "qkv", "output", "up", "down")
    """The parts of a layer that have a bias."""

    norm_first: bool = False
    """Whether norms precede attention and MLP. Then that of the embedding is the first of them, and
    another one follows the last layer."""

    position_offset: int | None = None
    """The row of the table of learned positions for position 0; None: there is no table."""

    rotary: RotarySettings | None = None
    local_rotary: RotarySettings | None = None
    """Of layers with a window; None: the same."""

    has_relative_bias: bool = False
    num_token_types: int = 0
    classifier: tuple[HeadLayer, ...] = ()
    classifier_type: PoolingType = PoolingType.CLS
    """The pooling that precedes the classifier."""

    @property
    def activations(self) -> set[str]:
        return {self.activation}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """`sliding_windows`, of every layer."""
        return self.sliding_windows or (None,) * self.num_layers

    def require_shards(self, layout: Layout) -> None:
        ModelSettings.require_shards(self, layout)
        layout.even_shard(self.num_heads, "attention heads")


class EncoderLayer(NativeLayer):
    """Attention and MLP, with a norm before or after either."""

    def __init__(
        self,
        settings: EncoderSettings,
        layer: int,
        context: ModelContext,
        kernels: Kernels,
        rotary: RotaryTable | None,
        bias: Tensor | None,
    ) -> None:
        """layer: index of the layer in the whole model; bias: see `reference.packed_attention`."""
        super().__init__()
        s, size, layout = settings, settings.hidden_size, context.communicator.layout
        heads = layout.even_shard(s.num_heads, "attention heads")
        attended = heads.times(s.head_dim)
        inner = layout.even_shard(s.inner_size, "columns of the MLP")
        has_bias = {part: part in s.biases for part in ("qkv", "output", "up", "down")}
        self._kernels, self._names = (
            kernels.layers,
            {
                "attention_norm": "attention.output.LayerNorm",
                "qkv": s.qkv,
                "output": "attention.output.dense",
                "mlp_norm": "output.LayerNorm",
                "up": s.up,
                "down": "output.dense",
            },
        )
        self.attention_norm: LayerNorm | None = None
        if layer > 0 or not s.norm_first:
            self.attention_norm = _norm(s, context, kernels)
        outputs = _outputs(attended, s.qkv)
        self.qkv = Linear(Shard.full(size), outputs, bias=has_bias["qkv"], context=context)
        self.output = RowParallelLinear(attended, size, bias=has_bias["output"], context=context)
        self.mlp_norm = _norm(s, context, kernels)
        outputs, activation = _outputs(inner, s.up), ACTIVATIONS[s.activation]
        if s.gate_follows:
            outputs.reverse()
        make_up = ActivatedLinear if len(outputs) == 1 else GatedLinear
        self.up = make_up(
            size, outputs, activation, kernels.layers, bias=has_bias["up"], context=context
        )
        self.down = RowParallelLinear(inner, size, bias=has_bias["down"], context=context)
        self._norm_first, self._head_dim, self._rotary = s.norm_first, s.head_dim, rotary
        window, scale = s.windows[layer], s.head_dim**-0.5
        attend = kernels.attention_of(window).packed_attention
        self._attend = partial(attend, scale=scale, window=window, bias=bias)

    def forward(
        self, residual: Tensor, x: Tensor | None, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        if not self._norm_first:
            assert self.attention_norm is not None
            residual = self.attention_norm(residual, self._attention(residual, inputs))
            return self.mlp_norm(residual, self.down(self.up(residual))), None
        normed = residual if self.attention_norm is None else self.attention_norm(residual, x)
        normed = self.mlp_norm(residual, self._attention(normed, inputs))
        return residual, self.down(self.up(normed))

    def _attention(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        query, key, value = self.qkv(x).unflatten(1, (3, -1, self._head_dim)).unbind(1)
        if (table := self._rotary) is not None:
            self._kernels.rotate(query, key, inputs.positions, table.cos, table.sin)
        return self.output(self._attend(query, key, value, inputs.metadata).flatten(1))

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        return part_targets(self, self._names, f"{name}.")


def _norm(settings: EncoderSettings, context: ModelContext, kernels: Kernels) -> LayerNorm:
    s = settings
    return LayerNorm(
        s.hidden_size, s.norm_eps, context, kernels.layers, has_bias="norm" in s.biases
    )


def _outputs(shard: Shard, names: str) -> list[Shard]:
    """This rank's outputs of layers with these names, which are one tensor if names are equal."""
    count = len(names.split())
    if len(set(names.split())) == count:
        return [shard] * count
    total = count * shard.total
    return [shard.within(part * shard.total, total) for part in range(count)]


def _head(
    layer: HeadLayer, settings: EncoderSettings, context: ModelContext, kernels: Kernels
) -> Dense | LayerNorm:
    _, num_outputs, activation, bias = layer
    if num_outputs is None:
        return _norm(settings, head_context(context), kernels)
    size = settings.hidden_size
    return Dense(size, num_outputs, context, bias=bias, activation=activation)


class EncoderModel(NativeModel):
    """An encoder, with a classifier if its architecture has one."""

    generates = False
    embedding_name = "embeddings.word_embeddings.weight"
    layers_name = "encoder.layer"
    norm_name = "final_norm"
    optional_names: re.Pattern[str] = re.compile(r".*\.(position_ids|token_type_ids|inv_freq)")
    unused_names: re.Pattern[str] = re.compile(
        r"(pooler|cls|lm_head|generator_\w+|discriminator_\w+|vocab_\w+|head|decoder|(pre_)?classifier|qa_outputs)\..*"
    )

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """BERT's name, without the prefix that checkpoints with a head add."""
        if (match := _TENSOR.fullmatch(name)) is None:
            return name
        layer, part, kind = match.groups()
        prefix = "" if layer is None else f"{cls.layers_name}.{layer}."
        return f"{prefix}{_CANONICAL.get(part, part)}.{_NORMS.get(kind, kind)}"

    def __init__(
        self, settings: EncoderSettings, max_model_len: int, context: ModelContext, kernels: Kernels
    ) -> None:
        super().__init__(settings, max_model_len, context, kernels)
        s, layout, device = settings, context.communicator.layout, context.device
        self._no_cache = context.empty(0), context.empty(0)
        self.default_pooling = PoolingFacts(
            default_type=PoolingType.MEAN, classifier_type=s.classifier_type, normalize=True
        )
        self.num_token_types = s.num_token_types
        self.uses_token_types = s.num_token_types > 1
        self._tables: dict[str, Tensor] = {}
        self._offset = s.position_offset
        self.embedding_norm: LayerNorm | None = None
        if layout.is_first_stage:
            num_positions = 0 if self._offset is None else s.max_model_len + self._offset
            counts = {_POSITIONS: num_positions, _TOKEN_TYPES: s.num_token_types}
            self._tables = {
                name: context.empty(count, s.hidden_size) for name, count in counts.items() if count
            }
            self.embedding_norm = _norm(s, context, kernels)
        self._heads = layout.even_shard(s.num_heads, "attention heads")
        self._bucket_bias: Tensor | None = None
        self._bias: Tensor | None = None
        if s.has_relative_bias:
            num_distances = 2 * max_model_len - 1
            self._bucket_bias = torch.empty(NUM_BUCKETS, self._heads.size, device=device)
            self._bias = torch.empty(self._heads.size, num_distances, device=device)
        full, local = map(self.rotary_tables.table, (s.rotary, s.local_rotary or s.rotary))
        for i in self._layer_range:
            table = local if s.windows[i] else full
            self.layers.append(EncoderLayer(s, i, context, kernels, table, self._bias))
        self.classifier = nn.ModuleList()
        self._classifier_names = [layer.name for layer in s.classifier]
        if layout.is_last_stage:
            self.norm = _norm(s, context, kernels) if s.norm_first else None
            self.classifier.extend(_head(layer, s, context, kernels) for layer in s.classifier)

    def _cache_spec(
        self, settings: ModelSettings, max_model_len: int, context: ModelContext
    ) -> KVCacheSpec:
        return KVCacheSpec(layers=(), dtype=context.kv_dtype)

    def weight_targets(self) -> Iterator[WeightTarget]:
        yield from super().weight_targets()
        for name, table in self._tables.items():
            yield WeightTarget(name, table)
        if self.embedding_norm is not None:
            yield from norm_targets("embeddings.LayerNorm", self.embedding_norm)
        if self._bucket_bias is not None:
            yield WeightTarget(_BUCKET_BIAS, self._bucket_bias, axis=1, shard=self._heads)
        for name, layer in zip(self._classifier_names, self.classifier, strict=False):
            if isinstance(layer, Dense):
                yield from layer.linear.targets(name)
            else:
                assert isinstance(layer, LayerNorm)
                yield from norm_targets(name, layer)

    def finish_loading(self) -> None:
        """As `NativeModel.finish_loading`; spreads the biases of buckets over all distances."""
        super().finish_loading()
        if self._bucket_bias is not None and self._bias is not None:
            distances = torch.arange(1 - self.max_model_len, self.max_model_len)
            buckets = bucket_of(distances).to(self._bias.device)
            self._bias.copy_(self._bucket_bias[buckets].t())

    def embed(self, batch: StepBatch) -> Tensor:
        assert self.embedding is not None
        assert self.embedding_norm is not None
        x, kernels = self.embedding(batch.token_ids), self._kernels.layers
        if (table := self._tables.get(_TOKEN_TYPES)) is not None:
            types = batch.token_types
            if not self.uses_token_types:  # there is one row, which is that of every position
                table, types = table.expand(self.max_model_len, -1), batch.positions
            assert types is not None, "uses_token_types"
            x = kernels.embed(table, types, x)
        if (table := self._tables.get(_POSITIONS)) is not None:
            x = kernels.embed(table[self._offset :], batch.positions, x)
        return self.embedding_norm(x)

    def layer_inputs(self, batch: StepBatch) -> Iterator[LayerInputs]:
        (metadata,) = batch.attention
        return repeat(LayerInputs(batch.positions, self._no_cache, metadata), len(self.layers))

    @torch.inference_mode()
    def pool(self, pooled: Tensor, head: PoolingHead) -> Tensor:
        """See `interface.Pools`."""
        if head is PoolingHead.CLASSIFIER:
            for layer in self.classifier:
                pooled = layer(pooled)
        return pooled


def bucket_of(distances: Tensor) -> Tensor:
    """The bucket of each distance between a token and the one that attends to it.

    Half of the buckets are of tokens that follow. Half of these have one distance, and the others
    grow exponentially up to `_MAX_DISTANCE` (T5, Raffel et al. 2020). distances: int64. Returns
    indices of `NUM_BUCKETS`.
    """
    num_buckets = NUM_BUCKETS // 2
    num_exact, absolute = num_buckets // 2, distances.abs()
    growth = (absolute.clamp(min=1).float() / num_exact).log() / math.log(_MAX_DISTANCE / num_exact)
    large = num_exact + (growth * (num_buckets - num_exact)).long()
    bucket = torch.where(absolute < num_exact, absolute, large.clamp(max=num_buckets - 1))
    return bucket + (distances > 0) * num_buckets
