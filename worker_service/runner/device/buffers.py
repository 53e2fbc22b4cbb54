"""Host memory of a step in flight."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker_service.array_types import Int32Array
from worker_service.pinned_memory import Column, Staging

_INITIAL_WORDS = 1024
_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class StepBuffers:
    """Host memory of one in-flight step: its inputs, and the outcome that the device writes."""

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self._masks = Staging(device)
        self._pinned = device.type == "cuda"
        self._fetched = self._allocate(_INITIAL_WORDS)

    def send_bitmask(self, bitmask: Int32Array, target: Tensor | None) -> Tensor:
        """Copy a bitmask to the device, to the first rows of a larger one if there is a target."""
        where = None if target is None else target.view(-1).view(torch.uint8)
        sent = self._masks.send([bitmask], where)[0]
        return sent if target is None else target

    def fetch(self, tensors: Sequence[Tensor]) -> list[Column]:
        """Copy tensors, whose elements have four or eight bytes, to the host in one copy. Returns
        the memory that holds them once the device is done."""
        words = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
        size = sum(map(len, words))
        if size > len(self._fetched):
            self._fetched = self._allocate(2 * size)
        packed = words[0] if len(words) == 1 else torch.cat(words)
        self._fetched[:size].copy_(packed, non_blocking=True)
        parts = self._fetched[:size].split([len(part) for part in words])
        return [
            part.numpy().view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def _allocate(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=self._pinned)
