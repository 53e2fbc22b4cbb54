"""Where a model's tensors live, and which share of them."""

from dataclasses import dataclass, field
from typing import TypedDict

import torch

from worker_service.distributed.layout import Layout
from worker_service.parallel.ranks import Ranks


class _TensorOptions(TypedDict):
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Type and place of weights, activations and KV, and the ranks that share them."""

    dtype: torch.dtype
    device: torch.device

    cache_dtype: torch.dtype | None = None
    """Of the KV cache, where it differs."""

    batch_invariant: bool = False
    """Whether a GPU, too, must compute a row the same in any batch, bitwise."""

    ranks: Ranks = field(default_factory=lambda: Ranks(Layout()))

    @property
    def needs_fixed_products(self) -> bool:
        """Whether linear layers must go through a kernel of our own for that."""
        return self.batch_invariant and self.device.type == "cuda"

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the KV cache."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    def as_kwargs(self) -> _TensorOptions:
        """For torch's constructors."""
        return {"dtype": self.dtype, "device": self.device}
