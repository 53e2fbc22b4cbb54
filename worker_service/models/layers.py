"""Layers that the native families share. Rows are tokens, flattened over all sequences."""

from collections.abc import Iterator

from torch import Tensor, nn

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import AttentionBackend, LayerKernels
from worker_service.models.interface import ModelContext, WeightTarget


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, context: ModelContext, kernels: LayerKernels) -> None:
        super().__init__()
        self.weight = context.empty(size)
        self.eps = eps
        self._kernels = kernels

    def forward(self, residual: Tensor, x: Tensor | None = None) -> Tensor:
        """Add x, if any, to the residual stream, in place; returns the norm of the sum."""
        if x is None:
            return self._kernels.rms_norm(residual, self.weight, self.eps)
        return self._kernels.rms_norm(x, self.weight, self.eps, residual)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last axis."""

    def __init__(
        self,
        size: int,
        eps: float,
        context: ModelContext,
        kernels: LayerKernels,
        affine: bool = True,
    ) -> None:
        super().__init__()
        self.weight = context.empty(size) if affine else None
        self.bias = context.empty(size) if affine else None
        self._eps = eps
        self._kernels = kernels

    def forward(self, residual: Tensor, x: Tensor | None = None) -> Tensor:
        """Add x, if any, to the residual stream, in place; returns the norm of the sum."""
        if x is None:
            return self._kernels.layer_norm(residual, self.weight, self.bias, self._eps)
        return self._kernels.layer_norm(x, self.weight, self.bias, self._eps, residual)


def norm_targets(name: str, norm: RMSNorm | LayerNorm) -> Iterator[WeightTarget]:
    """Destinations of the checkpoint's tensors of the norm called `name`."""
    if norm.weight is not None:
        yield WeightTarget(f"{name}.weight", norm.weight)
    if isinstance(norm, LayerNorm) and norm.bias is not None:
        yield WeightTarget(f"{name}.bias", norm.bias)


class PagedAttention:
    """A layer's part of the cache: stores new keys and values there, and attends over it."""

    def __init__(
        self,
        backend: AttentionBackend,
        layer: int,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> None:
        self._backend = backend
        self._layer = layer
        self._scale = scale
        self._sliding_window = sliding_window
        self.key_scale = self.value_scale = 1.0
        """Keys and values are divided by these to be stored in an fp8 cache."""

    def cache(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values: [num_blocks, block_size, num_kv_heads, head_dim] each."""
        return kv_cache[:, self._layer, 0], kv_cache[:, self._layer, 1]

    def write(
        self, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> None:
        """Store new keys and values, [num_tokens, num_kv_heads, head_dim] each."""
        self._backend.write_kv(
            key,
            value,
            *self.cache(kv_cache),
            metadata.slot_mapping,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    def attend(self, query: Tensor, kv_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
        """query: [num_tokens, num_heads, head_dim]; returns [num_tokens, num_heads * head_dim]."""
        output = self._backend.paged_attention(
            query,
            *self.cache(kv_cache),
            metadata,
            scale=self._scale,
            sliding_window=self._sliding_window,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )
        return output.flatten(1)


ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
"""Names in `pagewire_kernels.reference` by those in `config.json`."""
