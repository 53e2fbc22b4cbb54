"""Llama and similar models: Mistral, Qwen2, Qwen3. Pre-norm, RoPE, gated MLP, grouped queries."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers import (
    ACTIVATIONS,
    SCALING_TYPES,
    PagedAttention,
    RMSNorm,
    RotarySettings,
    RotaryTable,
    norm_targets,
)
from worker_service.models.linear import GatedLinear, Linear, RowParallelLinear
from worker_service.models.native import DecoderLayer, LayerInputs, ModelSettings, NativeModel

KV_SCALE_NAMES = r".*\.self_attn\.(?:[kv]_proj\.)?[kv]_scale"
"""Canonical names of the scales of keys and values in an fp8 cache, one number each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSettings(ModelSettings):
    """Shape of a Llama-like model."""

    rotary: RotarySettings
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    """Whether queries and keys are normalized per head (Qwen3)."""


class LlamaLayer(DecoderLayer):
    """Attention and a gated MLP, each after a norm; queries, keys and values are one product."""

    def __init__(
        self,
        settings: LlamaSettings,
        layer: int,
        context: ModelContext,
        kernels: Kernels,
        rotary: RotaryTable,
        attention_inputs: int | None = None,
    ) -> None:
        """layer: index of the layer in the whole model; attention_inputs: width of the inputs of
        attention, None for the hidden size."""
        super().__init__()
        s, size, layout = settings, settings.hidden_size, context.communicator.layout
        heads = layout.even_shard(s.num_heads, "attention heads")
        kv_heads = layout.kv_head_shard(s.num_kv_heads)
        self._head_dim, self._norm_eps = s.head_dim, s.norm_eps
        self._num_heads = [heads.size, kv_heads.size, kv_heads.size]
        attended, kv_size = heads.times(s.head_dim), kv_heads.times(s.head_dim)
        self.attention_norm = RMSNorm(size, s.norm_eps, context, kernels.layers)
        self.qkv = Linear(
            Shard.full(attention_inputs or size),
            [attended, kv_size, kv_size],
            bias=s.qkv_bias,
            context=context,
        )
        self.output = RowParallelLinear(attended, size, bias=s.output_bias, context=context)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if s.qk_norm:
            self.query_norm = RMSNorm(s.head_dim, s.norm_eps, context, kernels.layers)
            self.key_norm = RMSNorm(s.head_dim, s.norm_eps, context, kernels.layers)
        self._rotary = rotary
        self._kernels = kernels.layers
        window = s.sliding_windows[layer]
        self.attention = PagedAttention(
            kernels.attention_of(window), scale=s.head_dim**-0.5, sliding_window=window
        )
        self.mlp_norm = RMSNorm(size, s.norm_eps, context, kernels.layers)
        inner = layout.even_shard(s.inner_size, "columns of the MLP")
        activation = ACTIVATIONS[s.activation]
        self.gate_up = GatedLinear(
            size, [inner] * 2, activation, kernels.layers, bias=s.mlp_bias, context=context
        )
        self.down = RowParallelLinear(inner, size, bias=s.mlp_bias, context=context)

    def forward(
        self, residual: Tensor, x: Tensor | None, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        return residual, self.attend_and_mix(self.attention_norm(residual, x), residual, inputs)

    def attend_and_mix(self, x: Tensor, residual: Tensor, inputs: LayerInputs) -> Tensor:
        """Add the attention output for `x` to `residual`, then return the output of the MLP."""
        x = self.write_kv(x, inputs)
        x = self.output(self.attention.attend(x, inputs.caches, inputs.metadata))
        return self.down(self.gate_up(self.mlp_norm(residual, x)))

    def write_kv(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """Write the keys and values of rows to the layer's caches. Returns their queries."""
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        query, key, value = heads.split_with_sizes(self._num_heads, 1)
        query_norm, key_norm = self.query_norm, self.key_norm
        self._kernels.rotate_and_write_kv(
            query,
            key,
            value,
            *inputs.caches,
            inputs.metadata.slot_mapping,
            inputs.positions,
            self._rotary.cos,
            self._rotary.sin,
            query_norm=None if query_norm is None else query_norm.weight,
            key_norm=None if key_norm is None else key_norm.weight,
            eps=self._norm_eps,
            key_scale=self.attention.key_scale,
            value_scale=self.attention.value_scale,
        )
        return query

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        attention, mlp = f"{name}.self_attn", f"{name}.mlp"
        yield from norm_targets(f"{name}.input_layernorm", self.attention_norm)
        yield from self.qkv.targets(*(f"{attention}.{part}_proj" for part in "qkv"))
        yield from self.output.targets(f"{attention}.o_proj")
        if self.query_norm is not None and self.key_norm is not None:
            yield from norm_targets(f"{attention}.q_norm", self.query_norm)
            yield from norm_targets(f"{attention}.k_norm", self.key_norm)
        yield from norm_targets(f"{name}.post_attention_layernorm", self.mlp_norm)
        yield from self.gate_up.targets(f"{mlp}.gate_proj", f"{mlp}.up_proj")
        yield from self.down.targets(f"{mlp}.down_proj")


class LlamaModel(NativeModel):
    """Llama (Touvron et al. 2023), Mistral, Qwen2 or Qwen3."""

    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        rf"lm_head\.weight|.*rotary_emb\.inv_freq|{KV_SCALE_NAMES}"
    )
    embedding_name = "model.embed_tokens.weight"
    layers_name = "model.layers"
    norm_name = "model.norm"

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Add the prefix that checkpoints without an LM head lack."""
        return f"model.{name}" if name.startswith(("layers.", "embed_tokens.", "norm.")) else name

    def __init__(
        self, settings: LlamaSettings, max_model_len: int, context: ModelContext, kernels: Kernels
    ) -> None:
        super().__init__(settings, max_model_len, context, kernels)
        s = settings
        rotary = RotaryTable(s.rotary, max_model_len, context.dtype, context.device)
        self.layers.extend(
            LlamaLayer(s, layer, context, kernels, rotary) for layer in self._layer_range
        )
        if context.communicator.layout.is_last_stage:
            self.norm = RMSNorm(s.hidden_size, s.norm_eps, context, kernels.layers)

    def embed(self, batch: StepBatch) -> Tensor:
        assert self.embedding is not None
        return self.embedding(batch.token_ids)

    def kv_scale_holders(self) -> Iterator[tuple[str, PagedAttention]]:
        for name, layer in self.named_layers():
            assert isinstance(layer, LlamaLayer)
            yield f"{name}.self_attn", layer.attention


def llama_settings(config: Mapping[str, Any]) -> LlamaSettings | None:
    """Settings from `config.json`; absent keys have the defaults of `transformers`.

    None for a variant whose rotary embedding is not supported.
    """
    architecture = config["architectures"][0]
    num_heads = config["num_attention_heads"]
    hidden_size = config["hidden_size"]
    qwen3, qwen2 = architecture == "Qwen3ForCausalLM", architecture == "Qwen2ForCausalLM"
    default_head_dim = 128 if qwen3 else hidden_size // num_heads
    head_dim = config.get("head_dim") or default_head_dim
    llama_or_qwen3 = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM")
    attention_bias = bool(config.get("attention_bias", False)) and llama_or_qwen3
    rotary = RotarySettings.from_config(config, head_dim)
    if rotary.scaling_type not in SCALING_TYPES:
        return None
    if rotary.parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    return LlamaSettings(
        architecture=architecture,
        vocab_size=config["vocab_size"],
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        inner_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads")
        or (8 if architecture == "MistralForCausalLM" else num_heads),
        head_dim=head_dim,
        max_model_len=rotary.max_model_len(),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        activation=config.get("hidden_act", "silu"),
        rotary=rotary,
        sliding_windows=tuple(_sliding_windows(config, architecture)),
        qkv_bias=qwen2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=qwen3,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _sliding_windows(config: Mapping[str, Any], architecture: str) -> Iterator[int | None]:
    """The sliding window of each layer: Mistral has one for all layers, Qwen one for the layers
    that it lists, Llama none."""
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
