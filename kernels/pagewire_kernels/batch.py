"""Arguments that kernels share: metadata of a batch, tables of sequences, pairs of blocks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor


class StateSaves(NamedTuple):
    """Copies of states, made where they are reached within a step."""

    rows: Tensor
    """int32 [num_tokens], by row: that of `tables` for the state after it, or -1."""

    tables: Tensor
    """int32 [num_saves, blocks of a state]: blocks that no sequence has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """Maps query rows to sequences, and sequences to their KV.

    Queries of all sequences are flattened to one axis of `num_tokens` rows, without padding. Rows
    `query_start[i]` to `query_start[i + 1]` are the last tokens of sequence `i`: its row `j` is at
    position `context_lens[i] - query_lens[i] + j` and attends to positions up to and including its
    own.
    """

    query_start: torch.Tensor
    """int32 [num_seqs + 1], on the cache's device."""

    context_lens: torch.Tensor
    """int32 [num_seqs]: number of tokens in the KV cache, those of this step included."""

    block_tables: torch.Tensor
    """int32 [num_seqs, max_blocks]; entries beyond a sequence's last block are -1. Where all rows
    have a window, entries of blocks that no row sees may be -1, or blocks of other sequences. Of
    states: the blocks of each sequence's state."""

    slot_mapping: torch.Tensor
    """int64 [num_tokens]: `block * block_size + offset` where each row's KV is written; a negative
    slot is not written. Of states: empty."""

    max_query_len: int
    """The largest number of query rows of a sequence."""

    max_context_len: int
    """The largest context length of a sequence, in tokens."""

    num_decodes: int = 0
    """The first `num_decodes` sequences have exactly one row each; others may, too."""

    device_num_decodes: torch.Tensor | None = None
    """int32 [1], on the cache's device: `num_decodes` of a captured graph's batch, which the host
    does not know. Then `max_query_len` and `max_context_len` are limits, and the batch may be
    padded at its end: by sequences without rows, and by rows of no sequence."""

    saves: StateSaves | None = None
    """Of states: those that are saved; None: none."""

    plans: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Values that a backend has derived from the batch once for all layers."""

    @classmethod
    def of_texts(cls, lengths: Sequence[int], device: torch.device) -> "AttentionMetadata":
        """Of texts of these lengths that are computed without a cache, all rows at once."""
        counts = torch.tensor(lengths, dtype=torch.int32)
        return cls(
            query_start=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
            context_lens=counts.to(device),
            block_tables=torch.empty(len(lengths), 0, dtype=torch.int32, device=device),
            slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
            max_query_len=max(lengths),
            max_context_len=max(lengths),
        )

    @classmethod
    def of_states(cls, ranges: Sequence[tuple[int, int]], tables: Tensor) -> "AttentionMetadata":
        """Of sequences that compute the positions from a first one up to an end, in a group of
        states. tables: int32 [num_seqs, blocks of a state]."""
        return replace(
            cls.of_texts([end - first for first, end in ranges], tables.device),
            context_lens=torch.tensor([end for _, end in ranges], dtype=torch.int32).to(
                tables.device
            ),
            block_tables=tables,
            max_context_len=max(end for _, end in ranges),
        )

    @classmethod
    def of_ranges(
        cls, ranges: Sequence[tuple[int, int]], tables: Tensor, block_size: int, chunk: int = 0
    ) -> "AttentionMetadata":
        """Of sequences that compute the positions from a first one up to an end, on the device of
        their block tables, int32 [num_seqs, max_blocks]. chunk: as for `in_chunks`."""
        device, lengths = tables.device, [end - first for first, end in ranges]
        ends = [end for _, end in ranges]
        positions = torch.cat([torch.arange(*bounds) for bounds in ranges]).to(device)
        sequences = torch.arange(len(ranges)).repeat_interleave(torch.tensor(lengths)).to(device)
        blocks = tables[sequences, positions // block_size].long()
        metadata = cls(
            query_start=torch.tensor([0, *lengths]).cumsum(0).int().to(device),
            context_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            block_tables=tables,
            slot_mapping=blocks * block_size + positions % block_size,
            max_query_len=max(lengths),
            max_context_len=max(ends),
        )
        return metadata.in_chunks(chunk, block_size)

    def in_chunks(self, chunk: int, block_size: int) -> "AttentionMetadata":
        """The same rows, of which those in positions from a multiple of `chunk` to the next one see
        only each other: a sequence with rows in several chunks is divided into as many sequences
        that begin where a chunk does. 0: all rows see each other.

        chunk: a multiple of `block_size`, the tokens per block. The result has sequences for the
        most chunks that such a batch can have; those that it does not have are at the end, without
        rows. So shapes depend on shapes alone, and the device is not waited for.
        """
        if chunk == 0:
            return self
        num_seqs, num_rows = len(self.context_lens), len(self.slot_mapping)
        num_parts = min(num_rows, 2 * num_seqs + num_rows // chunk)
        ends, starts = self.context_lens.long(), self.query_start.long()
        firsts = ends - starts.diff()
        first_chunks = firsts.div(chunk, rounding_mode="floor")
        counts = (ends - 1).div(chunk, rounding_mode="floor") - first_chunks + 1
        stops = counts.cumsum(0)
        parts = torch.arange(num_parts, device=stops.device)
        seqs = torch.searchsorted(stops, parts, right=True).clamp(max=num_seqs - 1)
        chunks = first_chunks[seqs] + parts - (stops - counts)[seqs]
        begins = (chunks * chunk).maximum(firsts[seqs]).minimum(ends[seqs])
        chunks = chunks.clamp(min=0)  # of a row that pads a batch, at position -1
        lengths = (ends[seqs] - chunks * chunk).clamp(min=0, max=chunk)
        longest = min(chunk, self.max_context_len)
        columns = torch.arange(-(-longest // block_size), device=stops.device)
        columns = columns + chunks[:, None] * (chunk // block_size)
        columns = columns.clamp(max=self.block_tables.shape[1] - 1)
        return replace(
            self,
            query_start=torch.cat([starts[seqs] + begins - firsts[seqs], starts[-1:]]).int(),
            context_lens=lengths.int(),
            block_tables=self.block_tables[seqs[:, None], columns],
            max_query_len=min(chunk, self.max_query_len),
            max_context_len=longest,
        )


LayerCaches = tuple[Tensor, Tensor]
"""Views of a layer's keys and values in the cache, [num_blocks, block_size, num_kv_heads, head_dim]
each, of equal strides."""


class StateUnits(NamedTuple):
    """Where one part of a layer's state is, such as the inputs that a convolution keeps: in units
    of equal size, each contiguous in one page."""

    pages: Tensor
    """[num_pages, page_size]: a view of all pages in the dtype of the part, with a dense last
    axis."""

    places: Tensor
    """int64 [num_units, 2], on the device of the pages, by unit: a column of the block table, and
    the unit's first element in that page."""


