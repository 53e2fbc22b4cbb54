"""How whole blocks are moved between the caches, and within one.

On a GPU, by what was measured on an H200 with pinned host memory and blocks of 64 KB: one copy
per block reaches 10 GB/s, a kernel that reads and writes the host's memory in place 51 GB/s for
any number of scattered blocks, and plain copies 32 GB/s at 1 MB, 53 at 16 MB and 55 at 256 MB. A
copy keeps no multiprocessor from computing beside it. So long runs of neighbours are copied, and
everything else is the kernel's. On a CPU a kernel of its own has all threads copy, past the caches.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels.block_pairs import is_chained
from pagewire_kernels.cpu.native import Library, library, move_blocks
from pagewire_kernels.reference import swap_blocks
from worker_service.array_types import Int32Array

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
        for start, length in _runs(pairs).tolist():
            _copy_run(source, target, pairs[start : start + length])

    def copy(self, cache: Tensor, pairs: Int32Array) -> None:
        if is_chained(_as_tensor(pairs)):
            swap_blocks(cache, cache, _as_tensor(pairs))
        else:
            self.swap(cache, cache, pairs)


class NativeMover:
    """A kernel in C++ for caches in a CPU's memory, many blocks in one launch."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def swap(self, source: Tensor, target: Tensor, pairs: Int32Array) -> None:
        if len(pairs):
            move_blocks(self._library, source, target, _as_tensor(pairs))

    def copy(self, cache: Tensor, pairs: Int32Array) -> None:
        self.swap(cache, cache, pairs)


class KernelMover:
    """A GPU's kernel for scattered blocks, many in one launch, and copies for long runs."""

    def __init__(
        self,
        move: Callable[[Tensor, Tensor, Tensor], None],
        min_copy_bytes: int = MIN_COPY_BYTES,
    ) -> None:
        """move: as `pagewire_kernels.reference.swap_blocks`, on a GPU."""
        self._move = move
        self._min_copy_bytes = min_copy_bytes

    def swap(self, source: Tensor, target: Tensor, pairs: Int32Array) -> None:
        runs = _runs(pairs)
        is_long = runs[:, 1] * source[:1].nbytes >= self._min_copy_bytes
        for start, length in runs[is_long].tolist():
            _copy_run(source, target, pairs[start : start + length])
        scattered = pairs[np.repeat(~is_long, runs[:, 1])]
        if len(scattered):
            self._move(source, target, _as_tensor(scattered))

    def copy(self, cache: Tensor, pairs: Int32Array) -> None:
        if len(pairs):
            self._move(cache, cache, _as_tensor(pairs))


def mover_for(device: torch.device) -> BlockMover:
    """The fastest way on `device`."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from pagewire_kernels import gpu  # triton is loaded only where it is used

        return KernelMover(gpu.move_blocks)
    found = library() if device.type == "cpu" else None
    return CopyMover() if found is None else NativeMover(found)


def _runs(pairs: Int32Array) -> npt.NDArray[np.int64]:
    """(start, length) of each run of pairs whose neighbours go to neighbouring places."""
    is_first = np.ones(len(pairs), np.bool_)
    is_first[1:] = (np.diff(pairs, axis=0) != 1).any(axis=1)
    starts = np.flatnonzero(is_first)
    return np.stack([starts, np.diff(starts, append=len(pairs))], axis=1)


def _copy_run(source: Tensor, target: Tensor, run: Int32Array) -> None:
    (first, second), count = run[0].tolist(), len(run)
    target[second : second + count].copy_(source[first : first + count], non_blocking=True)


def _as_tensor(pairs: Int32Array) -> Tensor:
    return torch.from_numpy(pairs.astype(np.int64))
