"""How whole blocks are moved between the caches, and within one.

Where to go by what was measured on an H200 with pinned host memory and blocks of 64 KB: one copy
per block reaches 10 GB/s, a kernel that reads and writes the host's memory in place 51 GB/s for
any number of scattered blocks, and plain copies 32 GB/s at 1 MB, 53 at 16 MB and 55 at 256 MB. A
copy keeps no multiprocessor from computing beside it. So long runs of neighbours are copied, and
everything else is the kernel's.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.reference import swap_blocks
from worker_service.plan import Int32Array

MIN_COPY_BYTES = 8 * 2**20
"""A run of neighbours from this size on is as fast by a copy as by the kernel."""


class BlockMover(Protocol):
    """Moves blocks without waiting for a device. Pairs: int32 [n, 2] of (source, target)."""

    def swap(self, source: Tensor, target: Tensor, pairs: Int32Array) -> None:
        """From one cache to the other; no target twice."""
        ...

    def copy(self, cache: Tensor, pairs: Int32Array) -> None:
        """Within a cache; all sources are read before any target is written."""
        ...


class CopyMover:
    """Plain copies, of neighbours that go to neighbouring places together."""

    def swap(self, source: Tensor, target: Tensor, pairs: Int32Array) -> None:
        for run in _runs(pairs):
            _copy_run(source, target, run)

    def copy(self, cache: Tensor, pairs: Int32Array) -> None:
        if len(pairs):
            swap_blocks(cache, cache, _as_tensor(pairs))


class KernelMover:
    """A kernel for scattered blocks, many in one launch, and copies for long runs."""

    def __init__(
        self,
        move: Callable[[Tensor, Tensor, Tensor], None],
        min_copy_bytes: int = MIN_COPY_BYTES,
    ) -> None:
        """move: as `pagewire_kernels.reference.swap_blocks`, on a GPU."""
        self._move = move
        self._min_copy_bytes = min_copy_bytes

    def swap(self, source: Tensor, target: Tensor, pairs: Int32Array) -> None:
        scattered = []
        min_blocks = -(-self._min_copy_bytes // max(1, source[:1].nbytes))
        for run in _runs(pairs):
            if len(run) >= min_blocks:
                _copy_run(source, target, run)
            else:
                scattered.append(run)
        if scattered:
            self._move(source, target, _as_tensor(np.concatenate(scattered)))

    def copy(self, cache: Tensor, pairs: Int32Array) -> None:
        if len(pairs):
            self._move(cache, cache, _as_tensor(pairs))


def mover_for(device: torch.device) -> BlockMover:
    """The fastest way on `device`."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from pagewire_kernels.gpu import move_blocks

        return KernelMover(move_blocks)
    return CopyMover()


def _runs(pairs: Int32Array) -> Iterator[Int32Array]:
    """Pairs cut where neighbours do not go to neighbouring places."""
    if len(pairs):
        yield from np.split(pairs, np.flatnonzero((np.diff(pairs, axis=0) != 1).any(axis=1)) + 1)


def _copy_run(source: Tensor, target: Tensor, run: Int32Array) -> None:
    (first, second), count = run[0].tolist(), len(run)
    target[second : second + count].copy_(source[first : first + count], non_blocking=True)


def _as_tensor(pairs: Int32Array) -> Tensor:
    return torch.from_numpy(pairs.astype(np.int64))
