"""Layers that the native families share. Rows are tokens, flattened over all sequences."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pagewire_kernels.backends import AttentionBackend
from pagewire_kernels.metadata import AttentionMetadata

Activation = Callable[[Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self._eps)


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last axis."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device, affine: bool = True
    ) -> None:
        super().__init__()
        self.weight = torch.empty(size, dtype=dtype, device=device) if affine else None
        self.bias = torch.empty(size, dtype=dtype, device=device) if affine else None
        self._size, self._eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.layer_norm(x, (self._size,), self.weight, self.bias, self._eps)


class PagedAttention:
    """Stores a layer's new keys and values, and attends over the cache."""

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

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads,
        head_dim]; returns [num_tokens, num_heads * head_dim]."""
        key_cache, value_cache = kv_cache[:, self._layer, 0], kv_cache[:, self._layer, 1]
        self._backend.write_kv(key, value, key_cache, value_cache, metadata.slot_mapping)
        output = self._backend.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata,
            scale=self._scale,
            sliding_window=self._sliding_window,
        )
        return output.flatten(1)


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x).

    On CPUs torch computes what its vector loop leaves over at the end of a thread's share by
    another formula, whose last bit differs, so a row's result would depend on where it stands. The
    operations used here have no such remainder.
    """
    if x.device.type != "cpu":
        return nn.functional.silu(x)
    wide = x.float()
    return (wide / torch.exp(-wide).add_(1)).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016); on CPUs as `silu` does it."""
    if x.device.type != "cpu":
        return nn.functional.gelu(x, approximate="tanh")
    wide = x.float()
    inner = (wide * wide * wide).mul_(0.044715).add_(wide).mul_(math.sqrt(2 / math.pi))
    return (torch.tanh(inner).add_(1) * wide).mul_(0.5).to(x.dtype)


ACTIVATIONS: dict[str, Activation] = {
    "silu": silu,
    "swish": silu,
    "relu": nn.functional.relu,
    "gelu": nn.functional.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
}
"""By the names that `config.json` uses."""