LayerStates = tuple[StateUnits, ...]
"""The parts of a layer's state."""

LayerMemory = LayerCaches | LayerStates
"""What a part of a layer keeps of sequences: keys and values, or a state."""


def tensor_of(memory: LayerMemory) -> Tensor:
    """A tensor of what a part of a layer keeps, which has its device and its place in memory."""
    first = memory[0]
    return first.pages if isinstance(first, StateUnits) else first


class AdapterRows(NamedTuple):
    """The rows of a step that have one adapter."""

    digest: bytes
    """The adapter's identity."""

    rows: Tensor | None
    """int64 [n], ascending; None: all rows."""

    def among(self, chosen: Tensor) -> "AdapterRows | None":
        """Those among chosen rows of the step, by their places there; None if there are none.
        chosen: int64 [n], of which some may be equal."""
        if self.rows is None:
            return self
        places = torch.isin(chosen, self.rows).nonzero().flatten()
        return None if len(places) == 0 else AdapterRows(self.digest, places)


RowAdapters = Sequence[AdapterRows] | Tensor
"""The adapters of some rows: those that rows have, each once; or, where the host does not know the
rows of a captured graph, int32 [num_rows]: the slot of each row's adapter, negative for none."""


def have_adapters(adapters: RowAdapters) -> bool:
    """Whether some rows may have an adapter."""
    return isinstance(adapters, Tensor) or len(adapters) > 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The inputs of a model's forward pass, built once per step."""

    token_ids: Tensor
    """int64 [num_tokens]."""

    positions: Tensor
    """int64 [num_tokens]."""

    attention: tuple[AttentionMetadata, ...]
    """By cache group; of a model without any, that of its texts."""

    caches: Sequence[LayerMemory]
    """By layer, or by part of a layer that keeps something; empty for a model without a cache."""

    token_types: Tensor | None = None
    """int64 [num_tokens]: rows of the table of token types; None if the model has none."""

    sampled: Tensor | None = None
    """int64 [num_sampled]: the rows whose logits will be computed; None: none, or not known yet."""

    adapters: RowAdapters = ()
    """The adapters of all rows."""

    has_virtual_tokens: bool = False
    """Whether some rows are tokens whose embeddings are their adapter's."""

    def sampled_adapters(self) -> RowAdapters:
        """The adapters of the rows whose logits will be computed, by their places in `sampled`."""
        if self.sampled is None:
            return ()
        if isinstance(self.adapters, Tensor):
            return self.adapters[self.sampled]
        found = [adapter.among(self.sampled) for adapter in self.adapters]
        return tuple(adapter for adapter in found if adapter is not None)


