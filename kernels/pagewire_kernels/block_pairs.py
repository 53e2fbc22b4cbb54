"""Moves of whole KV blocks that may depend on each other, by ways to move those that do not."""

from collections.abc import Callable

import torch
from torch import Tensor

Move = Callable[[Tensor, Tensor, Tensor], None]
"""Copies blocks of a source to a target, by pairs of which none reads what another writes."""


def is_chained(pairs: Tensor) -> bool:
    """Whether a block is both a source and a target. pairs: [n, 2], within one cache."""
    return bool(torch.isin(pairs[:, 0], pairs[:, 1]).any())


def move_all(
    move: Move, source: Tensor, target: Tensor, pairs: Tensor, device: torch.device
) -> None:
    """Move blocks as `reference.swap_blocks` does: all are read before any is written.

    Where one is both a source and a target, they go by way of a buffer on `device`.
    """
    if source.data_ptr() != target.data_ptr() or not is_chained(pairs):
        move(source, target, pairs)
        return
    buffer = torch.empty((len(pairs), *source.shape[1:]), dtype=source.dtype, device=device)
    rows = torch.arange(len(pairs), device=pairs.device)
    move(source, buffer, torch.stack([pairs[:, 0], rows], dim=1))
    move(buffer, target, torch.stack([rows, pairs[:, 1]], dim=1))
