"""OPT: learned positions, LayerNorm before or after, a plain MLP."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import LayerKernels
from pagewire_kernels.select import Kernels
from worker_service.models.interface import KVCacheSpec, ModelContext
from worker_service.models.layers import ACTIVATIONS, LayerNorm, PagedAttention
from worker_service.models.linear import Linear, RowParallelLinear, VocabEmbedding, VocabHead
from worker_service.models.native import (
    NativeModel,
    WeightTarget,
    column_targets,
    linear_targets,
    norm_targets,
    row_targets,
    vocab_targets,
)

POSITION_OFFSET = 2
"""The first rows of the position table are unused."""

_NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class OPTSettings:
    """Shape of an OPT model."""

    vocab_size: int
    hidden_size: int
    embedding_size: int
    """Differs from the hidden size in OPT-350m, which projects in and out."""

    ffn_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    activation: str
    norm_first: bool
    """Whether norms stand before attention and MLP, or after (OPT-350m)."""

    final_norm: bool
    bias: bool
    norm_affine: bool
    tie_word_embeddings: bool

    @property
    def head_dim(self) -> int:
        """Elements per attention head."""
        return self.hidden_size // self.num_heads


class OPTLayer(nn.Module):
    """Attention and MLP with their norms."""

    def __init__(
        self, settings: OPTSettings, layer: int, context: ModelContext, kernels: Kernels
    ) -> None:
        """layer: of the whole model's."""
        super().__init__()
        s, size, layout = settings, settings.hidden_size, context.communicator.layout
        self._settings = s
        heads = layout.even_shard(s.num_heads, "attention heads")
        self._heads_shape = (3, heads.size, s.head_dim)
        self._attended = heads.times(s.head_dim)
        self._inner = layout.even_shard(s.ffn_size, "columns of the MLP")
        self.qkv = Linear(size, 3 * self._attended.size, bias=s.bias, **context.as_kwargs())
        self.output = RowParallelLinear(self._attended, size, bias=s.bias, context=context)
        self.attention_norm = _norm(s, context, kernels.layers)
        self.up = Linear(size, self._inner.size, bias=s.bias, **context.as_kwargs())
        self.down = RowParallelLinear(self._inner, size, bias=s.bias, context=context)
        self.mlp_norm = _norm(s, context, kernels.layers)
        self._activation = ACTIVATIONS[s.activation]
        self._kernels = kernels.layers
        own_layer = layer - layout.layer_range(s.num_layers).start
        self._paged = PagedAttention(kernels.attention, own_layer, scale=s.head_dim**-0.5)

    def forward(
        self, residual: Tensor, x: Tensor | None, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> tuple[Tensor, Tensor | None]:
        """x: what is yet to be added to the residual stream; returns both as they are after."""
        if self._settings.norm_first:
            x = self._attention(self.attention_norm(residual, x), kv_cache, metadata)
            return residual, self._mlp(self.mlp_norm(residual, x))
        assert x is None, "a norm at the end leaves nothing to be added"
        residual = self.attention_norm(residual, self._attention(residual, kv_cache, metadata))
        return self.mlp_norm(residual, self._mlp(residual)), None

    def _attention(self, x: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        query, key, value = self.qkv(x).unflatten(1, self._heads_shape).unbind(1)
        self._paged.write(key, value, kv_cache, metadata)
        return self.output(self._paged.attend(query, kv_cache, metadata))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(self._kernels.activate(self.up(x), self._activation))

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        yield from column_targets(names, self.qkv, [self._attended] * 3)
        yield from row_targets(f"{name}.self_attn.out_proj", self.output, self._attended)
        yield from norm_targets(f"{name}.self_attn_layer_norm", self.attention_norm)
        yield from column_targets([f"{name}.fc1"], self.up, [self._inner])
        yield from row_targets(f"{name}.fc2", self.down, self._inner)
        yield from norm_targets(f"{name}.final_layer_norm", self.mlp_norm)


class OPTModel(NativeModel):
    """The whole model."""

    def __init__(
        self,
        settings: OPTSettings,
        max_model_len: int,
        context: ModelContext,
        kernels: Kernels,
    ) -> None:
        super().__init__(settings.hidden_size, context, kernels)
        s = self._settings = settings
        layout = context.communicator.layout
        self.architecture = "OPTForCausalLM"
        self.vocab_size = s.vocab_size
        self.max_model_len = max_model_len
        self._layer_range = layout.layer_range(s.num_layers)
        self.kv_cache_spec = KVCacheSpec(
            num_layers=len(self._layer_range),
            num_kv_heads=layout.even_shard(s.num_heads, "attention heads").size,
            head_dim=s.head_dim,
            dtype=context.kv_dtype,
        )
        self.embedding = self.head = None
        self.position_embedding: Tensor | None = None
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        self.norm: LayerNorm | None = None
        if layout.is_first_stage:
            self._make_first(context, kernels.layers)
        self.layers = nn.ModuleList(
            OPTLayer(s, layer, context, kernels) for layer in self._layer_range
        )
        if layout.is_last_stage:
            self._make_last(context, kernels.layers)

    def _make_first(self, context: ModelContext, kernels: LayerKernels) -> None:
        s = self._settings
        self.embedding = VocabEmbedding(s.vocab_size, s.embedding_size, context, kernels)
        self.position_embedding = torch.empty(
            s.max_positions + POSITION_OFFSET, s.hidden_size, **context.as_kwargs()
        )
        if s.embedding_size != s.hidden_size:
            self.project_in = Linear(
                s.embedding_size, s.hidden_size, bias=False, **context.as_kwargs()
            )

    def _make_last(self, context: ModelContext, kernels: LayerKernels) -> None:
        s = self._settings
        self.norm = _norm(s, context, kernels) if s.final_norm else None
        if s.embedding_size != s.hidden_size:
            self.project_out = Linear(
                s.hidden_size, s.embedding_size, bias=False, **context.as_kwargs()
            )
        tied_to = self.embedding if s.tie_word_embeddings else None
        self.head = VocabHead(s.vocab_size, s.embedding_size, context, tied_to)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        assert self.position_embedding is not None
        x = self.embedding(token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        return x + nn.functional.embedding(positions + POSITION_OFFSET, self.position_embedding)

    def run_layers(
        self, residual: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        x = None
        for layer in self.layers:
            residual, x = layer(residual, x, kv_cache, metadata)
        return self.end_stage(residual, x)

    def finish(self, residual: Tensor, x: Tensor | None) -> Tensor:
        if self.norm is not None:
            residual = self.norm(residual, x)
        elif x is not None:
            residual.add_(x)
        return residual if self.project_out is None else self.project_out(residual)

    def canonical_name(self, name: str) -> str:
        """Some checkpoints hold the inner model alone."""
        return f"model.{name}" if name.startswith("decoder.") else name

    def weight_targets(self) -> Iterator[WeightTarget]:
        tied = self._settings.tie_word_embeddings
        yield from vocab_targets(
            self, "model.decoder.embed_tokens.weight", "lm_head.weight", tied=tied
        )
        if self.position_embedding is not None:
            yield WeightTarget("model.decoder.embed_positions.weight", self.position_embedding)
        for name in ("project_in", "project_out"):
            linear = getattr(self, name)
            if linear is not None:
                yield from linear_targets(f"model.decoder.{name}", linear)
        for i, layer in zip(self._layer_range, self.layers, strict=True):
            assert isinstance(layer, OPTLayer)
            yield from layer.weight_targets(f"model.decoder.layers.{i}")
        if self.norm is not None:
            yield from norm_targets("model.decoder.final_layer_norm", self.norm)


def opt_settings(config: Mapping[str, Any]) -> OPTSettings:
    """Settings from `config.json`; absent keys mean what `transformers` takes them to mean."""
    norm_first = config.get("do_layer_norm_before", True)
    return OPTSettings(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        embedding_size=config.get("word_embed_proj_dim") or config["hidden_size"],
        ffn_size=config["ffn_dim"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        max_positions=config["max_position_embeddings"],
        activation=config.get("activation_function", "relu"),
        norm_first=norm_first,
        final_norm=norm_first and not config.get("_remove_final_layer_norm", False),
        bias=config.get("enable_bias", True),
        norm_affine=config.get("layer_norm_elementwise_affine", True),
        tie_word_embeddings=config.get("tie_word_embeddings", True),
    )


def _norm(settings: OPTSettings, context: ModelContext, kernels: LayerKernels) -> LayerNorm:
    return LayerNorm(settings.hidden_size, _NORM_EPS, context, kernels, settings.norm_affine)
