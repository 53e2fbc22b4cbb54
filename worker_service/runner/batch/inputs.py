"""The flattened inputs of a forward pass.

A worked example in one cache group with 4 tokens per block: a prefill of 3 tokens at position 0
with table [7], and a decode at position 5 with table [2, 9]:

    positions      0   1   2   5
    slot_mapping  28  29  30  37      7*4+0, 7*4+1, 7*4+2, 9*4+1
    query_start    0           3   4
    context_lens   3   6
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagewire_kernels.batch import (
    AdapterRows,
    AttentionMetadata,
    LayerMemory,
    StateSaves,
    StepBatch,
    tensor_of,
)
from worker_service.array_types import Int32Array, Int64Array
from worker_service.pinned_memory import upload
from worker_service.runner.state.block_tables import BlockTables
from worker_service.runner.state.sequence_table import SequenceTable


@dataclass(frozen=True, kw_only=True, slots=True)
class HostInputs:
    """The inputs of a forward pass, on the host; the module has a worked example."""

    row_ids: Int64Array
    """[num_seqs]."""

    token_row_ids: Int64Array
    """[num_tokens]: the row of each token's sequence."""

    token_ids: Int64Array
    """[num_tokens]; UNKNOWN_TOKEN where a token is not known on the host."""

    positions: Int64Array
    """[num_tokens]."""

    token_types: Int64Array | None
    """[num_tokens]: 0, or 1 in the second of two texts; None for a model with cache groups."""

    query_start: Int64Array
    """[num_seqs + 1]: first flattened row of each sequence."""

    context_lens: Int64Array
    """[num_seqs]."""

    max_query_len: int
    max_context_len: int
    """If the drafts whose verification is pending are accepted."""

    num_decodes: int
    """The first sequences, up to one that has more than one row."""

    max_mixed_context: int
    """Most positions of a sequence after these; one that computes its last token, with or without
    drafts, counts with all positions that it has blocks for. The hosts of several ranks learn at
    different times how many drafts were accepted, but agree on this."""

    saves: tuple[tuple[Int32Array, ...], ...] = ()
    """By cache group: rows and tables of `StateSaves`, if states are saved."""

    adapters: tuple[tuple[bytes, Int64Array | None], ...] = ()
    """Digest and rows of each adapter, [n]; None: all rows."""

    has_virtual_tokens: bool = False
    """Whether some tokens have embeddings of their adapters."""


def lay_out(
    row_ids: Int64Array,
    firsts: Int64Array,
    num_tokens: Int32Array,
    table: SequenceTable,
    saved_states: Int32Array | None = None,
) -> HostInputs:
    """Flattened inputs for sequences that compute `num_tokens` tokens, all positive, from the
    positions `firsts` on. saved_states: as in `StepRows`; those that are not reached here are left
    out."""
    query_lens = num_tokens.astype(np.int64)
    query_start = np.zeros(len(row_ids) + 1, np.int64)
    np.cumsum(query_lens, out=query_start[1:])
    context_lens = firsts + query_lens
    max_query_len = int(query_lens.max())
    positions, token_row_ids = firsts, row_ids
    if max_query_len > 1:
        # Row r of the batch belongs to sequence s and stands at firsts[s] + r - query_start[s].
        positions = np.repeat(firsts - query_start[:-1], query_lens) + np.arange(query_start[-1])
        token_row_ids = np.repeat(row_ids, query_lens)
    num_decodes, max_mixed_context = len(row_ids), 0
    if max_query_len > 1:
        num_decodes = int(np.argmax(query_lens > 1))
        is_last = table.num_tokens[row_ids] == firsts + 1
        limits = np.where(is_last, table.capacity[row_ids], context_lens)
        max_mixed_context = int(limits[num_decodes:].max())
    types = None if table.tables else _token_types(row_ids, query_lens, positions, table)
    has_virtual_tokens = bool(table.adapters) and bool(
        (positions < table.num_virtual_tokens[token_row_ids]).any()
    )
    return HostInputs(
        row_ids=row_ids,
        token_row_ids=token_row_ids,
        token_ids=table.token_ids[token_row_ids, positions].astype(np.int64),
        positions=positions,
        token_types=types,
        query_start=query_start,
        context_lens=context_lens,
        max_query_len=max_query_len,
        max_context_len=int((context_lens + table.num_pending_drafts[row_ids]).max()),
        num_decodes=num_decodes,
        max_mixed_context=max_mixed_context,
        saves=()
        if saved_states is None
        else tuple(
            _saves(saved_states[saved_states[:, 1] == group], token_row_ids, positions, tables)
            for group, tables in enumerate(table.tables)
        ),
        adapters=tuple(_adapters(token_row_ids, table)) if table.adapters else (),
        has_virtual_tokens=has_virtual_tokens,
    )


