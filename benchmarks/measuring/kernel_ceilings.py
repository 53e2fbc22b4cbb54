"""The ceilings of kernels: those of `ceilings`, and the speed of copies and of the bus."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from benchmarks.measuring import ceilings

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
    """Measure the ceilings of a device, which takes a few seconds."""
    return KernelCeilings(
        read=ceilings.reads(device).rate(),
        copy=2 * _COPY_BYTES / min(ceilings.seconds(copy, device) for copy in _copies(device)),
        products={dtype: ceilings.products(dtype, device).rate() for dtype in dtypes},
        bus=_bus(device) if device.type == "cuda" else None,
    )


def _copies(device: torch.device) -> Iterator[Callable[[], object]]:
    """Ways to copy `_COPY_BYTES`; on a CPU those of torch and of the C library, which bypasses the
    processor's caches for this size."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield partial(target.copy_, source)
    if device.type == "cpu":
        num_threads = torch.get_num_threads()
        parts = [np.array_split(tensor.numpy(), num_threads) for tensor in (target, source)]
        with ThreadPoolExecutor(num_threads) as pool:
            yield lambda: list(pool.map(np.copyto, *parts))


def _bus(device: torch.device) -> float:
    host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(2**28, dtype=torch.uint8, device=device)
    ways = (
        partial(there.copy_, host, non_blocking=True),
        partial(host.copy_, there, non_blocking=True),
    )
    return min(len(host) / ceilings.seconds(way, device) for way in ways)
