"""Weights laid out for a CPU's vector units, once, after loading.

The native kernels take float32 and bfloat16 where they were built. oneDNN takes the rest, and
bfloat16 where the processor multiplies matrices in tiles (AMX), which the native kernels do not
use. Both compute a row bitwise alike whatever rows are beside it; torch's own `linear` does not.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from pagewire_kernels.cpu.native import (
    HugeMemory,
    Library,
    NativeGatedWeight,
    NativeWeight,
    library,
)
from pagewire_kernels.cpu.native import linear as native
from worker_service.models.onednn_weight import OneDNNWeight


class PackedWeight(Protocol):
    """A weight [out_features, in_features] in some layout of its own."""

    out_features: int
    in_features: int

    def apply(
        self, rows: Tensor, bias: Tensor | None = None, *, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, out_features].

        output_dtype: the weight's, or float32.
        """
        ...


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has a packed product for `dtype`."""
    if device.type != "cpu":
        return False
    return _native_library(dtype) is not None or OneDNNWeight.can_pack(dtype)


def pack(weight: Tensor) -> PackedWeight:
    """A packed copy of a weight that can be packed."""
    native_library = _native_library(weight.dtype)
    if native_library is None:
        return OneDNNWeight(weight)
    return NativeWeight(weight, native_library, _memory())


def pack_gated(weight: Tensor, activation: str) -> NativeGatedWeight | None:
    """A packed copy of a gate's weight and, after it, that of what it gates, if this machine has
    a product that computes both and applies the gate."""
    native_library = _native_library(weight.dtype) if weight.device.type == "cpu" else None
    if native_library is None:
        return None
    return NativeGatedWeight(weight, activation, native_library, _memory())


def _native_library(dtype: torch.dtype) -> Library | None:
    tiles = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return library() if dtype in native.DTYPES and not tiles else None


@cache
def _memory() -> HugeMemory:
    return HugeMemory()