def _saves(
    saved: Int32Array,
    token_row_ids: Int64Array,
    positions: Int64Array,
    tables: BlockTables,
) -> tuple[Int32Array, ...]:
    """Rows and tables of `StateSaves`. saved: of one cache group."""
    if not len(saved):
        return ()
    states = saved.reshape(-1, tables.group.num_blocks, 4)
    rows = np.full(len(positions), -1, np.int32)
    for number, (row_id, _, position, _) in enumerate(states[:, 0].tolist()):
        rows[(token_row_ids == row_id) & (positions == position - 1)] = number
    return (rows, np.ascontiguousarray(states[:, :, 3])) if (rows >= 0).any() else ()


def _adapters(
    token_row_ids: Int64Array, table: SequenceTable
) -> Iterator[tuple[bytes, Int64Array | None]]:
    """The adapters of these tokens, in the order of digests."""
    by_digest: dict[bytes, list[int]] = {}
    for row_id in np.unique(token_row_ids).tolist():
        if (digest := table.adapters.get(row_id)) is not None:
            by_digest.setdefault(digest, []).append(row_id)
    for digest, row_ids in sorted(by_digest.items()):
        rows = np.flatnonzero(np.isin(token_row_ids, row_ids))
        yield digest, None if len(rows) == len(token_row_ids) else rows


def _upload_adapters(inputs: HostInputs, device: torch.device) -> tuple[AdapterRows, ...]:
    return tuple(
        AdapterRows(digest, None if rows is None else upload(rows, device))
        for digest, rows in inputs.adapters
    )


def slot_mapping(inputs: HostInputs, tables: BlockTables) -> Int64Array:
    """[num_tokens]: where the KV of each token is written in a cache group; empty in one of
    states."""
    if not tables.has_tokens:
        return np.empty(0, np.int64)
    indices, offsets = np.divmod(inputs.positions, tables.block_tokens)
    blocks = tables.blocks[inputs.token_row_ids, indices].astype(np.int64)
    return blocks * tables.block_tokens + offsets


def _token_types(
    row_ids: Int64Array, query_lens: Int64Array, positions: Int64Array, table: SequenceTable
) -> Int64Array:
    """[num_tokens]."""
    texts = [table.texts[row_id] for row_id in row_ids.tolist()]
    of_texts = np.array([text.params.second_text_start for text in texts], np.int64)
    starts = np.repeat(of_texts, query_lens)
    return ((starts > 0) & (positions >= starts)).astype(np.int64)


def build_batch(
    inputs: HostInputs,
    table: SequenceTable,
    caches: Sequence[LayerMemory],
    sampled: Int64Array | None = None,
) -> StepBatch:
    """Copy the inputs to the device of the caches, without waiting for it. sampled: the rows whose
    logits will be computed, None if they are not known."""
    device = tensor_of(caches[0]).device
    query_start = upload(inputs.query_start.astype(np.int32), device)
    context_lens = upload(inputs.context_lens.astype(np.int32), device)
    length = inputs.max_context_len
    widths = [
        -(-length // tables.block_tokens) if tables.has_tokens else tables.blocks.shape[1]
        for tables in table.tables
    ]
    attention = [
        AttentionMetadata(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=upload(tables.blocks[inputs.row_ids, :width], device),
            slot_mapping=upload(slot_mapping(inputs, tables), device),
            max_query_len=inputs.max_query_len,
            max_context_len=inputs.max_context_len,
            num_decodes=inputs.num_decodes,
            saves=StateSaves(*(upload(column, device) for column in saves)) if saves else None,
        ).in_chunks(tables.group.chunk, tables.block_tokens)
        for tables, width, saves in zip(
            table.tables, widths, inputs.saves or ((),) * len(widths), strict=True
        )
    ]
    return StepBatch(
        token_ids=upload(inputs.token_ids, device),
        positions=upload(inputs.positions, device),
        attention=tuple(attention),
        caches=caches,
        sampled=None if sampled is None else upload(sampled, device),
        adapters=_upload_adapters(inputs, device),
        has_virtual_tokens=inputs.has_virtual_tokens,
    )


def whole_texts(inputs: HostInputs, device: torch.device) -> StepBatch:
    """Copy the inputs of a model without cache groups to its device."""
    assert inputs.token_types is not None
    num_texts = len(inputs.context_lens)
    metadata = AttentionMetadata(
        query_start=upload(inputs.query_start.astype(np.int32), device),
        context_lens=upload(inputs.context_lens.astype(np.int32), device),
        block_tables=torch.empty(num_texts, 0, dtype=torch.int32, device=device),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        max_query_len=inputs.max_query_len,
        max_context_len=inputs.max_context_len,
    )
    return StepBatch(
        token_ids=upload(inputs.token_ids, device),
        positions=upload(inputs.positions, device),
        attention=(metadata,),
        caches=(),
        token_types=upload(inputs.token_types, device),
        adapters=_upload_adapters(inputs, device),
    )
