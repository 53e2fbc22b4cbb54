"""The `flash` attention backend."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagewire_kernels.backends.abilities import Abilities
from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.flash_attention import FlashCall


class FlashBackend:
    """FlashAttention through one of its packages; cache writes by `write`."""

    name = "flash"

    def __init__(self, call: FlashCall, write: Callable[..., None]) -> None:
        """write: stores rows in their slots, as `reference.write_kv` does."""
        self._call = call
        self._write = write

    @property
    def abilities(self) -> Abilities:
        """Those of the package."""
        return self._call.abilities

    @property
    def version(self) -> str:
        """The package, for the log."""
        return self._call.version

    def warm_up(self, dtype: torch.dtype) -> None:
        """Nothing to prepare: its kernels come compiled."""

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:
        """Store each row's key and value in its slot; as `reference.write_kv`."""
        _refuse(key_scale != 1.0 or value_scale != 1.0, "scaled caches")
        self._write(key, value, key_cache, value_cache, slot_mapping)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> Tensor:
        """Causal attention of flattened query rows; as `reference.paged_attention`."""
        able = self.abilities
        _refuse(sinks is not None, "attention sinks")
        _refuse(alibi_slopes is not None and not able.alibi, "ALiBi biases")
        _refuse(soft_cap is not None and not able.soft_cap, "a soft cap")
        _refuse(key_scale != 1.0 or value_scale != 1.0, "scaled caches")
        _refuse(query.dtype != key_cache.dtype, f"a cache of {key_cache.dtype}")
        block_size = key_cache.shape[1]
        _refuse(block_size % able.block_multiple != 0, f"blocks of {block_size} tokens")
        return self._call(
            query if query.stride(-1) == 1 else query.contiguous(),
            key_cache,
            value_cache,
            metadata,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            alibi_slopes=alibi_slopes,
        )


def _refuse(condition: bool, feature: str) -> None:
    if condition:
        raise ValueError(f"attention backend 'flash' does not do {feature}")
