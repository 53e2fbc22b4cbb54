"""What an attention backend can do and what a model needs of it, both as data."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

FP8 = torch.float8_e4m3fn
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionNeeds:
    """What a model and its cache ask of attention."""

    dtype: torch.dtype
    """Of queries, and of new keys and values."""

    head_dim: int

    cache_dtype: torch.dtype | None = None
    """`float8_e4m3fn`, or None for that of the keys."""

    block_size: int | None = None
    """Tokens per block; None takes the backend's own choice."""

    sliding_window: bool = False
    soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False

    batch_invariant: bool = False
    """Whether a row's result must not depend, bitwise, on its batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Abilities:
    """What a backend can do."""

    devices: tuple[str, ...]
    """Types of the devices it runs on; empty for all."""

    dtypes: tuple[torch.dtype, ...] = FLOATS
    fp8_cache: bool = False
    sliding_window: bool = True
    soft_cap: bool = True
    sinks: bool = True
    alibi: bool = True
    batch_invariant: bool = False

    max_head_dim: int | None = None
    head_dim_multiple: int = 1

    block_multiple: int = 1
    """Tokens per block must be a multiple of this."""

    default_block_size: int = 16
    """Tokens per block where nobody says otherwise."""

    def obstacles(self, needs: AttentionNeeds) -> Iterator[str]:
        """What stands between this backend and a model; nothing if it can serve it."""
        if needs.dtype not in self.dtypes:
            yield f"does not compute in {_name(needs.dtype)}"
        if needs.cache_dtype == FP8 and not self.fp8_cache:
            yield "has no fp8 cache (--kv-cache-dtype)"
        if self.max_head_dim is not None and needs.head_dim > self.max_head_dim:
            yield f"takes heads of at most {self.max_head_dim} elements, not {needs.head_dim}"
        if needs.head_dim % self.head_dim_multiple:
            multiple = self.head_dim_multiple
            yield f"takes heads of a multiple of {multiple} elements, not {needs.head_dim}"
        if needs.block_size is not None and needs.block_size % self.block_multiple:
            multiple, got = self.block_multiple, needs.block_size
            yield f"takes blocks of a multiple of {multiple} tokens (--block-size), not {got}"
        for feature, name in _FEATURES.items():
            if getattr(needs, feature) and not getattr(self, feature):
                yield name


_FEATURES = {
    "sliding_window": "has no sliding window",
    "soft_cap": "has no soft cap",
    "sinks": "has no attention sinks",
    "alibi": "has no ALiBi biases",
    "batch_invariant": "is not batch-invariant",
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
