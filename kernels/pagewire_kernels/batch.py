"""What kernels share: the metadata of a batch, tables of sequences, pairs of blocks to copy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

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

    num_decodes: int = 0
    """The first sequences, each of which has exactly one row; fewer may be named than there are."""

    device_num_decodes: torch.Tensor | None = None
    """int32 [1], on the cache's device: `num_decodes` of a captured graph's batch, which the host
    does not know. Then `max_query_len` and `max_context_len` are limits, and the batch may be
    padded at its end: by sequences without rows, and by rows of no sequence."""

    plans: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """What a backend has derived from the batch, for all layers."""


class StepInputs(NamedTuple):
    """A step's inputs as the host sends them: int32, by flattened token and by sequence."""

    token_ids: Tensor
    """[num_tokens]; UNKNOWN_TOKEN for a token that only the device knows."""

    positions: Tensor
    """[num_tokens]."""

    slot_mapping: Tensor
    """[num_tokens]; negative for rows whose KV is not written."""

    token_rows: Tensor
    """[num_tokens]: the row of `SamplingTables` and of block tables of each token's sequence."""

    seq_rows: Tensor
    """[num_seqs]: that of each sequence."""

    context_lens: Tensor
    """[num_seqs]."""


class PreparedInputs(NamedTuple):
    """What a model takes."""

    token_ids: Tensor
    """int64 [num_tokens]."""

    positions: Tensor
    """int64 [num_tokens]."""

    slot_mapping: Tensor
    """int64 [num_tokens]."""

    block_tables: Tensor
    """int32 [num_seqs, max_blocks]; entries beyond a sequence's last block are -1."""


UNKNOWN_TOKEN = -1

NON_FINITE = -1
"""Outcome of sampling, instead of a token: the row's largest logit is not finite."""
NO_CANDIDATES = -2
"""The row's edits exclude every token."""
OFF_CONSTRAINT = -3
"""The row's bitmask excludes every token, since its constraint has failed."""
NOT_SAMPLED = -4
"""The row has not failed, but the worker chooses no token for it."""


class SamplingParam(IntEnum):
    """Columns of `SamplingTables.params`."""

    TEMPERATURE = 0
    """float64; 0 takes the largest logit."""
    TOP_K = 1
    """0 keeps all."""
    TOP_P = 2
    """float64; 1 keeps all."""
    MIN_P = 3
    """float64; 0 keeps all."""
    SEED = 4
    """The bits of the unsigned seed."""
    CHOICE_INDEX = 5
    """Which of its request's sequences the row has."""
    IS_PENALIZED = 6
    """1 if the three penalties apply and the row's tokens are counted; else 0."""
    REPETITION_PENALTY = 7
    """float64, as the next two."""
    FREQUENCY_PENALTY = 8
    PRESENCE_PENALTY = 9
    NUM_EDITS = 10
    """Entries of the row's logit edits."""
    OFFERS = 11
    """1 if no token is sampled, because the caller chooses among candidates; else 0."""


COUNT_OCCURS = 1
COUNT_ONE_OUTPUT = 2
"""An entry of `SamplingTables.counts` is twice the token's count in the output, and one more if it
occurs at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTables:
    """How sequences are sampled, by row; on the logits' device."""

    params: Tensor
    """int64 [num_rows, len(SamplingParam)]; float64 by its bits."""

    latest: Tensor
    """int64 [num_rows]: the token sampled last, or what became of the row: once it is negative the
    row has failed, and stays so."""

    counts: Tensor
    """int32 [num_counted, vocab_size]: occurrences of tokens, for the first rows."""

    edit_tokens: Tensor
    """int32 [num_rows, max_edits]: tokens whose logits get a number added; none twice in a row,
    except for those excluded."""

    edit_values: Tensor
    """float32 [num_rows, max_edits]: the numbers; minus infinity excludes the token. In a row the
    finite ones come first."""

    edit_ends: Tensor
    """int32 [num_rows, max_edits]: number of output tokens from which on an entry does not
    apply."""


class SamplingRows(NamedTuple):
    """The rows that sample in a step; int32 [n], on the device."""

    row_ids: Tensor
    """Rows of the tables; none twice, but for rows that pad the batch."""

    positions: Tensor
    """Output tokens that each row's sequence has so far."""

    mask_rows: Tensor
    """Rows of `bitmask`; -1 for rows that need none."""

    bitmask: Tensor
    """int32 [m, mask_width(vocab_size)]: a bit per token, the lowest first, 1 where it is
    allowed; in the last word whether the row's constraint has failed."""

    def select(self, rows: Tensor) -> "SamplingRows":
        """Some of the rows, by an index tensor."""
        return SamplingRows(
            row_ids=self.row_ids.index_select(0, rows),
            positions=self.positions.index_select(0, rows),
            mask_rows=self.mask_rows.index_select(0, rows),
            bitmask=self.bitmask,
        )


def mask_width(vocab_size: int) -> int:
    """Words in a row of `SamplingRows.bitmask`."""
    return -(-vocab_size // 32) + 1


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
