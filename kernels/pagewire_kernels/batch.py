"""What kernels share: the metadata of a batch, and pairs of blocks to copy."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """Which query rows belong to which sequence, and where each sequence's KV is stored.

    Queries of all sequences are flattened to one axis of `num_tokens` rows, without padding.
    Sequence `i` owns rows `query_start[i]` to `query_start[i + 1]`; they are its last tokens, so
    its row `j` is at position `context_lens[i] - query_lens[i] + j` and attends to positions up
    to and including its own.
    """

    query_start: torch.Tensor
    """int32 [num_seqs + 1], on the cache's device."""

    context_lens: torch.Tensor
    """int32 [num_seqs]: tokens whose KV the step attends over, the new ones included."""

    block_tables: torch.Tensor
    """int32 [num_seqs, max_blocks]; entries beyond a sequence's last block are -1."""

    slot_mapping: torch.Tensor
    """int64 [num_tokens]: `block * block_size + offset` where each row's KV is written; a negative
    slot is not written."""

    max_query_len: int
    """The longest sequence's number of query rows."""

    max_context_len: int
    """The longest sequence's context length, in tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingMetadata:
    """How each row of a batch of logits is sampled; columns of [num_rows] on the logits' device."""

    temperature: torch.Tensor
    """float32; 0 takes the largest logit."""

    top_k: torch.Tensor
    """int32; 0 keeps all."""

    top_p: torch.Tensor
    """float64; 1 keeps all."""

    min_p: torch.Tensor
    """float64; 0 keeps all."""

    seeds: torch.Tensor
    """int64: the bits of the unsigned seed."""

    choice_indices: torch.Tensor
    """int32: which of its request's sequences the row belongs to."""

    positions: torch.Tensor
    """int32: output tokens that the row's sequence has so far."""


Move = Callable[[Tensor, Tensor, Tensor], None]
"""Copies blocks of a source to a target; no pair reads a block that another writes."""


def is_chained(pairs: Tensor) -> bool:
    """Whether a block is both a source and a target. pairs: [n, 2], within one cache."""
    return bool(torch.isin(pairs[:, 0], pairs[:, 1]).any())


def move_all(
    move: Move, source: Tensor, target: Tensor, pairs: Tensor, device: torch.device
) -> None:
    """Move blocks as `reference.swap_blocks` does: all are read before any is written.

    If a block is both a source and a target, blocks are staged in a buffer on `device`.
    """
    if source.data_ptr() != target.data_ptr() or not is_chained(pairs):
        move(source, target, pairs)
        return
    buffer = torch.empty((len(pairs), *source.shape[1:]), dtype=source.dtype, device=device)
    rows = torch.arange(len(pairs), device=pairs.device)
    move(source, buffer, torch.stack([pairs[:, 0], rows], dim=1))
    move(buffer, target, torch.stack([rows, pairs[:, 1]], dim=1))
