"""GPT-2: learned positions, LayerNorm before, a GELU MLP, weights stored transposed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.errors import UnsupportedModel
from worker_service.models.interface import KVCacheSpec, ModelContext
from worker_service.models.layers import ACTIVATIONS, LayerNorm, PagedAttention
from worker_service.models.linear import Linear, RowParallelLinear, VocabEmbedding, VocabHead
from worker_service.models.native import NativeModel, WeightTarget, norm_targets, vocab_targets


@dataclass(frozen=True, kw_only=True, slots=True)
class GPT2Settings:
    """Shape of a GPT-2 model."""

    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    activation: str
    norm_eps: float
    scale_attention: bool
    scale_by_layer: bool
    """Whether layer i divides its scores by i + 1 as well."""

    tie_word_embeddings: bool

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.hidden_size // self.num_heads

    def scale(self, layer: int) -> float:
        """What a layer multiplies its scores by."""
        scale = self.head_dim**-0.5 if self.scale_attention else 1.0
        return scale / (layer + 1) if self.scale_by_layer else scale


class GPT2Layer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(
        self, settings: GPT2Settings, layer: int, context: ModelContext, kernels: Kernels
    ) -> None:
        """layer: of the whole model's."""
        super().__init__()
        s, size, layout = settings, settings.hidden_size, context.communicator.layout
        heads = layout.even_shard(s.num_heads, "attention heads")
        self._heads_shape = (3, heads.size, s.head_dim)
        self._attended = heads.times(s.head_dim)
        self._inner = layout.even_shard(s.inner_size, "columns of the MLP")
        self.attention_norm = LayerNorm(size, s.norm_eps, context, kernels.layers)
        self.qkv = Linear(size, 3 * self._attended.size, bias=True, **context.as_kwargs())
        self.output = RowParallelLinear(self._attended, size, bias=True, context=context)
        self.mlp_norm = LayerNorm(size, s.norm_eps, context, kernels.layers)
        self.up = Linear(size, self._inner.size, bias=True, **context.as_kwargs())
        self.down = RowParallelLinear(self._inner, size, bias=True, context=context)
        self._activation = ACTIVATIONS[s.activation]
        self._kernels = kernels.layers
        own_layer = layer - layout.layer_range(s.num_layers).start
        self._attention = PagedAttention(kernels.attention, own_layer, scale=s.scale(layer))

    def forward(
        self, residual: Tensor, x: Tensor | None, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """x: what the layer before leaves to be added to the residual stream; returns the same."""
        heads = self.qkv(self.attention_norm(residual, x)).unflatten(1, self._heads_shape)
        query, key, value = heads.unbind(1)
        self._attention.write(key, value, kv_cache, metadata)
        x = self.output(self._attention.attend(query, kv_cache, metadata))
        inner = self.up(self.mlp_norm(residual, x))
        return self.down(self._kernels.activate(inner, self._activation))

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        size = self._attended.total
        qkv = [self._attended.within(offset, 3 * size) for offset in (0, size, 2 * size)]
        yield from norm_targets(f"{name}.ln_1", self.attention_norm)
        yield from _column_targets(f"{name}.attn.c_attn", self.qkv, qkv)
        yield from _row_targets(f"{name}.attn.c_proj", self.output, self._attended)
        yield from norm_targets(f"{name}.ln_2", self.mlp_norm)
        yield from _column_targets(f"{name}.mlp.c_fc", self.up, [self._inner])
        yield from _row_targets(f"{name}.mlp.c_proj", self.down, self._inner)


class GPT2Model(NativeModel):
    """The whole model."""

    # Older checkpoints hold the causal masks.
    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        r"transformer\.h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"
    )

    def __init__(
        self,
        settings: GPT2Settings,
        max_model_len: int,
        context: ModelContext,
        kernels: Kernels,
    ) -> None:
        super().__init__(settings.hidden_size, context, kernels)
        s = self._settings = settings
        layout = context.communicator.layout
        self.architecture = "GPT2LMHeadModel"
        self.vocab_size = s.vocab_size
        self.max_model_len = max_model_len
        self._layer_range = layout.layer_range(s.num_layers)
        self.kv_cache_spec = KVCacheSpec(
            num_layers=len(self._layer_range),
            num_kv_heads=layout.even_shard(s.num_heads, "attention heads").size,
            head_dim=s.head_dim,
            dtype=context.kv_dtype,
        )
        self.embedding = self.position_embedding = self.head = self.norm = None
        if layout.is_first_stage:
            self.embedding = VocabEmbedding(s.vocab_size, s.hidden_size, context, kernels.layers)
            self.position_embedding = torch.empty(
                s.max_positions, s.hidden_size, **context.as_kwargs()
            )
        self.layers = nn.ModuleList(
            GPT2Layer(s, layer, context, kernels) for layer in self._layer_range
        )
        if layout.is_last_stage:
            self.norm = LayerNorm(s.hidden_size, s.norm_eps, context, kernels.layers)
            tied_to = self.embedding if s.tie_word_embeddings else None
            self.head = VocabHead(s.vocab_size, s.hidden_size, context, tied_to)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        assert self.position_embedding is not None
        x = self.embedding(token_ids)
        return x + nn.functional.embedding(positions, self.position_embedding)

    def run_layers(
        self, residual: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        x = None
        for layer in self.layers:
            x = layer(residual, x, kv_cache, metadata)
        return self.end_stage(residual, x)

    def finish(self, residual: Tensor, x: Tensor | None) -> Tensor:
        assert self.norm is not None
        return self.norm(residual, x)

    def canonical_name(self, name: str) -> str:
        """The first checkpoints hold the inner model alone."""
        outer = name.startswith(("transformer.", "lm_head."))
        return name if outer else f"transformer.{name}"

    def weight_targets(self) -> Iterator[WeightTarget]:
        tied = self._settings.tie_word_embeddings
        yield from vocab_targets(self, "transformer.wte.weight", "lm_head.weight", tied=tied)
        if self.position_embedding is not None:
            yield WeightTarget("transformer.wpe.weight", self.position_embedding)
        for i, layer in zip(self._layer_range, self.layers, strict=True):
            assert isinstance(layer, GPT2Layer)
            yield from layer.weight_targets(f"transformer.h.{i}")
        if self.norm is not None:
            yield from norm_targets("transformer.ln_f", self.norm)


def gpt2_settings(config: Mapping[str, Any]) -> GPT2Settings:
    """Settings from `config.json`; absent keys mean what `transformers` takes them to mean."""
    if config.get("add_cross_attention"):
        raise UnsupportedModel("GPT2LMHeadModel with cross-attention is not decoder-only")
    return GPT2Settings(
        vocab_size=config["vocab_size"],
        hidden_size=config["n_embd"],
        inner_size=config.get("n_inner") or 4 * config["n_embd"],
        num_layers=config["n_layer"],
        num_heads=config["n_head"],
        max_positions=config["n_positions"],
        activation=config.get("activation_function", "gelu_new"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        scale_attention=config.get("scale_attn_weights", True),
        scale_by_layer=config.get("scale_attn_by_inverse_layer_idx", False),
        tie_word_embeddings=config.get("tie_word_embeddings", True),
    )


def _column_targets(name: str, linear: Linear, shards: list[Shard]) -> Iterator[WeightTarget]:
    """Targets of a layer stored as [in_features, out_features]; `shards` are of its outputs."""
    assert linear.weight is not None
    assert linear.bias is not None
    sizes = [shard.size for shard in shards]
    for weight, bias, shard in zip(
        linear.weight.split(sizes), linear.bias.split(sizes), shards, strict=True
    ):
        yield WeightTarget(f"{name}.weight", weight.t(), axis=1, shard=shard)
        yield WeightTarget(f"{name}.bias", bias, shard=shard)


def _row_targets(name: str, linear: Linear, shard: Shard) -> Iterator[WeightTarget]:
    """Targets of a layer stored as [in_features, out_features]; `shard` is of its inputs."""
    assert linear.weight is not None
    assert linear.bias is not None
    yield WeightTarget(f"{name}.weight", linear.weight.t(), shard=shard)
    yield WeightTarget(f"{name}.bias", linear.bias)
