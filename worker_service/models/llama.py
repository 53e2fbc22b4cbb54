"""Llama and its close kin: Mistral, Qwen2, Qwen3. Pre-norm, rotary, gated MLP, grouped queries."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import LayerKernels
from pagewire_kernels.select import Kernels
from worker_service.models.interface import KVCacheSpec, ModelContext
from worker_service.models.layers import ACTIVATIONS, PagedAttention, RMSNorm
from worker_service.models.linear import (
    GatedLinear,
    Linear,
    RowParallelLinear,
    VocabEmbedding,
    VocabHead,
)
from worker_service.models.native import (
    KV_SCALE_NAMES,
    NativeModel,
    WeightTarget,
    column_targets,
    norm_targets,
    row_targets,
    vocab_targets,
)
from worker_service.models.rotary import RotarySettings, RotaryTable


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSettings:
    """Shape of a Llama-like model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    rotary: RotarySettings
    sliding_windows: tuple[int | None, ...]
    """Of each layer."""

    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalised per head (Qwen3)."""

    tie_word_embeddings: bool


class LlamaAttention(nn.Module):
    """Self-attention; queries, keys and values come from one product."""

    def __init__(
        self,
        settings: LlamaSettings,
        layer: int,
        context: ModelContext,
        kernels: Kernels,
        rotary: RotaryTable,
    ) -> None:
        """layer: of the whole model's."""
        super().__init__()
        s, layout = settings, context.communicator.layout
        heads = layout.even_shard(s.num_heads, "attention heads")
        kv_heads = layout.kv_head_shard(s.num_kv_heads)
        self._num_heads, self._num_kv_heads = heads.size, kv_heads.size
        self._head_dim = s.head_dim
        self._inner, self._kv_inner = heads.times(s.head_dim), kv_heads.times(s.head_dim)
        num_stacked = heads.size + 2 * kv_heads.size
        self.qkv = Linear(
            s.hidden_size, num_stacked * s.head_dim, bias=s.qkv_bias, **context.as_kwargs()
        )
        self.output = RowParallelLinear(
            self._inner, s.hidden_size, bias=s.output_bias, context=context
        )
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if s.qk_norm:
            self.query_norm = RMSNorm(s.head_dim, s.norm_eps, context, kernels.layers)
            self.key_norm = RMSNorm(s.head_dim, s.norm_eps, context, kernels.layers)
        self._norm_eps = s.norm_eps
        self._rotary = rotary
        self._kernels = kernels.layers
        self.attention = PagedAttention(
            kernels.attention,
            layer - layout.layer_range(s.num_layers).start,
            scale=s.head_dim**-0.5,
            sliding_window=s.sliding_windows[layer],
        )

    def forward(
        self, x: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        heads = self.qkv(x).unflatten(1, (-1, self._head_dim))
        query, key, value = heads.split(
            [self._num_heads, self._num_kv_heads, self._num_kv_heads], dim=1
        )
        self._kernels.rotate_and_write_kv(
            query,
            key,
            value,
            *self.attention.cache(kv_cache),
            metadata.slot_mapping,
            positions,
            self._rotary.cos,
            self._rotary.sin,
            query_norm=None if self.query_norm is None else self.query_norm.weight,
            key_norm=None if self.key_norm is None else self.key_norm.weight,
            eps=self._norm_eps,
            key_scale=self.attention.key_scale,
            value_scale=self.attention.value_scale,
        )
        return self.output(self.attention.attend(query, kv_cache, metadata))

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        names = [f"{name}.{part}_proj" for part in "qkv"]
        yield from column_targets(names, self.qkv, [self._inner, self._kv_inner, self._kv_inner])
        yield from row_targets(f"{name}.o_proj", self.output, self._inner)
        if self.query_norm is not None and self.key_norm is not None:
            yield from norm_targets(f"{name}.q_norm", self.query_norm)
            yield from norm_targets(f"{name}.k_norm", self.key_norm)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)); gate and up come from one product."""

    def __init__(
        self, settings: LlamaSettings, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__()
        s = settings
        inner = context.communicator.layout.even_shard(s.intermediate_size, "columns of the MLP")
        self.gate_up = GatedLinear(
            s.hidden_size,
            inner.size,
            ACTIVATIONS[s.activation],
            kernels,
            bias=s.mlp_bias,
            **context.as_kwargs(),
        )
        self.down = RowParallelLinear(inner, s.hidden_size, bias=s.mlp_bias, context=context)
        self._inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        yield from column_targets(names, self.gate_up, [self._inner, self._inner])
        yield from row_targets(f"{name}.down_proj", self.down, self._inner)


class LlamaLayer(nn.Module):
    """Attention and MLP, each after a norm and added to the residual stream."""

    def __init__(
        self,
        settings: LlamaSettings,
        layer: int,
        context: ModelContext,
        kernels: Kernels,
        rotary: RotaryTable,
    ) -> None:
        super().__init__()
        s = settings
        self.attention_norm = RMSNorm(s.hidden_size, s.norm_eps, context, kernels.layers)
        self.attention = LlamaAttention(s, layer, context, kernels, rotary)
        self.mlp_norm = RMSNorm(s.hidden_size, s.norm_eps, context, kernels.layers)
        self.mlp = GatedMLP(s, context, kernels.layers)

    def forward(
        self,
        residual: Tensor,
        x: Tensor | None,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """x: what the layer before leaves to be added to the residual stream; returns the same."""
        x = self.attention_norm(residual, x)
        x = self.attention(x, positions, kv_cache, metadata)
        return self.mlp(self.mlp_norm(residual, x))

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        yield from norm_targets(f"{name}.input_layernorm", self.attention_norm)
        yield from self.attention.weight_targets(f"{name}.self_attn")
        yield from norm_targets(f"{name}.post_attention_layernorm", self.mlp_norm)
        yield from self.mlp.weight_targets(f"{name}.mlp")


class LlamaModel(NativeModel):
    """The whole model."""

    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        rf"lm_head\.weight|.*rotary_emb\.inv_freq|{KV_SCALE_NAMES}"
    )

    def __init__(
        self,
        settings: LlamaSettings,
        max_model_len: int,
        context: ModelContext,
        kernels: Kernels,
    ) -> None:
        super().__init__(settings.hidden_size, context, kernels)
        s = self._settings = settings
        layout = context.communicator.layout
        self.architecture = s.architecture
        self.vocab_size = s.vocab_size
        self.max_model_len = max_model_len
        self._layer_range = layout.layer_range(s.num_layers)
        self.embedding = self.head = self.norm = None
        if layout.is_first_stage:
            self.embedding = VocabEmbedding(s.vocab_size, s.hidden_size, context, kernels.layers)
        rotary = RotaryTable(s.rotary, max_model_len, context.dtype, context.device)
        self.layers = nn.ModuleList(
            LlamaLayer(s, layer, context, kernels, rotary) for layer in self._layer_range
        )
        self.kv_cache_spec = KVCacheSpec(
            num_layers=len(self._layer_range),
            num_kv_heads=layout.kv_head_shard(s.num_kv_heads).size,
            head_dim=s.head_dim,
            dtype=context.kv_dtype,
        )
        if layout.is_last_stage:
            self.norm = RMSNorm(s.hidden_size, s.norm_eps, context, kernels.layers)
            tied_to = self.embedding if s.tie_word_embeddings else None
            self.head = VocabHead(s.vocab_size, s.hidden_size, context, tied_to)

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        assert self.embedding is not None
        return self.embedding(token_ids)

    def run_layers(
        self, residual: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        x = None
        for layer in self.layers:
            x = layer(residual, x, positions, kv_cache, metadata)
        return self.end_stage(residual, x)

    def finish(self, residual: Tensor, x: Tensor | None) -> Tensor:
        assert self.norm is not None
        return self.norm(residual, x)

    def canonical_name(self, name: str) -> str:
        return name

    def kv_scale_holders(self) -> Iterator[tuple[str, PagedAttention]]:
        for i, layer in zip(self._layer_range, self.layers, strict=True):
            assert isinstance(layer, LlamaLayer)
            yield f"model.layers.{i}.self_attn", layer.attention.attention

    def weight_targets(self) -> Iterator[WeightTarget]:
        tied = self._settings.tie_word_embeddings
        yield from vocab_targets(self, "model.embed_tokens.weight", "lm_head.weight", tied=tied)
        for i, layer in zip(self._layer_range, self.layers, strict=True):
            assert isinstance(layer, LlamaLayer)
            yield from layer.weight_targets(f"model.layers.{i}")
        if self.norm is not None:
            yield from norm_targets("model.norm", self.norm)


def llama_settings(config: Mapping[str, Any]) -> LlamaSettings:
    """Settings from `config.json`; absent keys mean what `transformers` takes them to mean."""
    architecture = config["architectures"][0]
    num_heads = config["num_attention_heads"]
    hidden_size = config["hidden_size"]
    qwen3, qwen2 = architecture == "Qwen3ForCausalLM", architecture == "Qwen2ForCausalLM"
    default_head_dim = 128 if qwen3 else hidden_size // num_heads
    head_dim = (None if qwen2 else config.get("head_dim")) or default_head_dim
    llama_or_qwen3 = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = bool(config.get("attention_bias", False)) and llama_or_qwen3
    return LlamaSettings(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads")
        or _default_kv_heads(architecture, num_heads),
        head_dim=head_dim,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=config.get("hidden_act", "silu"),
        rotary=RotarySettings.from_config(config, head_dim),
        sliding_windows=tuple(_sliding_windows(config, architecture)),
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=qwen3,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _default_kv_heads(architecture: str, num_heads: int) -> int:
    return 8 if architecture == "MistralForCausalLM" else num_heads


def _sliding_windows(config: Mapping[str, Any], architecture: str) -> Iterator[int | None]:
    """Each layer's window: Mistral has one for all, Qwen for the layers it names, Llama none."""
    num_layers = config["num_hidden_layers"]
    if architecture == "MistralForCausalLM":
        yield from [config.get("sliding_window", 4096)] * num_layers
    elif architecture == "LlamaForCausalLM" or not config.get("use_sliding_window", False):
        yield from [None] * num_layers
    else:
        window = config.get("sliding_window", 4096)
        first = config.get("max_window_layers", 28)
        kinds = config.get("layer_types") or ["full_attention"] * first + [
            "sliding_attention"
        ] * max(0, num_layers - first)
        for kind in kinds[:num_layers]:
            yield window if kind == "sliding_attention" else None
