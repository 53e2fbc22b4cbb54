"""State on a device: rows of sequences, sampler and CUDA graphs, over one cache."""

import logging
from typing import NamedTuple

import torch
from torch import Tensor

from worker_service.errors import CaptureFailed
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
    """Changes to the device's rows and token counts, as columns."""

    rows: list[Column]
    penalties: list[Column]

    @property
    def columns(self) -> list[Column]:
        """Both, in the order in which they are sent."""
        return self.rows + self.penalties


class DeviceState:
    """State that a device keeps from epoch to epoch, over one cache: the tensors by row, and the
    sampler and the graphs that refer to them."""

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
        """recorder: captures decode steps of these padded sizes; None captures none.
        num_rows: initial capacity in sequences; None takes the usual capacity, at least `num_seqs`,
        since growing takes as long as capturing all graphs again.
        max_penalty_bytes: memory for counts of tokens.

        Raises CaptureFailed."""
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
        """Forget all sequences."""
        self.rows.forget()
        self.penalties.forget()

    def changes(self, table: SequenceTable) -> RowChanges:
        """Changes since the last call, to be sent to the device and applied."""
        return RowChanges(self.rows.changes(table), self.penalties.changes(table.sampling))

    def apply(self, changes: RowChanges, sent: list[Tensor]) -> None:
        """Apply changes whose columns are now on the device as these tensors."""
        count = len(changes.rows)
        self.rows.apply(sent[:count])
        self.penalties.apply(sent[count:])

    def grow(self, table: SequenceTable) -> None:
        """Increase the capacity to that of the table. All sequences are sent to the device again,
        so the host must know all of their tokens."""
        logger.warning("growing the tables of sequences num_rows=%d", table.num_rows)
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
    def _record(self, recorder: GraphRecorder) -> DecodeGraphs:
        graphs = DecodeGraphs(self._model, self._kv_cache, self.rows, self.sampler, self._sizes)
        try:
            graphs.record(recorder)
        except Exception as error:
            # Out of memory, or a model of transformers that synchronises with the device in the
            # middle of a step. Running eagerly would be several times slower without a notice.
            logger.exception("capturing decode steps failed")
            raise CaptureFailed(_advice(error)) from error
        return graphs


def _advice(error: Exception) -> str:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        advice = "lower --gpu-memory-utilization or --max-graph-batch-size, or"
    else:
        advice = "if the model synchronises with the device in a step,"
    return (
        f"cuda_graphs: decode steps cannot be captured: {reason}; {advice} compute them eagerly,"
        " which is slower, with --no-cuda-graphs"
    )
