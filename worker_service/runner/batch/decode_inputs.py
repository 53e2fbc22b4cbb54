"""Inputs of steps that compute one token of each sequence, on a CPU.

Arrays are kept from step to step: allocating them costs more than filling them, and an operation of
torch releases the interpreter's lock, which other threads of a worker wait for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, LayerCaches, StepBatch
from worker_service.array_types import Int64Array
from worker_service.runner.state.block_tables import NO_BLOCK, BlockTables
from worker_service.runner.state.sequence_table import SequenceTable

_MIN_CAPACITY = 16


class _Views(NamedTuple):
    """Tensors over the first rows of the arrays that all cache groups share."""

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    sampled: Tensor
    """All rows."""


class _GroupInputs:
    """Block tables and slots in one cache group."""

    def __init__(self, capacity: int, width: int) -> None:
        self.width = width
        self._block_tables = np.full((capacity, width), NO_BLOCK, np.int32)
        self._slot_mapping = np.zeros(capacity, np.int64)
        self._views: dict[int, tuple[Tensor, Tensor]] = {}

    def fill(
        self, row_ids: Int64Array, positions: Int64Array, tables: BlockTables
    ) -> tuple[Tensor, Tensor]:
        """Block tables and slots for the next token of these rows."""
        num_rows = len(row_ids)
        self._block_tables[:num_rows] = tables.blocks[row_ids, : self.width]
        indices, offsets = np.divmod(positions, tables.block_tokens)
        self._slot_mapping[:num_rows] = tables.blocks[row_ids, indices]
        self._slot_mapping[:num_rows] *= tables.block_tokens
        self._slot_mapping[:num_rows] += offsets
        if num_rows not in self._views:
            arrays = self._block_tables[:num_rows], self._slot_mapping[:num_rows]
            self._views[num_rows] = torch.from_numpy(arrays[0]), torch.from_numpy(arrays[1])
        return self._views[num_rows]


class DecodeInputs:
    """Builds decode inputs in fixed arrays, so each build overwrites the tensors of the last."""

    def __init__(self, caches: Sequence[LayerCaches]) -> None:
        self._caches = caches
        self._groups: list[_GroupInputs] = []
        self._capacity = 0

    def build(self, row_ids: Int64Array, firsts: Int64Array, table: SequenceTable) -> StepBatch:
        """The batch of these rows of the table, each of which computes its token at `firsts` and
        samples."""
        num_rows, max_context_len = len(row_ids), int(firsts.max()) + 1
        self._reserve(num_rows, max_context_len, table)
        self._positions[:num_rows] = firsts
        self._context_lens[:num_rows] = firsts
        self._context_lens[:num_rows] += 1
        self._token_ids[:num_rows] = table.token_ids[row_ids, firsts]
        views = self._of_size.get(num_rows)
        if views is None:
            views = self._of_size[num_rows] = self._views(num_rows)
        attention = []
        for group, tables in zip(self._groups, table.tables, strict=True):
            block_tables, slot_mapping = group.fill(row_ids, firsts, tables)
            # A new object each time, since backends cache what they derive from it.
            metadata = AttentionMetadata(
                query_start=views.query_start,
                context_lens=views.context_lens,
                block_tables=block_tables,
                slot_mapping=slot_mapping,
                max_query_len=1,
                max_context_len=max_context_len,
            )
            attention.append(metadata)
        return StepBatch(
            token_ids=views.token_ids,
            positions=views.positions,
            attention=tuple(attention),
            caches=self._caches,
            sampled=views.sampled,
        )

    def _reserve(self, num_rows: int, num_tokens: int, table: SequenceTable) -> None:
        """Allocate for a power of two of sequences, and of blocks of a sequence of `num_tokens`."""
        if num_rows > self._capacity:
            self._groups = []
            capacity = self._capacity = max(_MIN_CAPACITY, 1 << (num_rows - 1).bit_length())
            self._query_start = np.arange(capacity + 1, dtype=np.int32)
            self._token_ids = np.zeros(capacity, np.int64)
            self._positions = np.zeros(capacity, np.int64)
            self._context_lens = np.zeros(capacity, np.int32)
            self._of_size: dict[int, _Views] = {}
        widths = [-(-num_tokens // tables.block_tokens) for tables in table.tables]
        groups = zip(self._groups, widths, strict=False)
        if not self._groups or any(width > group.width for group, width in groups):
            self._groups = [
                _GroupInputs(
                    self._capacity, min(1 << (width - 1).bit_length(), tables.blocks.shape[1])
                )
                for tables, width in zip(table.tables, widths, strict=True)
            ]

    def _views(self, num_rows: int) -> _Views:
        return _Views(
            token_ids=torch.from_numpy(self._token_ids[:num_rows]),
            positions=torch.from_numpy(self._positions[:num_rows]),
            query_start=torch.from_numpy(self._query_start[: num_rows + 1]),
            context_lens=torch.from_numpy(self._context_lens[:num_rows]),
            sampled=torch.arange(num_rows),
        )
