"""An attention backend and the operations around it, chosen together."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pagewire_kernels.backends.abilities import AttentionNeeds
from pagewire_kernels.backends.interface import AttentionBackend
from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.computed import Computed
from pagewire_kernels.interface import LayerKernels, TorchLayerKernels
from pagewire_kernels.select import select_backend

logger = logging.getLogger(__name__)

Embed = Callable[[Tensor, Tensor], Tensor]
"""Of token ids and positions, to the residual stream."""

Layers = Callable[[Tensor, Tensor, Tensor, AttentionMetadata], Tensor]
"""Of the residual stream, positions, the KV cache and the metadata, to hidden states."""

Head = Callable[[Tensor], Tensor]
"""Of hidden states, to logits, float32 [num_rows, vocab_size]."""


class ForwardFn(Protocol):
    """A model's embedding and layers and, where that is as well, its head."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        sampled: Tensor | None = None,
    ) -> Computed:
        """token_ids, positions: int64 [num_tokens]; sampled: int64, the rows for the head."""
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model computes with, but for its matrix products."""

    attention: AttentionBackend
    layers: LayerKernels

    def prepare(self, embed: Embed, layers: Layers, head: Head) -> ForwardFn:
        """What computes the same as a model's parts: they themselves, or a recorded program."""
        if self.layers.name == "native":
            from pagewire_kernels.cpu.native import library
            from pagewire_kernels.cpu.native.recorded import RecordedModel

            found = library()
            if found is not None:
                return RecordedModel(embed, layers, head, found)

        def whole(
            token_ids: Tensor,
            positions: Tensor,
            kv_cache: Tensor,
            metadata: AttentionMetadata,
            sampled: Tensor | None = None,
        ) -> Computed:
            x = embed(token_ids, positions)
            return Computed(layers(x, positions, kv_cache, metadata))

        return whole


def select_kernels(
    device: torch.device, needs: AttentionNeeds, attention: str | None = None
) -> Kernels:
    """The attention backend as `select_backend` chooses it, and the layer kernels beside it."""
    backend = select_backend(device, attention, needs)
    layers = layer_kernels(backend, device, needs.dtype)
    logger.info("layer kernels selected name=%s", layers.name)
    return Kernels(backend, layers)


def layer_kernels(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype
) -> LayerKernels:
    """The fastest for the device, or plain torch beside plain torch."""
    if backend.name in ("triton", "flash"):
        from pagewire_kernels.gpu import TritonLayerKernels  # triton is loaded where it is used

        return TritonLayerKernels()
    if device.type == "cpu" and backend.name == "cpu":
        from pagewire_kernels.cpu.native import library
        from pagewire_kernels.cpu.native.layers import DTYPES, NativeLayerKernels

        found = library()
        if found is not None and dtype in DTYPES:
            return NativeLayerKernels(found)
    return TorchLayerKernels()
