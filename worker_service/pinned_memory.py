"""Host-to-device copies through pinned memory, without waiting for the device."""

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Column = npt.NDArray[Any]

ALIGNMENT = 16
"""Bytes: each column's offset is a multiple of this."""

_INITIAL_BYTES = 2**18
"""The inputs of some thousand tokens: pinning more memory waits for the device."""

_PORTABLE_AND_MAPPED = 1 | 2
"""`cudaHostRegisterPortable`: pinned for all devices; `cudaHostRegisterMapped`: kernels may read
and write it in place."""

_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Staging:
    """A pinned host buffer for asynchronous copies to a device.

    The device reads it after `send` returns, so the next `send` must wait for the copy's end.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = self._allocate(_INITIAL_BYTES)

    def send(self, columns: Sequence[Column], target: Tensor | None = None) -> list[Tensor]:
        """Copy columns, int32 or int64 of any shape, to the device, without waiting for it.

        target: uint8; the destination of the columns, one after the other, if they fit.
        """
        starts, size = [], 0
        for column in columns:
            starts.append(size)
            size += -(-column.nbytes // ALIGNMENT) * ALIGNMENT
        if size > len(self._host):
            self._host = self._allocate(2 * size)
        host = self._host.numpy()
        for start, column in zip(starts, columns, strict=True):
            host[start : start + column.nbytes] = column.reshape(-1).view(np.uint8)
        if target is None or size > len(target):
            target = torch.empty(size, dtype=torch.uint8, device=self._device)
        target[:size].copy_(self._host[:size], non_blocking=True)
        return [
            target[start : start + column.nbytes].view(_DTYPES[column.dtype]).view(column.shape)
            for start, column in zip(starts, columns, strict=True)
        ]

    def _allocate(self, size: int) -> Tensor:
        pinned = self._device.type == "cuda"
        return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)


def pin_in_place(memory: npt.NDArray[np.uint8]) -> None:
    """Pin host memory for GPUs until it is freed. Raises torch.cuda.CudaError if that fails.

    `Tensor.pin_memory` copies to memory of torch's own allocator, which rounds its size up to a
    power of two and keeps it once it is freed.
    """
    runtime, address = torch.cuda.cudart(), memory.ctypes.data
    torch.cuda.check_error(
        int(runtime.cudaHostRegister(address, memory.nbytes, _PORTABLE_AND_MAPPED))
    )
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False


def upload(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy values to a device without waiting for it, on a GPU through pinned memory.

    On a CPU they are not copied.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor
