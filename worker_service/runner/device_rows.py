"""Sequence state on the device, with the same rows as the host's `SequenceTable`.

A step uploads only what changed since the last one, and gathers its rows' entries. Token ids are
not part of it, except each sequence's latest one, which the device sampled itself; all others are
uploaded with the steps that compute them.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels.batch import SamplingMetadata
from worker_service.array_types import Int64Array
from worker_service.pinned_memory import Column
from worker_service.plan import RowErrorReason
from worker_service.runner.sequence_table import NO_BLOCK, SequenceTable
from worker_service.sampling.sampling_table import SamplingTable
from worker_service.sampling_params import FILTERS

NON_FINITE = -1
"""The sampling kernels' result, instead of a token, for a row whose largest logit is not finite."""
NO_CANDIDATES = -2
OFF_CONSTRAINT = -3
FAILURES = {
    NON_FINITE: RowErrorReason.NON_FINITE_LOGITS,
    NO_CANDIDATES: RowErrorReason.NO_CANDIDATES,
    OFF_CONSTRAINT: RowErrorReason.CONSTRAINT,
}

_NUM_PARAMS = len(FILTERS) + 3
"""The filters, the temperature, the seed and the choice index."""

_MAX_TABLE_BYTES = 64 * 2**20
_MAX_INITIAL_ROWS = 1024
_MIN_INITIAL_ROWS = 64


class DeviceRows:
    """Block tables, sampling parameters and latest tokens on the device.

    One row more than sequences can have: `padding_row`, which has no blocks and belongs to the
    rows that fill up a batch.
    """

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.padding_row = num_rows
        shape = (num_rows + 1, max_blocks)
        self.block_tables = torch.full(shape, NO_BLOCK, dtype=torch.int32, device=device)
        self.latest = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        """The token sampled last; once a sequence has failed, the reason, one of `FAILURES`."""
        self._params = torch.zeros((num_rows + 1, _NUM_PARAMS), dtype=torch.int64, device=device)
        self._new: list[int] = []
        self._changed: list[npt.NDArray[np.integer]] = []

    def note_new(self, row_id: int) -> None:
        """A sequence was added in this row: the device's entries for it are stale."""
        self._new.append(row_id)

    def note_blocks(self, row_ids: Int64Array, indices: npt.NDArray[np.integer]) -> None:
        """These entries of these rows' block tables have changed."""
        self._changed.append(np.stack([row_ids, indices], axis=1))

    def forget(self) -> None:
        """Drop all noted changes."""
        self._new.clear()
        self._changed.clear()

    def changes(self, table: SequenceTable) -> list[Column]:
        """The changes noted since the last call, to be uploaded and passed to `apply`, with the
        current values. Empty if there are none."""
        if not self._new and not self._changed:
            return []
        new = np.unique(np.array(self._new, np.int64))
        counts = table.num_blocks[new]
        firsts = np.repeat(np.cumsum(counts) - counts, counts)
        own = np.stack([np.repeat(new, counts), np.arange(counts.sum()) - firsts], axis=1)
        entries = np.concatenate([own, *self._changed]).astype(np.int64)
        blocks = table.block_tables[entries[:, 0], entries[:, 1]]
        self.forget()
        return [
            new,
            _pack(table.sampling, new),
            np.ascontiguousarray(entries[:, 0]),
            np.ascontiguousarray(entries[:, 1]),
            blocks,
        ]

    def apply(self, changes: list[Tensor]) -> None:
        """Apply the uploaded result of `changes`."""
        if not changes:
            return
        new, params, row_ids, indices, blocks = changes
        if len(new):
            self.block_tables.index_fill_(0, new, NO_BLOCK)
            self._params.index_copy_(0, new, params)
            self.latest.index_fill_(0, new, 0)
        if len(row_ids):
            self.block_tables.index_put_((row_ids, indices), blocks)

    def fill_in(self, token_ids: Tensor, unknown: Tensor, row_ids: Tensor) -> None:
        """Put the latest tokens of these rows at these places; any token for a sequence that has
        failed. token_ids: int64; unknown, rows: int64 [n]."""
        if len(unknown):
            token_ids.index_copy_(0, unknown, self.known_tokens(row_ids))

    def known_tokens(self, row_ids: Tensor) -> Tensor:
        """The latest tokens, int64 [n]; 0 where a sequence has failed."""
        return self.latest.index_select(0, row_ids).clamp_min(0)

    def sampling(self, row_ids: Tensor, positions: Tensor) -> SamplingMetadata:
        """How these rows' sequences are sampled. rows: int64 [n]; positions: int32 [n]."""
        rows = self._params.index_select(0, row_ids).t().contiguous()
        filters = {
            name: row.view(torch.float64) if isinstance(neutral, float) else row.int()
            for (name, neutral), row in zip(FILTERS.items(), rows, strict=False)
        }
        return SamplingMetadata(
            **filters,
            temperature=rows[-3].view(torch.float64).float(),
            seeds=rows[-2],
            choice_indices=rows[-1].int(),
            positions=positions,
        )

    def settle(self, row_ids: Tensor, drawn: Tensor) -> Tensor:
        """Store the tokens drawn; a sequence that failed before stays failed, with the same reason.

        Both int64 [n]; returns tokens or failures, int64 [n]."""
        before = self.latest.index_select(0, row_ids)
        outcome = torch.where(before < 0, before, drawn)
        self.latest.index_copy_(0, row_ids, outcome)
        return outcome


def initial_rows(max_blocks: int, num_seqs: int = 1) -> int:
    """Initial number of rows: enough for most loads while block tables stay small, and always for
    `num_seqs` sequences, rounded up to a power of two as in the host's table."""
    affordable = _MAX_TABLE_BYTES // (4 * max_blocks)
    needed = 1 << (num_seqs - 1).bit_length()
    return max(_MIN_INITIAL_ROWS, min(_MAX_INITIAL_ROWS, affordable), needed)


def _pack(table: SamplingTable, row_ids: Int64Array) -> Int64Array:
    """[n, _NUM_PARAMS]: float64 and integers by their bits, in the order of `_NUM_PARAMS`."""
    columns = [
        *(column[row_ids] for column in table.filters.values()),
        table.temperature[row_ids].astype(np.float64),
        table.seed[row_ids],
        table.choice_index[row_ids].astype(np.int64),
    ]
    return np.stack([column.view(np.int64) for column in columns], axis=1)
