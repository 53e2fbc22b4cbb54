"""What constraints exclude: minus infinity over every token whose bit is 0."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels import reference
from worker_service.sampler.upload import upload
from worker_service.structured.masks import MaskedRows


def apply_masks(logits: Tensor, masked: MaskedRows | None) -> None:
    """Masks rows in place. logits: float32 [n, vocab_size]."""
    if masked is None:
        return
    if not logits.is_cpu:
        rows, bitmask = upload(masked.rows, logits.device), upload(masked.bitmask, logits.device)
        reference.apply_bitmask(logits, rows, bitmask)
        return
    # numpy unpacks bits with vector instructions; torch has no such thing.
    excluded = torch.from_numpy(_excluded(masked, logits.shape[1]))
    if len(masked.rows) == len(logits):
        logits.masked_fill_(excluded, -torch.inf)
        return
    for row, columns in zip(masked.rows.tolist(), excluded, strict=True):
        logits[row].masked_fill_(columns, -torch.inf)


def _excluded(masked: MaskedRows, vocab_size: int) -> npt.NDArray[np.bool_]:
    """[m, vocab_size]."""
    packed = (~masked.bitmask).view(np.uint8)
    return np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
