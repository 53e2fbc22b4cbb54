"""What a device can do at best, measured in the same run as the kernels."""

from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.stopwatch import median_seconds

REPEATS = 9


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes and floating point operations per second."""

    read: float
    """Of a tensor far larger than any cache, summed up."""

    copy: float
    """Read and written bytes together, of such a tensor copied."""

    products: dict[torch.dtype, float]
    """The best of some square matrix products."""

    bus: float | None
    """Between pinned host memory and a GPU, the slower direction."""


def measure_ceilings(device: torch.device, dtypes: list[torch.dtype]) -> Ceilings:
    """Takes some seconds."""
    is_gpu = device.type == "cuda"
    num_bytes = 2**31 if is_gpu else 2**28
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return Ceilings(
        read=num_bytes / _seconds(source.sum, device),
        copy=2 * num_bytes / _seconds(partial(target.copy_, source), device),
        products={dtype: _products(device, dtype) for dtype in dtypes},
        bus=_bus(device) if is_gpu else None,
    )


def _products(device: torch.device, dtype: torch.dtype) -> float:
    """On a CPU of weights as the worker lays them out, which is the fastest way it has."""
    best = 0.0
    for size in (4096, 8192) if device.type == "cuda" else (1024, 2048):
        rows, weight = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        operation = partial(torch.nn.functional.linear, rows, weight)
        if device.type == "cpu":
            from worker_service.models.packed_weight import can_pack, pack

            if can_pack(dtype, device):
                operation = partial(pack(weight).apply, rows)
        best = max(best, 2 * size**3 / _seconds(operation, device))
    return best


def _bus(device: torch.device) -> float:
    num_bytes = 2**28
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    both = (
        partial(there.copy_, host, non_blocking=True),
        partial(host.copy_, there, non_blocking=True),
    )
    return min(
        num_bytes / median_seconds(copy, device, repeats=REPEATS, capture=False) for copy in both
    )


def _seconds(operation: object, device: torch.device) -> float:
    assert callable(operation)
    return median_seconds(operation, device, repeats=REPEATS)