class StepInputs(NamedTuple):
    """A step's inputs as the host sends them: int32, by flattened token and by sequence. They lack
    what only the device may know: the latest tokens, drafts, and `SamplingTables.num_ahead`."""

    token_ids: Tensor
    """[num_tokens]; UNKNOWN_TOKEN, or FIRST_DRAFT and below, for a token that only the device
    knows."""

    positions: Tensor
    """[num_tokens]."""

    token_rows: Tensor
    """[num_tokens]: row of each token's sequence in `SamplingTables` and in the block tables."""

    seq_rows: Tensor
    """[num_seqs]: row of each sequence in the same tables."""

    context_lens: Tensor
    """[num_seqs]."""


class PreparedInputs(NamedTuple):
    """The inputs of a model's forward pass."""

    token_ids: Tensor
    """int64 [num_tokens]."""

    positions: Tensor
    """int64 [num_tokens]."""

    slot_mapping: Tensor
    """int64 [num_tokens]; -1 where a sequence has no block, so that nothing is written."""

    context_lens: Tensor
    """int32 [num_seqs]."""

    block_tables: Tensor
    """int32 [num_seqs, max_blocks]; entries beyond a sequence's last block are -1."""


UNKNOWN_TOKEN = -1
"""Stands for the latest token of a sequence."""
FIRST_DRAFT = -2
"""Stands for the first draft of a sequence in `SamplingTables.drafts`; `FIRST_DRAFT - i` stands for
the one in column `i`."""

NON_FINITE = -1
"""Outcome of sampling instead of a token: the row's largest logit is not finite."""
NO_CANDIDATES = -2
"""Outcome of sampling: the row's edits exclude every token."""
OFF_CONSTRAINT = -3
"""Outcome of sampling: the bitmask excludes every token, because the row's constraint failed."""
NOT_SAMPLED = -4
"""Outcome of sampling: the row has not failed, but the core chooses its token."""


class SamplingParam(IntEnum):
    """Columns of `SamplingTables.params`."""

    TEMPERATURE = 0
    """float64; 0 is greedy sampling."""
    TOP_K = 1
    """0 keeps all tokens."""
    TOP_P = 2
    """float64; 1 keeps all tokens."""
    MIN_P = 3
    """float64; 0 keeps all tokens."""
    SEED = 4
    """The bits of the unsigned seed."""
    CHOICE_INDEX = 5
    """Index of the sequence among the choices of its request."""
    IS_PENALIZED = 6
    """1 if the three penalties apply and the row's tokens are counted; else 0."""
    REPETITION_PENALTY = 7
    """float64, as are the next two."""
    FREQUENCY_PENALTY = 8
    PRESENCE_PENALTY = 9
    NUM_EDITS = 10
    """Number of the row's logit edits."""
    OFFERS = 11
    """1 if no token is sampled because the core chooses among candidates; else 0."""


