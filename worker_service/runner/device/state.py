"""State on a device for one KV cache: rows of sequences, sampler and CUDA graphs."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from worker_service.distributed.communicator import Communicator
from worker_service.errors import CaptureFailed
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.models.interface import Model
from worker_service.runner.device.cuda_graphs import GraphRecorder, StepGraphs
from worker_service.runner.device.draft_passes import DraftGraphs, DraftPass
from worker_service.runner.device.rows import MAX_COUNT_BYTES, DeviceRows, capacity
from worker_service.runner.device.sampler import DeviceSampler, StepKernels, step_kernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateShape:
    """What a `DeviceState` has room for."""

    num_seqs: int = 64
    """Running sequences; there is room for waiting ones, too."""

    num_rows: int | None = None
    """Capacity in sequences; None: the default of `capacity`."""

    max_count_bytes: int = MAX_COUNT_BYTES
    """Memory for occurrences of tokens."""

    sizes: Sequence[int] = ()
    """Padded batch sizes of decodes that are captured; empty: no graphs."""

    mixed: Sequence[int] = ()
    """Padded numbers of tokens of mixed batches that are captured."""

    with_adapters: bool = False
    """Whether graphs with adapters are captured, too."""

    max_drafts: int = 0
    """Drafts of a sequence that are made on the device."""

    @property
    def largest(self) -> tuple[int, int]:
        """The most sequences and the most tokens of a batch that is captured; 0 without graphs."""
        return max(self.sizes, default=0), max([*self.sizes, *self.mixed], default=0)

    @property
    def draft_sizes(self) -> Sequence[int]:
        """Padded numbers of rows of a head's passes that are captured."""
        sizes = sorted(self.sizes) if self.max_drafts else []
        num_needed = sum(size < self.num_seqs for size in sizes) + 1
        return sizes[:num_needed]

    @property
    def num_graphs(self) -> int:
        """Graphs that are captured: two of each size of decodes, and one of each other size."""
        of_steps = 2 * len(self.sizes) + len(self.mixed)
        return of_steps * (1 + self.with_adapters) + len(self.draft_sizes)

    def rows(self, model: Model, block_size: int, device: torch.device) -> DeviceRows:
        """Allocate the rows."""
        groups, length = model.kv_cache_spec.groups(block_size), model.max_model_len
        num_blocks = sum(group.table_width(length) for group in groups)
        num_rows = self.num_rows or capacity(max(1, num_blocks), self.num_seqs)
        num_counted = self.max_count_bytes // (4 * model.vocab_size)
        num_counted = min(num_rows, 2 * self.num_seqs, num_counted)
        sizes = num_counted, self.max_drafts
        return DeviceRows(num_rows, groups, length, model.vocab_size, device, *sizes)

    def num_bytes(self, model: Model, block_size: int) -> int:
        """Bytes of the state, without the hidden states and activations of its graphs."""
        device = torch.device("meta")
        rows = self.rows(model, block_size, device)
        if not self.sizes:
            return rows.num_bytes
        sampler = DeviceSampler(rows, step_kernels(device), model.vocab_size)
        sizes = self.sizes, self.mixed, self.with_adapters
        graphs = StepGraphs(model, (), rows, sampler, *sizes)
        num_bytes = rows.num_bytes + graphs.num_bytes
        if self.draft_sizes:
            num_bytes += DraftGraphs.num_bytes(self.draft_sizes[-1], self.max_drafts)
        return num_bytes


class DeviceState:
    """State that a device keeps across epochs, for one KV cache: the tensors by row, and the
    sampler and graphs that refer to them."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        shape: StateShape,
        recorder: GraphRecorder | None = None,
        communicator: Communicator | None = None,
        kernels: StepKernels | None = None,
        head: DraftHead | None = None,
    ) -> None:
        """Allocate the state, and capture graphs.

        recorder: captures the graphs that `shape` names; communicator: of the ranks that share the
        model, which have joined and capture the same graphs, None for one rank; kernels: None for
        those of the device; head: drafts on the device, None for no head. Raises CaptureFailed,
        with the option to change.
        """
        device, self.shape = cache.device_cache.device, shape
        self.rows = shape.rows(model, block_size, device)
        kernels = kernels or step_kernels(device)
        self.sampler = DeviceSampler(self.rows, kernels, model.vocab_size, communicator)
        self.graphs: StepGraphs | None = None
        if recorder is not None and shape.sizes:
            parts = model, cache.caches, self.rows, self.sampler
            self.graphs = StepGraphs(*parts, shape.sizes, shape.mixed, shape.with_adapters)
            _record(partial(self.graphs.record, recorder))
        self.draft_graphs: DraftGraphs | None = None
        if recorder is not None and shape.draft_sizes and head is not None:
            draft_pass = DraftPass(head, cache.draft_caches, self.sampler)
            self.draft_graphs = DraftGraphs(draft_pass, self.rows, shape.draft_sizes)
            _record(partial(self.draft_graphs.record, recorder.record))


@torch.inference_mode()
def _record(record: Callable[[], None]) -> None:
    try:
        record()
    except Exception as error:
        # Out of memory, or a model of `transformers` that synchronizes with the device within a
        # step. Running eagerly instead would be several times slower without any notice.
        logger.exception("capturing steps failed")
        raise CaptureFailed(_advice(error)) from error


def _advice(error: Exception) -> str:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        advice = "lower --gpu-memory-utilization or --max-graph-batch-size, or"
    else:
        advice = "if the model synchronises with the device in a step,"
    return (
        f"cuda_graphs: steps cannot be captured: {reason}; {advice} compute them eagerly,"
        " which is slower, with --no-cuda-graphs"
    )
