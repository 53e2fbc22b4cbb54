"""What a device keeps of sequences and recordings, over one cache."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.pinned_memory import Column
from worker_service.runner.cuda_graphs import DecodeGraphs, GraphRecorder
from worker_service.runner.device_rows import DeviceRows, initial_rows
from worker_service.runner.device_sampler import (
    MAX_COUNT_BYTES,
    DevicePenalties,
    DeviceSampler,
    sampling_kernels,
)
from worker_service.runner.sequence_table import SequenceTable

logger = logging.getLogger(__name__)


class RowChanges(NamedTuple):
    """Columns of what has changed."""

    rows: list[Column]
    penalties: list[Column]

    @property
    def columns(self) -> list[Column]:
        """All of them."""
        return self.rows + self.penalties


class DeviceState:
    """What a device keeps from epoch to epoch, over one cache: the tensors by row, the sampler and
    the recordings that refer to them."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        recorder: GraphRecorder | None = None,
        sizes: list[int] | None = None,
        num_rows: int | None = None,
        num_seqs: int = 1,
        max_penalty_bytes: int = MAX_COUNT_BYTES,
    ) -> None:
        """recorder: makes recordings of decode steps of these padded sizes; None makes none.
        num_rows: sequences to make room for at first; None takes enough for most, and for
        `num_seqs` in any case: to make room later takes as long as to record.
        max_penalty_bytes: memory for counts of tokens."""
        self._model = model
        self._kv_cache = cache.device_cache
        self._max_blocks = -(-model.max_model_len // block_size)
        self._recorder = recorder
        self._sizes = sizes or []
        self._max_penalty_bytes = max_penalty_bytes
        self._make(num_rows or initial_rows(self._max_blocks, num_seqs))

    def note_new(self, row_id: int, table: SequenceTable) -> None:
        """A sequence was added in this row."""
        self.rows.note_new(row_id)
        self.penalties.note(row_id, table.sampling)

    def forget(self) -> None:
        """There are no sequences."""
        self.rows.forget()
        self.penalties.forget()

    def changes(self, table: SequenceTable) -> RowChanges:
        """What has changed since the last time, to be sent and applied."""
        return RowChanges(self.rows.changes(table), self.penalties.changes(table.sampling))

    def apply(self, changes: RowChanges, sent: list[Tensor]) -> None:
        """Take in changes, whose columns have arrived as these tensors."""
        count = len(changes.rows)
        self.rows.apply(sent[:count])
        self.penalties.apply(sent[count:])

    def grow(self, table: SequenceTable) -> None:
        """Make room for as many sequences as the table has. They come to the device once more, so
        the host must know all of their tokens."""
        logger.warning("making room for more sequences num_rows=%d", table.num_rows)
        self._make(table.num_rows)
        for row_id in table.used_rows():
            self.note_new(row_id, table)

    def _make(self, num_rows: int) -> None:
        device = self._kv_cache.device
        self.graphs: DecodeGraphs | None = None
        self.rows = DeviceRows(num_rows, self._max_blocks, device)
        vocab_size, max_bytes = self._model.vocab_size, self._max_penalty_bytes
        self.penalties = DevicePenalties(vocab_size, device, max_bytes)
        self.sampler = DeviceSampler(self.rows, self.penalties, sampling_kernels(device))
        if self._recorder is not None and self._sizes:
            self.graphs = self._record(self._recorder)

    @torch.inference_mode()
    def _record(self, recorder: GraphRecorder) -> DecodeGraphs | None:
        graphs = DecodeGraphs(self._model, self._kv_cache, self.rows, self.sampler, self._sizes)
        try:
            graphs.record(recorder)
        except RuntimeError as error:
            # A model from elsewhere may wait for the device in the middle of a step.
            reason = str(error).splitlines()[0]
            logger.warning("decode steps cannot be recorded, going on without error=%s", reason)
            return None
        return graphs
