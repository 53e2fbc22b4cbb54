"""One interface over the attention implementations, and the choice between them."""

import logging
from typing import Protocol

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

BACKEND_NAMES = ("cpu", "reference")


class AttentionBackend(Protocol):
    """Writes and reads a paged KV cache. Arguments are those of `pagewire_kernels.reference`."""

    name: str

    def warm_up(self, dtype: torch.dtype) -> None:
        """Do now what the first call with a cache of `dtype` would have to do, such as compile."""
        ...

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        """Store each row's key and value in its slot."""
        ...

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
    ) -> Tensor:
        """Causal attention of flattened query rows over their sequences' cached blocks."""
        ...


class ReferenceBackend:
    """Plain torch, on any device; slow, since it takes sequence after sequence."""

    name = "reference"
    write_kv = staticmethod(reference.write_kv)
    paged_attention = staticmethod(reference.paged_attention)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Nothing to prepare."""


def select_backend(device: torch.device, name: str | None = None) -> AttentionBackend:
    """The backend called `name`, or the fastest one for `device`.

    Raises ValueError when there is no such backend, or when it does not run on `device`.
    """
    chosen = name or ("cpu" if device.type == "cpu" else "reference")
    reason = "asked for" if name else f"default for device type {device.type}"
    if chosen not in BACKEND_NAMES:
        expected = ", ".join(BACKEND_NAMES)
        raise ValueError(f"attention backend: expected one of {expected}, got {chosen!r}")
    if chosen == "cpu" and device.type != "cpu":
        raise ValueError(f"attention backend 'cpu' does not run on device {device}")
    logger.info("attention backend selected name=%s reason=%s", chosen, reason)
    return _make(chosen)


def _make(name: str) -> AttentionBackend:
    if name == "cpu":
        from pagewire_kernels.cpu import CpuBackend  # numba is loaded only where it is used

        return CpuBackend()
    return ReferenceBackend()
