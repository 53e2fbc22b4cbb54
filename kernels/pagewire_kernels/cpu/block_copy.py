"""Copies of whole KV blocks, by src/block_copy.cpp.

The cache is block-major, so a block, all layers, keys and values, is one contiguous piece of
memory. Copies are bound by memory bandwidth; stores bypass the processor's caches, which are
smaller than the blocks of most models.
"""

import ctypes
from functools import partial

from torch import Tensor

from pagewire_kernels.batch import move_all
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.tasks import BlockCopyTask

_SERIAL_BYTES = 1 << 16
"""Copies of fewer bytes end before other threads have woken up, and use one thread."""


def move_blocks(library: Library, source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks; as `reference.swap_blocks`.

    source, target: contiguous [num_blocks, ...], of equal dtypes and of equal shapes beyond the
    first axis; pairs: int64 [n, 2], existing blocks. If a block is both a source and a target, all
    sources are first read into a buffer. Raises ValueError for caches of different layouts.
    """
    if source.dtype != target.dtype or source.shape[1:] != target.shape[1:]:
        raise ValueError(
            f"target: expected blocks of {_layout(source)}, as in source, got {_layout(target)}"
        )
    if not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError("source, target: expected contiguous tensors of whole blocks")
    move_all(partial(_copy, library), source, target, pairs.contiguous(), source.device)


def _copy(library: Library, source: Tensor, target: Tensor, pairs: Tensor) -> None:
    block_bytes = source[:1].nbytes
    num_threads = threads.count_for(len(pairs) * block_bytes, _SERIAL_BYTES - 1)
    task = BlockCopyTask(
        num_threads=num_threads,
        source=source.data_ptr(),
        target=target.data_ptr(),
        pairs=pairs.data_ptr(),
        num_pairs=len(pairs),
        block_bytes=block_bytes,
    )
    threads.run(library.kernel("copy_blocks"), ctypes.addressof(task), num_threads)


def _layout(cache: Tensor) -> str:
    return f"{cache.dtype} {list(cache.shape[1:])}"
