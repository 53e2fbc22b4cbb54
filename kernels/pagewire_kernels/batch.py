"""The layout of one step's batch: as attention sees it, and as sampling does."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """Which query rows belong to which sequence, and where each sequence's KV lies.

    Queries of all sequences are flattened to one axis of `num_tokens` rows, without padding.
    Sequence `i` owns rows `query_start[i]` to `query_start[i + 1]`; they are its last tokens, so
    its row `j` stands at position `context_lens[i] - query_lens[i] + j` and attends to positions up
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
