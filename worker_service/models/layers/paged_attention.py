"""Attention of a layer over the paged cache."""

from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, LayerCaches
from pagewire_kernels.interface import AttentionBackend


class PagedAttention:
    """Attention of one layer: writes new keys and values to its part of the cache, and attends over
    it."""

    def __init__(
        self,
        backend: AttentionBackend,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        value_dim: int | None = None,
    ) -> None:
        """sinks: [num_heads], scores that take part in the softmax without a value; value_dim: the
        first elements of each head of the result that are used, None for all."""
        self._backend = backend
        self._scale = scale
        self._sliding_window = sliding_window
        self._soft_cap = soft_cap
        self._sinks = sinks
        self._alibi_slopes = alibi_slopes
        self._value_dim = value_dim
        self.key_scale = self.value_scale = 1.0
        """Keys and values are divided by these scales when they are written to an fp8 cache."""

    def write(
        self, key: Tensor, value: Tensor, caches: LayerCaches, metadata: AttentionMetadata
    ) -> None:
        """Write new keys and values to the cache: [num_tokens, num_kv_heads, head_dim] each."""
        self._backend.write_kv(
            key,
            value,
            *caches,
            metadata.slot_mapping,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    def attend(self, query: Tensor, caches: LayerCaches, metadata: AttentionMetadata) -> Tensor:
        """Attend over the cache. query: [num_tokens, num_heads, head_dim]. Returns
        [num_tokens, num_heads * head_dim]; elements of a head after `value_dim` may be
        uninitialized."""
        output = self._backend.paged_attention(
            query,
            *caches,
            metadata,
            scale=self._scale,
            sliding_window=self._sliding_window,
            soft_cap=self._soft_cap,
            sinks=self._sinks,
            alibi_slopes=self._alibi_slopes,
            value_dim=self._value_dim,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )
        return output.flatten(1)
