"""Sequence state on the device, with the same rows as the host's `SequenceTable`.

A step uploads only the changes since the last one, and kernels gather the entries of its rows. Of a
sequence's token ids, only the latest one is kept here, which the device sampled itself; all others
are uploaded with the steps that compute them.

CUDA graphs refer to these tensors, so they have a fixed size. A step with rows beyond this size, or
with more edits or occurrences than fit, is computed by the host; see `hold`.

Occurrences of tokens, for penalties, are dense over the vocabulary, so that the device counts the
tokens that it samples, and the next step can be launched before the host knows them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels.batch import (
    COUNT_OCCURS,
    COUNT_ONE_OUTPUT,
    SamplingParam,
    SamplingTables,
)
from worker_service.array_types import Int64Array
from worker_service.cache_groups import CacheGroup
from worker_service.pinned_memory import Column
from worker_service.plan import FILTERS, StepPlan
from worker_service.runner.state.block_tables import NO_BLOCK, BlockTables
from worker_service.runner.state.sequence_table import PlanRows, SequenceTable
from worker_service.sampling.logit_edits import LogitEdits
from worker_service.sampling.sampling_table import SamplingTable

MAX_EDITS = 1024
"""Maximum number of logit biases, suppressed tokens and bad words of a sequence, together."""

MAX_COUNT_BYTES = 2**30
"""Memory for occurrences, of four bytes per token of the vocabulary and sequence."""

_MAX_TABLE_BYTES = 64 * 2**20
_MAX_AFFORDABLE_ROWS = 1024
_MIN_ROWS = 64

_NO_ROWS = np.empty(0, np.int64)
_NO_ENTRIES = np.empty(0, np.int32)


class DeviceRows:
    """Block tables, sampling parameters, latest tokens and their occurrences on the device.

    There is one more row than sequences can have: `padding_row`, which has no blocks, for the rows
    that pad a batch.
    """

    def __init__(
        self,
        num_rows: int,
        groups: Sequence[CacheGroup],
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        num_counted: int | None = None,
        max_drafts: int = 0,
    ) -> None:
        """Allocate all tensors.

        num_rows: capacity in sequences; num_counted: number of rows whose occurrences are kept,
        None for all; max_drafts: of a sequence, if they are made on the device.
        """
        self.padding_row = num_rows
        self.groups = groups
        self.block_tables = [
            torch.full(
                (num_rows + 1, group.table_width(max_model_len)),
                NO_BLOCK,
                dtype=torch.int32,
                device=device,
            )
            for group in groups
        ]
        """By cache group."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._progress = zeros(2, num_rows + 1, dtype=torch.int64)
        latest, num_ahead = self._progress
        self.sampling = SamplingTables(
            params=zeros(num_rows + 1, len(SamplingParam), dtype=torch.int64),
            latest=latest,
            num_ahead=num_ahead,
            drafts=zeros(num_rows + 1, max_drafts, dtype=torch.int64),
            counts=zeros(num_rows if num_counted is None else num_counted, vocab_size),
            edit_tokens=zeros(num_rows + 1, MAX_EDITS),
            edit_values=zeros(num_rows + 1, MAX_EDITS, dtype=torch.float32),
            edit_ends=zeros(num_rows + 1, MAX_EDITS),
        )
        self._new: list[int] = []
        self._changed: list[npt.NDArray[np.integer]] = []
        """[n, 3]: row, cache group and index of changed entries of block tables."""
        self._edited: list[int] = []
        """Rows whose edits depend on tokens that were sampled since."""
        self._miscounted: list[int] = []
        """Rows whose occurrences on the device are outdated."""
        self._accepted: list[Int64Array] = []
        """[2, n]: rows, and accepted drafts that the host counts, but `num_ahead` as well."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        tables = self.sampling
        sampling = sum(getattr(tables, column.name).nbytes for column in fields(tables))
        return sampling + sum(tensor.nbytes for tensor in self.block_tables)

    def hold(self, row_ids: Int64Array, table: SamplingTable) -> bool:
        """Whether these rows and all of their edits and occurrences fit."""
        if row_ids.max(initial=0) >= self.padding_row:
            return False
        found = _edits_of(row_ids.tolist(), table)
        return all(
            edits.max_entries <= MAX_EDITS
            and (edits.occurrences is None or row_id < len(self.sampling.counts))
            for row_id, edits in found
        )

    def record(self, plan: StepPlan, rows: PlanRows) -> None:
        """Record the changes that a plan made to the table, to be sent with the next step."""
        is_held = rows.added < self.padding_row
        self._new.extend(rows.added[is_held].tolist())
        if len(rows.updated):
            changed = np.column_stack([rows.updated, plan.block_updates[:, 1:3]])
            self._changed.append(changed[rows.updated < self.padding_row])
        self.record_tokens(rows.appended)

    def record_edits(self, row_ids: Int64Array) -> None:
        """Record that the edits of these rows have changed."""
        self._edited.extend(row_ids[row_ids < self.padding_row].tolist())

    def record_tokens(self, row_ids: Int64Array) -> None:
        """Record that the last tokens of these rows were not sampled on the device."""
        self._miscounted.extend(row_ids[row_ids < self.padding_row].tolist())

    def record_accepted(self, row_ids: Int64Array, num_drafts: Int64Array) -> None:
        """Record that the host counts these numbers of accepted drafts of these rows, too."""
        self._accepted.append(np.stack([row_ids, num_drafts]))

    def forget(self) -> None:
        """Drop all recorded changes."""
        for recorded in (
            self._new,
            self._changed,
            self._edited,
            self._miscounted,
            self._accepted,
        ):
            recorded.clear()

    def changes(self, table: SequenceTable) -> list[Column]:
        """Return the current values of all entries that changed since the last call, to be uploaded
        and passed to `apply`. Empty if nothing changed."""
        if not any((self._new, self._changed, self._edited, self._miscounted, self._accepted)):
            return []
        accepted = np.concatenate([np.empty((2, 0), np.int64), *self._accepted], axis=1)
        new = np.unique(np.array(self._new, np.int64))
        changed = np.concatenate([np.empty((0, 3), np.int64), *self._changed])
        entries = [
            _entries(new, changed[changed[:, 1] == group][:, [0, 2]], tables)
            for group, tables in enumerate(table.tables)
        ]
        edited = np.unique(np.concatenate([new, np.array(self._edited, np.int64)]))
        counted = _edits_of(sorted({*new.tolist(), *self._miscounted}), table.sampling)
        self.forget()
        return [
            accepted,
            new,
            *(column for columns in entries for column in columns),
            edited,
            *_params_and_edits(edited, table),
            *_occurrences(counted, len(self.sampling.counts)),
        ]

    def apply(self, changes: list[Tensor]) -> None:
        """Apply the uploaded result of `changes`."""
        if not changes:
            return
        tables = self.sampling
        (accepted, new), num_entries = changes[:2], 3 * len(self.block_tables)
        edited, params, *edits, counted, counts_at, values = changes[2 + num_entries :]
        if accepted.numel():
            tables.num_ahead.index_add_(0, accepted[0], accepted[1], alpha=-1)
        if len(new):
            self._progress.index_fill_(1, new, 0)
        for group, block_tables in enumerate(self.block_tables):
            row_ids, indices, blocks = changes[2 + 3 * group : 5 + 3 * group]
            if len(new):
                block_tables.index_fill_(0, new, NO_BLOCK)
            if len(row_ids):
                block_tables.index_put_((row_ids, indices), blocks)
        if len(edited):
            tables.params.index_copy_(0, edited, params)
        edits_at, edit_tokens, edit_values, edit_ends = edits
        if len(edit_tokens):
            at = (edits_at[0], edits_at[1])
            tables.edit_tokens.index_put_(at, edit_tokens)
            tables.edit_values.index_put_(at, edit_values.view(torch.float32))
            tables.edit_ends.index_put_(at, edit_ends)
        if len(counted):
            tables.counts.index_fill_(0, counted, 0)
            tables.counts.index_put_((counts_at[0], counts_at[1]), values)


def capacity(max_blocks: int, num_seqs: int = 1) -> int:
    """Return the default number of rows, which cannot grow: enough for most loads while block
    tables stay small, and at least for `num_seqs` running sequences and as many waiting ones."""
    affordable = _MAX_TABLE_BYTES // (4 * max_blocks)
    needed = 1 << (2 * num_seqs - 1).bit_length()
    return max(_MIN_ROWS, min(_MAX_AFFORDABLE_ROWS, affordable), needed)


def _entries(new: Int64Array, changed: Int64Array, tables: BlockTables) -> list[Column]:
    """Rows, indices and blocks of the tables of new sequences, and of changed entries.

    changed: [n, 2], rows and indices.
    """
    firsts = tables.firsts[new]
    counts = tables.ends[new] - firsts
    starts = np.repeat(firsts - np.cumsum(counts) + counts, counts)
    added = np.stack([np.repeat(new, counts), np.arange(counts.sum()) + starts], axis=1)
    row_ids, indices = np.concatenate([added, changed]).T.astype(np.int64)
    return [row_ids.copy(), indices.copy(), tables.blocks[row_ids, indices]]


def _edits_of(row_ids: Iterable[int], table: SamplingTable) -> list[tuple[int, LogitEdits]]:
    """The rows that have edits, with these."""
    edits = table.edits
    return [(row_id, edits[row_id]) for row_id in row_ids if row_id in edits] if edits else []


def _params_and_edits(row_ids: Int64Array, table: SequenceTable) -> list[Column]:
    """Return parameters, int64 [n, len(SamplingParam)] with the bits of float64, and the m edits of
    these rows: rows and columns [2, m], tokens, the bits of values, and ends [m]."""
    sampling = table.sampling
    params = np.zeros((len(row_ids), len(SamplingParam)), np.int64)
    reals = params.view(np.float64)
    for name, column in sampling.filters.items():
        target = reals if isinstance(FILTERS[name], float) else params
        target[:, SamplingParam[name.upper()]] = column[row_ids]
    reals[:, SamplingParam.TEMPERATURE] = sampling.temperature[row_ids]
    params[:, SamplingParam.SEED] = sampling.seed[row_ids].view(np.int64)
    params[:, SamplingParam.CHOICE_INDEX] = sampling.choice_index[row_ids]
    params[:, SamplingParam.OFFERS] = sampling.num_candidates[row_ids] > 0
    places = [np.empty((2, 0), np.int64)]
    entries: list[tuple[Column, ...]] = [(_NO_ENTRIES, _NO_ENTRIES, _NO_ENTRIES)]
    for row_id, edits in _edits_of(row_ids.tolist(), sampling):
        index = np.searchsorted(row_ids, row_id)
        if edits.max_entries <= MAX_EDITS:
            tokens, values, ends = edits.entries(table.output(row_id))
            count = params[index, SamplingParam.NUM_EDITS] = len(tokens)
            places.append(np.stack([np.full(count, row_id), np.arange(count)]))
            entries.append((tokens, values.view(np.int32), ends))
        params[index, SamplingParam.IS_PENALIZED] = edits.occurrences is not None
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            reals[index, SamplingParam[name.upper()]] = getattr(edits.params, name)
    columns = (np.concatenate(parts) for parts in zip(*entries, strict=True))
    return [params, np.concatenate(places, axis=1), *columns]


def _occurrences(found: list[tuple[int, LogitEdits]], num_counted: int) -> list[Column]:
    """Return the rows whose tokens are counted, rows and tokens of their occurrences [2, m], and
    the entries of `SamplingTables.counts` there [m]."""
    counted = [
        (row_id, edits.occurrences)
        for row_id, edits in found
        if edits.occurrences is not None and row_id < num_counted
    ]
    counts = np.concatenate([_NO_ENTRIES, *(found.output_counts for _, found in counted)])
    row_ids = np.array([row_id for row_id, _ in counted], np.int64)
    tokens = np.concatenate([_NO_ROWS, *(found.token_ids for _, found in counted)])
    return [
        row_ids,
        np.stack([np.repeat(row_ids, [len(found) for _, found in counted]), tokens]),
        counts * COUNT_ONE_OUTPUT + COUNT_OCCURS,
    ]
