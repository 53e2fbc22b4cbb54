"""OPT: learned positions, LayerNorm before or after, a plain MLP."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pagewire_kernels.backends import AttentionBackend
from pagewire_kernels.metadata import AttentionMetadata
from worker_service.models.interface import KVCacheSpec
from worker_service.models.layers import ACTIVATIONS, LayerNorm, PagedAttention
from worker_service.models.linear import Linear, TiedLinear
from worker_service.models.native import (
    NativeModel,
    WeightSlot,
    linear_slots,
    norm_slots,
    stacked_slots,
)
from worker_service.models.placement import Placement

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
        self, settings: OPTSettings, layer: int, place: Placement, backend: AttentionBackend
    ) -> None:
        super().__init__()
        s, size = settings, settings.hidden_size
        self._settings = s
        self.qkv = Linear(size, 3 * size, bias=s.bias, **place.as_kwargs())
        self.output = Linear(size, size, bias=s.bias, **place.as_kwargs())
        self.attention_norm = _norm(s, place)
        self.up = Linear(size, s.ffn_size, bias=s.bias, **place.as_kwargs())
        self.down = Linear(s.ffn_size, size, bias=s.bias, **place.as_kwargs())
        self.mlp_norm = _norm(s, place)
        self._activation = ACTIVATIONS[s.activation]
        self._attend = PagedAttention(backend, layer, scale=s.head_dim**-0.5)

    def forward(self, x: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        norm_first = self._settings.norm_first
        attended = self._attention(self.attention_norm(x) if norm_first else x, kv_cache, metadata)
        x = x + attended if norm_first else self.attention_norm(x + attended)
        expanded = self._mlp(self.mlp_norm(x) if norm_first else x)
        return x + expanded if norm_first else self.mlp_norm(x + expanded)

    def _attention(self, x: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        heads = self.qkv(x).unflatten(1, (3, self._settings.num_heads, self._settings.head_dim))
        query, key, value = heads.unbind(1)
        return self.output(self._attend(query, key, value, kv_cache, metadata))

    def _mlp(self, x: Tensor) -> Tensor:
        return self.down(self._activation(self.up(x)))

    def slots(self, name: str) -> Iterator[WeightSlot]:
        names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        yield from stacked_slots(names, self.qkv, [self._settings.hidden_size] * 3)
        yield from linear_slots(f"{name}.self_attn.out_proj", self.output)
        yield from norm_slots(f"{name}.self_attn_layer_norm", self.attention_norm)
        yield from linear_slots(f"{name}.fc1", self.up)
        yield from linear_slots(f"{name}.fc2", self.down)
        yield from norm_slots(f"{name}.final_layer_norm", self.mlp_norm)


class OPTModel(NativeModel):
    """The whole model."""

    def __init__(
        self,
        settings: OPTSettings,
        max_model_len: int,
        place: Placement,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        s = self._settings = settings
        self.architecture = "OPTForCausalLM"
        self.vocab_size = s.vocab_size
        self.max_model_len = max_model_len
        self.kv_cache_spec = KVCacheSpec(
            num_layers=s.num_layers,
            num_kv_heads=s.num_heads,
            head_dim=s.head_dim,
            dtype=place.dtype,
        )
        self.embedding = torch.empty(s.vocab_size, s.embedding_size, **place.as_kwargs())
        self.position_embedding = torch.empty(
            s.max_positions + POSITION_OFFSET, s.hidden_size, **place.as_kwargs()
        )
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if s.embedding_size != s.hidden_size:
            self.project_in = Linear(
                s.embedding_size, s.hidden_size, bias=False, **place.as_kwargs()
            )
            self.project_out = Linear(
                s.hidden_size, s.embedding_size, bias=False, **place.as_kwargs()
            )
        self.layers = nn.ModuleList(
            OPTLayer(s, layer, place, backend) for layer in range(s.num_layers)
        )
        self.norm = _norm(s, place) if s.final_norm else None
        self.lm_head = (
            TiedLinear(self.embedding)
            if s.tie_word_embeddings
            else Linear(s.embedding_size, s.vocab_size, bias=False, **place.as_kwargs())
        )

    def run_layers(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        x = nn.functional.embedding(token_ids, self.embedding)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + nn.functional.embedding(positions + POSITION_OFFSET, self.position_embedding)
        for layer in self.layers:
            x = layer(x, kv_cache, metadata)
        if self.norm is not None:
            x = self.norm(x)
        return self.project_out(x) if self.project_out is not None else x

    def head(self) -> nn.Module:
        return self.lm_head

    def canonical_name(self, name: str) -> str:
        """Some checkpoints hold the inner model alone."""
        return f"model.{name}" if name.startswith("decoder.") else name

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot("model.decoder.embed_tokens.weight", self.embedding)
        yield WeightSlot("model.decoder.embed_positions.weight", self.position_embedding)
        for name in ("project_in", "project_out"):
            linear = getattr(self, name)
            if linear is not None:
                yield from linear_slots(f"model.decoder.{name}", linear)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, OPTLayer)
            yield from layer.slots(f"model.decoder.layers.{i}")
        if self.norm is not None:
            yield from norm_slots("model.decoder.final_layer_norm", self.norm)
        if not self._settings.tie_word_embeddings:
            yield from linear_slots("lm_head", self.lm_head)


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


def _norm(settings: OPTSettings, place: Placement) -> LayerNorm:
    return LayerNorm(
        settings.hidden_size, _NORM_EPS, place.dtype, place.device, settings.norm_affine
    )
