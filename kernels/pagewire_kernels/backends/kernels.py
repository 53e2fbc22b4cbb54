"""An attention backend and the operations around it, chosen together."""

import logging
from dataclasses import dataclass

import torch

from pagewire_kernels.backends.abilities import AttentionNeeds
from pagewire_kernels.backends.interface import AttentionBackend
from pagewire_kernels.backends.select import select_backend
from pagewire_kernels.layer_kernels import LayerKernels, TorchLayerKernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a model computes with, but for its matrix products."""

    attention: AttentionBackend
    layers: LayerKernels


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
        from pagewire_kernels.gpu import (
            TritonLayerKernels,
        )  # triton is loaded only where it is used

        return TritonLayerKernels()
    return TorchLayerKernels()