COUNT_OCCURS = 1
COUNT_ONE_OUTPUT = 2
"""An entry of `SamplingTables.counts` is twice the token's count in the output, plus one if it
occurs in the output or in a prompt that is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingTables:
    """Sampling state of sequences, by row; on the device of the logits."""

    params: Tensor
    """int64 [num_rows, len(SamplingParam)]; float64 parameters are stored by their bits."""

    latest: Tensor
    """int64 [num_rows]: the token sampled last, or a negative outcome, which is final: the row has
    failed."""

    num_ahead: Tensor
    """int64 [num_rows]: tokens that a row's sequence has beyond those that the host counts when it
    sends a step: the drafts that were accepted in steps whose results it has yet to read."""

    drafts: Tensor
    """int64 [num_rows, max_drafts]: tokens that were drafted on the device after the latest one."""

    counts: Tensor
    """int32 [num_counted, vocab_size]: occurrences of tokens, for the first `num_counted` rows."""

    edit_tokens: Tensor
    """int32 [num_rows, max_edits]: tokens to whose logits a number is added. Only excluded tokens
    may occur more than once in a row."""

    edit_values: Tensor
    """float32 [num_rows, max_edits]: the numbers; minus infinity excludes the token. In each row
    the finite ones come first."""

    edit_ends: Tensor
    """int32 [num_rows, max_edits]: number of output tokens from which the entry no longer
    applies."""


class SamplingRows(NamedTuple):
    """The rows that sample in a step; int32 [n], on the device."""

    row_ids: Tensor
    """Rows of the tables; only rows that pad the batch may occur more than once."""

    positions: Tensor
    """Number of output tokens that each row's sequence has so far, without `num_ahead`."""

    mask_rows: Tensor
    """Rows of `bitmask`; -1 for rows without a constraint."""

    bitmask: Tensor
    """int32 [m, mask_width(vocab_size)]: one bit per token, the lowest first, 1 if the token is
    allowed; the last word is not 0 if the row's constraint has failed."""

    def select(self, rows: Tensor) -> "SamplingRows":
        """Select rows by an index tensor."""
        return SamplingRows(
            row_ids=self.row_ids.index_select(0, rows),
            positions=self.positions.index_select(0, rows),
            mask_rows=self.mask_rows.index_select(0, rows),
            bitmask=self.bitmask,
        )


def mask_width(vocab_size: int) -> int:
    """The number of words in a row of `SamplingRows.bitmask`."""
    return -(-vocab_size // 32) + 1


Move = Callable[[Tensor, Tensor, Tensor], None]
"""Copies blocks of a source to a target, (source, target, pairs); no pair may read a block that
another one writes."""


def is_chained(pairs: Tensor) -> bool:
    """Whether a block is both a source and a target. pairs: [n, 2], within one cache."""
    return bool(torch.isin(pairs[:, 0], pairs[:, 1]).any())


def move_all(
    move: Move, source: Tensor, target: Tensor, pairs: Tensor, device: torch.device
) -> None:
    """Copy blocks as `reference.swap_blocks` does: all are read before any is written.

    If a block is both a source and a target, all blocks are first copied to a buffer on `device`.
    """
    if source.data_ptr() != target.data_ptr() or not is_chained(pairs):
        move(source, target, pairs)
        return
    buffer = torch.empty((len(pairs), *source.shape[1:]), dtype=source.dtype, device=device)
    rows = torch.arange(len(pairs), device=pairs.device)
    move(source, buffer, torch.stack([pairs[:, 0], rows], dim=1))
    move(buffer, target, torch.stack([rows, pairs[:, 1]], dim=1))
