"""Where a model's tensors live."""

from dataclasses import dataclass
from typing import TypedDict

import torch


class _TensorOptions(TypedDict):
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Type and place of weights, activations and KV."""

    dtype: torch.dtype
    device: torch.device

    def as_kwargs(self) -> _TensorOptions:
        """For torch's constructors."""
        return {"dtype": self.dtype, "device": self.device}
