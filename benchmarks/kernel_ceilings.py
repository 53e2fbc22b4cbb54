"""What bounds kernels: `benchmarks.ceilings`, and how fast a device copies and its bus is."""

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks import ceilings

_COPY_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class KernelCeilings:
    """Bytes and floating-point operations per second."""

    read: float
    copy: float
    """Read and written bytes together."""

    products: dict[torch.dtype, float]

    bus: float | None
    """Between pinned host memory and a GPU, the slower direction."""


def measure_ceilings(device: torch.device, dtypes: list[torch.dtype]) -> KernelCeilings:
    """Takes some seconds."""
    found = {dtype: ceilings.measure(dtype, device) for dtype in dtypes}
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    copy = partial(torch.empty_like(source).copy_, source)
    return KernelCeilings(
        read=max(each.read_bytes_per_s for each in found.values()),
        copy=2 * _COPY_BYTES / ceilings.seconds(copy, device),
        products={dtype: each.flops_per_s for dtype, each in found.items()},
        bus=_bus(device) if device.type == "cuda" else None,
    )


def _bus(device: torch.device) -> float:
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(2**28, dtype=torch.uint8, device=device)
    ways = (
        partial(there.copy_, host, non_blocking=True),
        partial(host.copy_, there, non_blocking=True),
    )
    return min(len(host) / ceilings.seconds(way, device) for way in ways)
