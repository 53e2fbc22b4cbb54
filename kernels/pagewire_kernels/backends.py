"""One interface over the attention implementations, and the choice between them."""

import logging
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

BACKEND_NAMES = ("cpu", "triton", "reference")


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


def select_backend(
    device: torch.device, name: str | None = None, *, batch_invariant: bool = False
) -> AttentionBackend:
    """The backend called `name`, or the fastest proven one for `device`.

    With `batch_invariant`, a row's result does not depend on its batch, bitwise; the `cpu` backend
    always keeps that promise, and others may be slower for it. Raises ValueError when there is no
    such backend, or when it does not run on `device` or keep the promise.
    """
    chosen, reason = (name, "asked for") if name else _default(device)
    if chosen not in BACKEND_NAMES:
        expected = ", ".join(BACKEND_NAMES)
        raise ValueError(f"attention backend: expected one of {expected}, got {chosen!r}")
    if (chosen == "cpu" and device.type != "cpu") or (chosen == "triton" and device.type != "cuda"):
        raise ValueError(f"attention backend {chosen!r} does not run on device {device}")
    if chosen == "triton" and not _has_triton():
        raise ValueError("attention backend 'triton': expected the package triton, found none")
    if chosen == "reference" and batch_invariant:
        raise ValueError("attention backend 'reference' is not batch-invariant")
    logger.info("attention backend selected name=%s reason=%s", chosen, reason)
    return _make(chosen, batch_invariant)


def _default(device: torch.device) -> tuple[str, str]:
    """The name of a device's fastest proven backend, and why it is that."""
    if device.type == "cpu":
        return "cpu", "default for device type cpu"
    # Not yet `triton` on a GPU: its kernels are proved in the interpreter and compile, but have
    # never run on one.
    return "reference", f"default for device type {device.type}"


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _make(name: str, batch_invariant: bool) -> AttentionBackend:
    if name == "cpu":
        from pagewire_kernels.cpu import CpuBackend  # numba is loaded only where it is used

        return CpuBackend()
    if name == "triton":
        from pagewire_kernels.gpu import TritonBackend  # as is triton

        return TritonBackend(batch_invariant=batch_invariant)
    return ReferenceBackend()
