"""The models that benchmarks run: exact shapes of known models, whose weights may be random.

Also computes the size of a shape's weights and KV, on which `roofline` builds.
"""

from dataclasses import dataclass, field, replace
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
        """Values in the matrices of all layers, by which every token is multiplied."""
        heads = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        each = self.hidden_size * (heads + 3 * self.intermediate_size)
        return each * self.num_layers

    @property
    def output_weights(self) -> int:
        """Values in the LM head, which is computed only for rows that sample."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_values(self) -> int:
        """Values in the KV cache per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def kv_bytes(self, dtype: str) -> int:
        """Bytes in the KV cache per token."""
        return self.kv_values * BYTES_PER_VALUE[dtype]


SHAPES = {
    shape.name: shape
    for shape in (
        # For tests of the benchmarks.
        Shape(
            name="tiny",
            model_type="llama",
            vocab_size=1000,
            hidden_size=64,
            intermediate_size=96,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_position_embeddings=2048,
            tied=False,
            scale=1 / 32,
        ),
        Shape(
            name="llama-160m",
            model_type="llama",
            vocab_size=32_000,
            hidden_size=768,
            intermediate_size=3072,
            num_layers=12,
            num_heads=12,
            num_kv_heads=4,
            head_dim=64,
            max_position_embeddings=2048,
            tied=False,
            scale=1 / 2,
        ),
        Shape(
            name="smollm2-135m",
            model_type="llama",
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1536,
            num_layers=30,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            max_position_embeddings=8192,
            tied=True,
            scale=1 / 2,
            extra={"rms_norm_eps": 1e-5, "rope_theta": 100_000.0},
        ),
        Shape(
            name="qwen3-0.6b",
            model_type="qwen3",
            vocab_size=151_936,
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=28,
            num_heads=16,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            tied=True,
            scale=1 / 4,
            extra={"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0},
        ),
        Shape(
            name="qwen3-8b",
            model_type="qwen3",
            vocab_size=151_936,
            hidden_size=4096,
            intermediate_size=12_288,
            num_layers=36,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=40_960,
            tied=False,
            scale=1 / 8,
            extra={"rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0},
        ),
        Shape(
            name="llama-8b",
            model_type="llama",
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            max_position_embeddings=8192,
            tied=False,
            scale=1 / 8,
            extra={"rms_norm_eps": 1e-5, "rope_theta": 500_000.0},
        ),
    )
}
