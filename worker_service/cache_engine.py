"""The KV caches on device and host, and the operations that move whole blocks.

The layout is block-major, `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`: one
block, all layers, keys and values, is one contiguous piece of memory, so that swapping it out,
swapping it in and copying it are one copy each.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.reference import swap_blocks
from worker_service.errors import InvalidPlan
from worker_service.models.interface import KVCacheSpec
from worker_service.plan import Int32Array, StepPlan

_ALIGNMENT = 4096


class CacheEngine:
    """Both caches of one worker."""

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        device: torch.device,
    ) -> None:
        self.device_cache = _allocate(spec, block_size, num_gpu_blocks, device)
        self.host_cache = _allocate(spec, block_size, num_cpu_blocks, torch.device("cpu"))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None and num_cpu_blocks:
            self.host_cache = self.host_cache.pin_memory()

    def fits(self, num_gpu_blocks: int, num_cpu_blocks: int) -> bool:
        """Whether the caches have just these sizes."""
        return (len(self.device_cache), len(self.host_cache)) == (num_gpu_blocks, num_cpu_blocks)

    def execute(self, plan: StepPlan) -> None:
        """Swap out, swap in and copy, in this order; each reads all its sources, then writes.

        Raises InvalidPlan for a block that neither cache has. On a GPU the copies run on a stream
        of their own, between the work queued before and the work queued after.
        """
        if len(plan.swap_out) == len(plan.swap_in) == len(plan.copy) == 0:
            return
        device, host = self.device_cache, self.host_cache
        moves = (
            ("swap_out", plan.swap_out, device, host),
            ("swap_in", plan.swap_in, host, device),
            ("copy", plan.copy, device, device),
        )
        for field, pairs, source, target in moves:
            _check(pairs, source, target, field)
        with self._side_stream():
            for _, pairs, source, target in moves:
                if len(pairs):
                    swap_blocks(source, target, torch.from_numpy(pairs.astype(np.int64)))

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        compute_stream = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_event(compute_stream.record_event())
        with torch.cuda.stream(self._stream):
            yield
        compute_stream.wait_event(self._stream.record_event())


def _allocate(spec: KVCacheSpec, block_size: int, num_blocks: int, device: torch.device) -> Tensor:
    """A zeroed cache. In host memory, pages take up room only once they are written to."""
    shape = (num_blocks, spec.num_layers, 2, block_size, spec.num_kv_heads, spec.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    num_bytes = num_blocks * spec.block_bytes(block_size)
    memory = torch.from_numpy(np.zeros(num_bytes + _ALIGNMENT, np.uint8))
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes].view(spec.dtype).view(shape)


def _check(pairs: Int32Array, source: Tensor, target: Tensor, field: str) -> None:
    if len(pairs) == 0:
        return
    low, high = pairs.min(axis=0), pairs.max(axis=0)
    if low.min() < 0 or high[0] >= len(source) or high[1] >= len(target):
        limits = f"blocks below {len(source)} as source and below {len(target)} as target"
        raise InvalidPlan(field, f"expected {limits}")
