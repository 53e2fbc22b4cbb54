"""GPT-2: learned positions, LayerNorm before, a GELU MLP, weights stored transposed."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pagewire_kernels.backends import AttentionBackend
from pagewire_kernels.metadata import AttentionMetadata
from worker_service.errors import UnsupportedModel
from worker_service.models.interface import KVCacheSpec
from worker_service.models.layers import ACTIVATIONS, LayerNorm, PagedAttention
from worker_service.models.linear import Linear, TiedLinear
from worker_service.models.native import NativeModel, WeightSlot, linear_slots, norm_slots
from worker_service.models.placement import Placement


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
        self, settings: GPT2Settings, layer: int, place: Placement, backend: AttentionBackend
    ) -> None:
        super().__init__()
        s, size = settings, settings.hidden_size
        self._heads_shape = (3, s.num_heads, s.head_dim)
        self.attention_norm = LayerNorm(size, s.norm_eps, place.dtype, place.device)
        self.qkv = Linear(size, 3 * size, bias=True, **place.as_kwargs())
        self.output = Linear(size, size, bias=True, **place.as_kwargs())
        self.mlp_norm = LayerNorm(size, s.norm_eps, place.dtype, place.device)
        self.up = Linear(size, s.inner_size, bias=True, **place.as_kwargs())
        self.down = Linear(s.inner_size, size, bias=True, **place.as_kwargs())
        self._activation = ACTIVATIONS[s.activation]
        self._attend = PagedAttention(backend, layer, scale=s.scale(layer))

    def forward(self, x: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(1, self._heads_shape)
        query, key, value = heads.unbind(1)
        x = x + self.output(self._attend(query, key, value, kv_cache, metadata))
        return x + self.down(self._activation(self.up(self.mlp_norm(x))))

    def slots(self, name: str) -> Iterator[WeightSlot]:
        yield from norm_slots(f"{name}.ln_1", self.attention_norm)
        yield from _transposed_slots(f"{name}.attn.c_attn", self.qkv)
        yield from _transposed_slots(f"{name}.attn.c_proj", self.output)
        yield from norm_slots(f"{name}.ln_2", self.mlp_norm)
        yield from _transposed_slots(f"{name}.mlp.c_fc", self.up)
        yield from _transposed_slots(f"{name}.mlp.c_proj", self.down)


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
        place: Placement,
        backend: AttentionBackend,
    ) -> None:
        super().__init__()
        s = self._settings = settings
        self.architecture = "GPT2LMHeadModel"
        self.vocab_size = s.vocab_size
        self.max_model_len = max_model_len
        self.kv_cache_spec = KVCacheSpec(
            num_layers=s.num_layers,
            num_kv_heads=s.num_heads,
            head_dim=s.head_dim,
            dtype=place.dtype,
        )
        self.embedding = torch.empty(s.vocab_size, s.hidden_size, **place.as_kwargs())
        self.position_embedding = torch.empty(s.max_positions, s.hidden_size, **place.as_kwargs())
        self.layers = nn.ModuleList(
            GPT2Layer(s, layer, place, backend) for layer in range(s.num_layers)
        )
        self.norm = LayerNorm(s.hidden_size, s.norm_eps, place.dtype, place.device)
        self.lm_head = (
            TiedLinear(self.embedding)
            if s.tie_word_embeddings
            else Linear(s.hidden_size, s.vocab_size, bias=False, **place.as_kwargs())
        )

    def run_layers(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        x = nn.functional.embedding(token_ids, self.embedding)
        x = x + nn.functional.embedding(positions, self.position_embedding)
        for layer in self.layers:
            x = layer(x, kv_cache, metadata)
        return self.norm(x)

    def head(self) -> nn.Module:
        return self.lm_head

    def canonical_name(self, name: str) -> str:
        """The first checkpoints hold the inner model alone."""
        outer = name.startswith(("transformer.", "lm_head."))
        return name if outer else f"transformer.{name}"

    def weight_slots(self) -> Iterator[WeightSlot]:
        yield WeightSlot("transformer.wte.weight", self.embedding)
        yield WeightSlot("transformer.wpe.weight", self.position_embedding)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, GPT2Layer)
            yield from layer.slots(f"transformer.h.{i}")
        yield from norm_slots("transformer.ln_f", self.norm)
        if not self._settings.tie_word_embeddings:
            yield from linear_slots("lm_head", self.lm_head)


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


def _transposed_slots(name: str, linear: Linear) -> Iterator[WeightSlot]:
    """Slots of a layer stored as [in_features, out_features]."""
    assert linear.weight is not None
    assert linear.bias is not None
    yield WeightSlot(f"{name}.weight", linear.weight.t())
    yield WeightSlot(f"{name}.bias", linear.bias)
