"""GPT-2 and OPT: learned positions, LayerNorm, a plain MLP."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from pagewire_kernels.batch import StepBatch
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Shard
from worker_service.errors import UnsupportedModel
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers import (
    ACTIVATIONS,
    LayerNorm,
    PagedAttention,
)
from worker_service.models.linear import Linear, RowParallelLinear
from worker_service.models.native import (
    DecoderLayer,
    LayerInputs,
    ModelSettings,
    NativeModel,
    part_targets,
)

OPT_POSITION_OFFSET = 2
"""The first rows of OPT's position table are unused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTSettings(ModelSettings):
    """Shape of a GPT-2 or OPT model. Only OPT-350m has norms after attention and MLP (post-norm),
    and an embedding narrower than the hidden states."""

    position_offset: int = 0
    """The row of the position table for position 0."""

    scales: tuple[float, ...]
    """The factor of each layer's attention scores."""

    norm_first: bool = True
    """Whether norms precede attention and MLP (pre-norm)."""

    final_norm: bool = True
    norm_affine: bool = True
    bias: bool = True


class GPTLayer(DecoderLayer):
    """Attention and MLP with their norms; `part_names` are those of OPT's checkpoints."""

    part_names: ClassVar[Mapping[str, str]] = {
        "attention_norm": "self_attn_layer_norm",
        "qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "output": "self_attn.out_proj",
        "mlp_norm": "final_layer_norm",
        "up": "fc1",
        "down": "fc2",
    }
    transposed: ClassVar[bool] = False
    """Whether checkpoints have weights as [in_features, out_features]."""

    def __init__(
        self, settings: GPTSettings, layer: int, context: ModelContext, kernels: Kernels
    ) -> None:
        """layer: index of the layer in the whole model."""
        super().__init__()
        s, size, layout = settings, settings.hidden_size, context.communicator.layout
        heads = layout.even_shard(s.num_heads, "attention heads")
        attended = heads.times(s.head_dim)
        inner = layout.even_shard(s.inner_size, "columns of the MLP")
        self._norm_first = s.norm_first
        self._heads_shape = (3, heads.size, s.head_dim)
        full = Shard.full(size)
        self.attention_norm = _norm(s, context, kernels)
        self.qkv = Linear(full, self._qkv_outputs(attended), bias=s.bias, context=context)
        self.output = RowParallelLinear(attended, size, bias=s.bias, context=context)
        self.mlp_norm = _norm(s, context, kernels)
        self.up = Linear(full, [inner], bias=s.bias, context=context)
        self.down = RowParallelLinear(inner, size, bias=s.bias, context=context)
        self._activation = ACTIVATIONS[s.activation]
        self._kernels = kernels.layers
        self._paged = PagedAttention(kernels.attention, scale=s.scales[layer])

    def _qkv_outputs(self, attended: Shard) -> list[Shard]:
        return [attended] * 3

    def forward(
        self, residual: Tensor, x: Tensor | None, inputs: LayerInputs
    ) -> tuple[Tensor, Tensor | None]:
        if self._norm_first:
            x = self._attention(self.attention_norm(residual, x), inputs)
            return residual, self._mlp(self.mlp_norm(residual, x))
        assert x is None, "a norm at the end leaves nothing to be added"
        residual = self.attention_norm(residual, self._attention(residual, inputs))
        return self.mlp_norm(residual, self._mlp(residual)), None

    def _attention(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        caches, metadata = inputs.caches, inputs.metadata
        query, key, value = self.qkv(x).unflatten(1, self._heads_shape).unbind(1)
        self._paged.write(key, value, caches, metadata)
        return self.output(self._paged.attend(query, caches, metadata))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(self._kernels.activate(self.up(x), self._activation))

    def weight_targets(self, name: str) -> Iterator[WeightTarget]:
        return part_targets(self, self.part_names, f"{name}.", transposed=self.transposed)


class GPT2Layer(GPTLayer):
    """A layer of GPT-2: queries, keys and values are one tensor, and weights are transposed."""

    part_names: ClassVar[Mapping[str, str]] = {
        "attention_norm": "ln_1",
        "qkv": "attn.c_attn attn.c_attn attn.c_attn",
        "output": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    transposed = True

    def _qkv_outputs(self, attended: Shard) -> list[Shard]:
        size = attended.total
        return [attended.within(offset, 3 * size) for offset in (0, size, 2 * size)]


class OPTModel(NativeModel):
    """OPT (Zhang et al. 2022)."""

    embedding_name = "model.decoder.embed_tokens.weight"
    layers_name = "model.decoder.layers"
    norm_name = "model.decoder.final_layer_norm"
    positions_name: ClassVar[str] = "model.decoder.embed_positions.weight"
    layer_type: ClassVar[type[GPTLayer]] = GPTLayer

    def __init__(
        self, settings: GPTSettings, max_model_len: int, context: ModelContext, kernels: Kernels
    ) -> None:
        super().__init__(settings, max_model_len, context, kernels)
        s, layout = settings, context.communicator.layout
        self._position_offset = s.position_offset
        self.position_embedding: Tensor | None = None
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        projects = s.embedding_size != s.hidden_size
        size, inner = Shard.full(s.embedding_size), Shard.full(s.hidden_size)
        if layout.is_first_stage:
            num_positions = s.max_model_len + s.position_offset
            self.position_embedding = context.empty(num_positions, s.hidden_size)
            if projects:
                self.project_in = Linear(size, [inner], bias=False, context=context)
        self.layers.extend(
            self.layer_type(s, layer, context, kernels) for layer in self._layer_range
        )
        if layout.is_last_stage:
            self.norm = _norm(s, context, kernels) if s.final_norm else None
            if projects:
                self.project_out = Linear(inner, [size], bias=False, context=context)

    def embed(self, batch: StepBatch) -> Tensor:
        assert self.embedding is not None
        assert self.position_embedding is not None
        x = self.embedding(batch.token_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        positions = self.position_embedding[self._position_offset :]
        return self._kernels.layers.embed(positions, batch.positions, x)

    def run_layers(self, residual: Tensor, batch: StepBatch) -> Tensor:
        x = super().run_layers(residual, batch)
        return x if self.project_out is None else self.project_out(x)

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Add the prefix that checkpoints without an LM head lack."""
        return f"model.{name}" if name.startswith("decoder.") else name

    def weight_targets(self) -> Iterator[WeightTarget]:
        yield from super().weight_targets()
        if self.position_embedding is not None:
            yield WeightTarget(self.positions_name, self.position_embedding)
        for name in ("project_in", "project_out"):
            linear = getattr(self, name)
            if linear is not None:
                yield from linear.targets(f"model.decoder.{name}")


class GPT2Model(OPTModel):
    """GPT-2 (Radford et al. 2019)."""

    embedding_name = "transformer.wte.weight"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"
    positions_name = "transformer.wpe.weight"
    layer_type = GPT2Layer
    # Older checkpoints hold the causal masks.
    optional_names: ClassVar[re.Pattern[str]] = re.compile(
        r"transformer\.h\.\d+\.attn\.(masked_)?bias|lm_head\.weight"
    )

    @classmethod
    def canonical_name(cls, name: str) -> str:
        """Add the prefix that the original checkpoints lack."""
        outer = name.startswith(("transformer.", "lm_head."))
        return name if outer else f"transformer.{name}"


def opt_settings(config: Mapping[str, Any]) -> GPTSettings:
    """Settings from `config.json`; absent keys have the defaults of `transformers`."""
    norm_first = config.get("do_layer_norm_before", True)
    num_layers, num_heads = config["num_hidden_layers"], config["num_attention_heads"]
    head_dim = config["hidden_size"] // num_heads
    return GPTSettings(
        architecture="OPTForCausalLM",
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        embedding_size=config.get("word_embed_proj_dim") or config["hidden_size"],
        inner_size=config["ffn_dim"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_model_len=config["max_position_embeddings"],
        position_offset=OPT_POSITION_OFFSET,
        activation=config.get("activation_function", "relu"),
        norm_eps=1e-5,
        scales=(head_dim**-0.5,) * num_layers,
        norm_first=norm_first,
        final_norm=norm_first and not config.get("_remove_final_layer_norm", False),
        bias=config.get("enable_bias", True),
        norm_affine=config.get("layer_norm_elementwise_affine", True),
        tie_word_embeddings=config.get("tie_word_embeddings", True),
    )


def gpt2_settings(config: Mapping[str, Any]) -> GPTSettings:
    """Settings from `config.json`; absent keys have the defaults of `transformers`."""
    if config.get("add_cross_attention"):
        raise UnsupportedModel(
            "config.json: add_cross_attention: expected false, since only decoder-only models are"
            " supported, got true"
        )
    size, num_layers, num_heads = config["n_embd"], config["n_layer"], config["n_head"]
    head_dim = size // num_heads
    scale = head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
    by_layer = config.get("scale_attn_by_inverse_layer_idx", False)
    return GPTSettings(
        architecture="GPT2LMHeadModel",
        vocab_size=config["vocab_size"],
        hidden_size=size,
        embedding_size=size,
        inner_size=config.get("n_inner") or 4 * size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_model_len=config["n_positions"],
        activation=config.get("activation_function", "gelu_new"),
        norm_eps=config.get("layer_norm_epsilon", 1e-5),
        scales=tuple(scale / (i + 1) if by_layer else scale for i in range(num_layers)),
        tie_word_embeddings=config.get("tie_word_embeddings", True),
    )


def _norm(settings: GPTSettings, context: ModelContext, kernels: Kernels) -> LayerNorm:
    s = settings
    return LayerNorm(s.hidden_size, s.norm_eps, context, kernels.layers, s.norm_affine)
