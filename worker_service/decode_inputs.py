"""The inputs of steps that compute one token of each sequence, on a CPU.

Such a step's arrays are as long as it has sequences, and kept from step to step: what is made anew
each time costs more than what is put into it, and an operation of torch lets go of the
interpreter's lock, which other threads of a worker wait for.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.metadata import AttentionMetadata
from worker_service.array_types import Int64Array
from worker_service.runner.batch import ForwardInputs
from worker_service.runner.sequence_table import NO_BLOCK, SequenceTable

_LEAST_ROOM = 16


class _Views(NamedTuple):
    """The first rows of all arrays."""

    token_ids: Tensor
    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    numbers: Tensor


class DecodeInputs:
    """Builds them; what it gave is overwritten by the next."""

    def __init__(self) -> None:
        self._width = 0
        self._make_room(_LEAST_ROOM, 1, 1)

    def build(self, slots: Int64Array, table: SequenceTable) -> ForwardInputs:
        """For the sequences in these slots; each computes its first token that is not computed."""
        num_rows, block_size = len(slots), table.block_size
        computed = table.num_computed_tokens[slots]
        longest = int(computed.max())
        max_blocks = longest // block_size + 1
        if num_rows > len(self._token_ids) or max_blocks > self._width:
            self._make_room(num_rows, max_blocks, table.block_tables.shape[1])
        blocks, offsets = np.divmod(computed, block_size)
        self._positions[:num_rows] = computed
        self._context_lens[:num_rows] = computed
        self._context_lens[:num_rows] += 1
        self._token_ids[:num_rows] = table.token_ids[slots, computed]
        self._slot_mapping[:num_rows] = table.block_tables[slots, blocks]
        self._slot_mapping[:num_rows] *= block_size
        self._slot_mapping[:num_rows] += offsets
        self._block_tables[:num_rows] = table.block_tables[slots, : self._width]
        views = self._of_size.get(num_rows)
        if views is None:
            views = self._of_size[num_rows] = self._views(num_rows)
        # The metadata is a new object, as backends keep what they derived from the last one.
        return ForwardInputs(
            token_ids=views.token_ids,
            positions=views.positions,
            metadata=AttentionMetadata(
                query_start=views.query_start,
                context_lens=views.context_lens,
                block_tables=views.block_tables,
                slot_mapping=views.slot_mapping,
                max_query_len=1,
                max_context_len=longest + 1,
            ),
        )

    def numbers(self, num_rows: int) -> Tensor:
        """0, 1, 2 …: int64 [num_rows]. Of a batch built before."""
        return self._of_size[num_rows].numbers

    def _make_room(self, num_rows: int, max_blocks: int, most_blocks: int) -> None:
        """For as many sequences and blocks, and some more, as far as there can be."""
        room = max(_LEAST_ROOM, 1 << (num_rows - 1).bit_length())
        self._width = max(self._width, min(1 << (max_blocks - 1).bit_length(), most_blocks))
        self._query_start = np.arange(room + 1, dtype=np.int32)
        self._token_ids = np.zeros(room, np.int64)
        self._positions = np.zeros(room, np.int64)
        self._slot_mapping = np.zeros(room, np.int64)
        self._context_lens = np.zeros(room, np.int32)
        self._block_tables = np.full((room, self._width), NO_BLOCK, np.int32)
        self._of_size: dict[int, _Views] = {}

    def _views(self, num_rows: int) -> _Views:
        return _Views(
            token_ids=torch.from_numpy(self._token_ids[:num_rows]),
            positions=torch.from_numpy(self._positions[:num_rows]),
            query_start=torch.from_numpy(self._query_start[: num_rows + 1]),
            context_lens=torch.from_numpy(self._context_lens[:num_rows]),
            block_tables=torch.from_numpy(self._block_tables[:num_rows]),
            slot_mapping=torch.from_numpy(self._slot_mapping[:num_rows]),
            numbers=torch.arange(num_rows),
        )
