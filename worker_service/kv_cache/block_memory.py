"""The blocks of a model's caches, as transfers read and write them."""

import torch
from torch import Tensor

from worker_service.block_transfer.memory import CacheAddresses
from worker_service.kv_cache.cache_engine import CacheEngine


class CacheMemory:
    """Implements `worker_service.block_transfer.memory.BlockMemory` over a `CacheEngine`.

    A GPU's blocks are copied on a stream of their own, beside what it computes: whoever calls
    knows that no step in flight touches them.
    """

    def __init__(self, cache: CacheEngine) -> None:
        self._device, self._host = cache.device_cache, cache.host_cache
        self.num_device_blocks, self.num_host_blocks = len(self._device), len(self._host)
        self.block_bytes = self._device[:1].nbytes
        on_gpu = self._device.device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device.device) if on_gpu else None

    @property
    def addresses(self) -> CacheAddresses:
        """Addresses of what is in host memory."""
        return CacheAddresses(
            device=0 if self._stream is not None else self._device.data_ptr(),
            host=self._host.data_ptr() if self.num_host_blocks else 0,
        )

    def source(self, block: int) -> memoryview:
        """The bytes of a block."""
        row = self._device[block] if block >= 0 else self._host[~block]
        if self._stream is not None and block >= 0:
            with torch.cuda.stream(self._stream):
                row = row.cpu()  # waits for the copy
        return _view(row)

    def target(self, block: int) -> memoryview:
        """Where a block is written."""
        if self._stream is None:
            return _view(self._device[block])
        return memoryview(bytearray(self.block_bytes))

    def commit(self, block: int, data: memoryview) -> None:
        """Copy a block to a GPU."""
        if self._stream is None:
            return
        with torch.cuda.stream(self._stream):
            self._device[block].copy_(torch.frombuffer(data, dtype=torch.uint8))
        self._stream.synchronize()


def _view(row: Tensor) -> memoryview:
    return row.numpy().data
