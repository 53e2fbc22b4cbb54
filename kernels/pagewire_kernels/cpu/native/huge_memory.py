"""Memory in huge pages, for what is read from beginning to end again and again.

With pages of 4 KiB a processor walks page tables at every 4 KiB of weights, and its prefetchers
stop there.
"""

import mmap

import torch
from torch import Tensor

PAGE_BYTES = 2 << 20
"""What pieces of memory are sized and aligned by."""

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 4096


class HugeMemory:
    """Hands out pieces of large chunks; a chunk is freed with the last of its pieces.

    Only what was written to takes up memory, in whole huge pages where the system grants them.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> Tensor:
        """Zeros: uint8 [num_bytes], aligned to pages of 4 KiB."""
        if num_bytes > self._chunk.numel() - self._used:
            self._chunk, self._used = _chunk(max(num_bytes, _CHUNK_BYTES)), 0
        piece = self._chunk[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        return piece


def _chunk(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes + PAGE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    chunk = torch.frombuffer(memory, dtype=torch.uint8)
    start = -chunk.data_ptr() % PAGE_BYTES
    return chunk[start : start + num_bytes]
