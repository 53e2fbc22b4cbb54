"""What all native models share: embedding of weights' names, loading and packing."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from pagewire_kernels.metadata import AttentionMetadata
from worker_service.models.interface import KVCacheSpec
from worker_service.models.linear import Linear


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """Where a checkpoint's tensor goes: often a view of a larger, stacked one."""

    name: str
    """As in the checkpoint, in the model's canonical form."""

    target: Tensor
    """Of the tensor's shape."""


class NativeModel(nn.Module, ABC):
    """A model in our own code. A subclass fills in the attributes and the three methods."""

    optional_names: ClassVar[re.Pattern[str]] = re.compile(r"lm_head\.weight")
    """Canonical names that a checkpoint may hold though there is no slot for them, such as that of
    a head that is tied to the embedding."""

    kv_cache_spec: KVCacheSpec
    architecture: str
    vocab_size: int
    max_model_len: int
    num_parameters: int
    """Numbers in the checkpoint, a tied one counted once; known once loading is finished."""

    @abstractmethod
    def weight_slots(self) -> Iterator[WeightSlot]:
        """Where each tensor of a checkpoint goes; every slot must be filled."""

    @abstractmethod
    def canonical_name(self, name: str) -> str:
        """The name a slot has for what a checkpoint calls `name`."""

    @abstractmethod
    def run_layers(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """As `forward`, without regard to autograd."""

    @abstractmethod
    def head(self) -> nn.Module:
        """From hidden states to logits."""

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> Tensor:
        """Last hidden states of all rows, [num_tokens, hidden_size]; see `interface.Model`."""
        return self.run_layers(token_ids, positions, kv_cache, metadata)

    @torch.inference_mode()
    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits of chosen rows: float32 [num_rows, vocab_size]."""
        logits: Tensor = self.head()(hidden_states)
        return logits.float()

    def finish_loading(self) -> None:
        """Lay the weights out for the device. To be called once, with all slots filled."""
        self.num_parameters = sum(slot.target.numel() for slot in self.weight_slots())
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()


def linear_slots(name: str, linear: Linear) -> Iterator[WeightSlot]:
    """Slots of a linear layer that the checkpoint holds as one."""
    yield from stacked_slots([name], linear, None)


def stacked_slots(
    names: list[str], linear: Linear, sizes: list[int] | None
) -> Iterator[WeightSlot]:
    """Slots of several linear layers that we compute as one; `sizes` are their out_features."""
    assert linear.weight is not None
    parts = linear.weight.split(sizes) if sizes else [linear.weight]
    for name, part in zip(names, parts, strict=True):
        yield WeightSlot(f"{name}.weight", part)
    if linear.bias is not None:
        parts = linear.bias.split(sizes) if sizes else [linear.bias]
        for name, part in zip(names, parts, strict=True):
            yield WeightSlot(f"{name}.bias", part)


def norm_slots(name: str, norm: nn.Module) -> Iterator[WeightSlot]:
    """Slots of an RMSNorm or a LayerNorm."""
    for part in ("weight", "bias"):
        tensor = getattr(norm, part, None)
        if tensor is not None:
            yield WeightSlot(f"{name}.{part}", tensor)
