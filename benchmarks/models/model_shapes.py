"""The models that benchmarks run: exact shapes of known models, whose weights may be random.

Also computes the size of a shape's weights and KV, on which `roofline` builds.
"""

import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder as described by `config.json`, and its share of a workload."""

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    tied: bool
    """Whether the output layer is the embedding."""
    num_experts: int = 1
    """In each layer, each with an MLP of `intermediate_size`."""
    experts_per_token: int = 1
    shared_size: int = 0
    """Inner size of the MLP that all tokens have beside experts."""
    num_dense_layers: int = 0
    """First layers, which have an MLP of `dense_size` in place of experts."""
    dense_size: int = 0
    kv_latent: int = 0
    """Size of the latents of keys and values, which expand to heads of `head_dim`; 0: none."""
    query_latent: int = 0
    """Size of the latents of queries."""
    rotary_dim: int = 0
    """Elements of a head of queries, and of the key that all heads share, which are rotated and no
    part of the latents."""
    num_attention_layers: int = 0
    """Layers with attention; 0: all."""
    other_weights: int = 0
    """Values in the matrices of layers that are neither attention's, with as many outputs as heads
    have, nor an MLP's."""
    state_values: int = 0
    """Values that all layers keep of a sequence instead of KV, in float32."""
    scale: float = 1.0
    """Share of a workload's requests that are run on a CPU."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Additional keys of its configuration."""
    weights: str | None = None
    """The format of its quantized weights, a key of `quantized_layers.BITS_PER_WEIGHT`; None:
    dense."""

    def quantized(self, weights: str | None) -> "Shape":
        """The same shape with weights in another format, under another name."""
        return (
            self
            if weights is None
            else replace(self, name=f"{self.name}-{weights}", weights=weights)
        )

    def dense(self) -> "Shape":
        """The shape that `quantized` was called on."""
        return replace(self, name=self.name.removesuffix(f"-{self.weights}"), weights=None)

    def config(self) -> dict[str, Any]:
        """The arguments of the configuration in `transformers`."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tied,
            **self.extra,
        }

    @property
    def layer_weights(self) -> int:
        """Values in the matrices of all layers by which a token is multiplied."""
        return self._weights_of(self.experts_per_token)

    def weights_read(self, num_tokens: int) -> int:
        """Values in the matrices of all layers that are read for some tokens: of experts, those
        that routing at random would choose."""
        share = 1 - (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self._weights_of(share * self.num_experts)

    def _weights_of(self, num_experts: float) -> int:
        router = self.num_experts if self.num_experts > 1 else 0
        experts = router + 3 * (self.intermediate_size * num_experts + self.shared_size)
        num_sparse = self.num_layers - self.num_dense_layers
        columns = num_sparse * experts + self.num_dense_layers * 3 * self.dense_size
        attention = self.layers_with_kv * self._attention_weights
        return round(self.hidden_size * columns) + attention + self.other_weights

    @property
    def _attention_weights(self) -> int:
        """Values in the matrices of a layer's attention."""
        hidden, heads, head_dim = self.hidden_size, self.num_heads, self.head_dim
        if not self.kv_latent:
            return hidden * head_dim * (2 * heads + 2 * self.num_kv_heads)
        queries = heads * (head_dim + self.rotary_dim)
        return (
            hidden * (self.query_latent + self.kv_latent + self.rotary_dim + heads * head_dim)
            + self.query_latent * queries
            + 2 * self.kv_latent * heads * head_dim
        )

    @property
    def attention_products(self) -> int:
        """Products, in all layers, of a token with another that it attends to; of latents, those
        with expanded keys and values, which are fewer than those with latents."""
        return self.layers_with_kv * self.num_heads * (2 * self.head_dim + self.rotary_dim)

    @property
    def output_weights(self) -> int:
        """Values in the LM head, which is computed only for rows that sample."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_values(self) -> int:
        """Values in the KV cache per token."""
        if self.kv_latent:
            return self.num_layers * (self.kv_latent + self.rotary_dim)
        return 2 * self.layers_with_kv * self.num_kv_heads * self.head_dim

    @property
    def layers_with_kv(self) -> int:
        """Layers with attention."""
        return self.num_attention_layers or self.num_layers

    def kv_bytes(self, dtype: str) -> int:
        """Bytes in the KV cache per token."""
        return self.kv_values * BYTES_PER_VALUE[dtype]


SHAPES = {
    name: Shape(name=name, **fields)
    for name, fields in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
