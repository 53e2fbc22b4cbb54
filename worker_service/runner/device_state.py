"""State on a device: rows of sequences, sampler and CUDA graphs, over one cache."""

import logging

import torch

from worker_service.errors import CaptureFailed
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.runner.cuda_graphs import DecodeGraphs, GraphRecorder
from worker_service.runner.device_rows import MAX_COUNT_BYTES, DeviceRows, initial_rows
from worker_service.runner.device_sampler import DeviceSampler, StepKernels, step_kernels
from worker_service.runner.sequence_table import SequenceTable

logger = logging.getLogger(__name__)


def rows_for(
    model: Model,
    block_size: int,
    num_seqs: int,
    device: torch.device,
    num_rows: int | None = None,
    max_count_bytes: int = MAX_COUNT_BYTES,
) -> DeviceRows:
    """Rows for `num_seqs` running sequences and others that wait.

    num_rows: capacity in sequences; None takes the usual capacity.
    """
    max_blocks = -(-model.max_model_len // block_size)
    num_rows = num_rows or initial_rows(max_blocks, num_seqs)
    num_counted = min(num_rows, 2 * num_seqs, max_count_bytes // (4 * model.vocab_size))
    return DeviceRows(num_rows, max_blocks, model.vocab_size, device, num_counted)


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
        num_seqs: int = 64,
        max_count_bytes: int = MAX_COUNT_BYTES,
        kernels: StepKernels | None = None,
    ) -> None:
        """recorder: captures decode steps of these padded sizes; None captures none.
        num_rows: initial capacity in sequences; None takes the usual capacity, with room for
        `num_seqs` running ones, since growing takes as long as capturing all graphs again.
        max_count_bytes: memory for occurrences of tokens. kernels: None takes those of the device.

        Raises CaptureFailed."""
        self._model = model
        self._kv_cache = cache.device_cache
        self._block_size = block_size
        self._recorder = recorder
        self._sizes = sizes or []
        self._num_seqs = num_seqs
        self._max_count_bytes = max_count_bytes
        self._kernels = kernels or step_kernels(self._kv_cache.device)
        self._make(num_rows)

    def grow(self, table: SequenceTable) -> None:
        """Increase the capacity to that of the table. All sequences are sent to the device again,
        so the host must know all of their tokens."""
        logger.warning("growing the tables of sequences num_rows=%d", table.num_rows)
        self._make(table.num_rows)
        for row_id in table.used_rows():
            self.rows.note_new(row_id)

    def _make(self, num_rows: int | None) -> None:
        model, device = self._model, self._kv_cache.device
        self.graphs: DecodeGraphs | None = None
        self.rows = rows_for(
            model, self._block_size, self._num_seqs, device, num_rows, self._max_count_bytes
        )
        self.sampler = DeviceSampler(self.rows, self._kernels, self._block_size, model.vocab_size)
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
