"""Where a model's tensors live, and which share of them."""

from dataclasses import dataclass, field
from typing import TypedDict

import torch

from worker_service.parallel.layout import Layout
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

    ranks: Ranks = field(default_factory=lambda: Ranks(Layout()))

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the KV cache."""
        return self.dtype if self.cache_dtype is None else self.cache_dtype

    def as_kwargs(self) -> _TensorOptions:
        """For torch's constructors."""
        return {"dtype": self.dtype, "device": self.device}
