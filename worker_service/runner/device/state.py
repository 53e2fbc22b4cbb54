"""State on a device for one KV cache: rows of sequences, sampler and CUDA graphs."""

import logging
from collections.abc import Sequence

import torch

from worker_service.distributed.communicator import Communicator
from worker_service.errors import CaptureFailed
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.runner.device.cuda_graphs import GraphRecorder, StepGraphs
from worker_service.runner.device.rows import MAX_COUNT_BYTES, DeviceRows, capacity
from worker_service.runner.device.sampler import DeviceSampler, StepKernels, step_kernels

logger = logging.getLogger(__name__)


def rows_for(
    model: Model,
    block_size: int,
    num_seqs: int,
    device: torch.device,
    num_rows: int | None = None,
    max_count_bytes: int = MAX_COUNT_BYTES,
) -> DeviceRows:
    """Allocate rows for `num_seqs` running sequences and for waiting ones.

    num_rows: capacity in sequences; None for the default of `capacity`.
    """
    groups = model.kv_cache_spec.groups(block_size)
    num_blocks = sum(-(-model.max_model_len // group.block_tokens) for group in groups)
    num_rows = num_rows or capacity(num_blocks, num_seqs)
    num_counted = min(num_rows, 2 * num_seqs, max_count_bytes // (4 * model.vocab_size))
    return DeviceRows(num_rows, groups, model.max_model_len, model.vocab_size, device, num_counted)


def state_bytes(
    model: Model, block_size: int, num_seqs: int, sizes: list[int], mixed: Sequence[int] = ()
) -> int:
    """Bytes of a `DeviceState`, without the hidden states and activations of its graphs."""
    device = torch.device("meta")
    rows = rows_for(model, block_size, num_seqs, device)
    if not sizes:
        return rows.num_bytes
    sampler = DeviceSampler(rows, step_kernels(device), model.vocab_size)
    graphs = StepGraphs(model, (), rows, sampler, sizes, mixed)
    return rows.num_bytes + graphs.num_bytes


class DeviceState:
    """State that a device keeps across epochs, for one KV cache: the tensors by row, and the
    sampler and graphs that refer to them."""

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
        mixed: Sequence[int] = (),
        communicator: Communicator | None = None,
    ) -> None:
        """Allocate the state, and capture graphs.

        recorder: captures graphs, None for no graphs; sizes: padded batch sizes of decodes; mixed:
        padded numbers of tokens of mixed batches; num_rows: capacity in sequences, None for the
        default, with room for `num_seqs` running and as many waiting ones; max_count_bytes: memory
        for occurrences of tokens; kernels: None for those of the device; communicator: of the ranks
        that share the model, which have joined and capture the same graphs, None for one rank.

        Raises CaptureFailed, with the option to change.
        """
        vocab_size, device = model.vocab_size, cache.device_cache.device
        self.rows = rows_for(model, block_size, num_seqs, device, num_rows, max_count_bytes)
        kernels = kernels or step_kernels(device)
        self.sampler = DeviceSampler(self.rows, kernels, vocab_size, communicator)
        self.graphs: StepGraphs | None = None
        if recorder is not None and sizes:
            caches = cache.caches
            self.graphs = StepGraphs(model, caches, self.rows, self.sampler, sizes, mixed)
            _record(self.graphs, recorder)


@torch.inference_mode()
def _record(graphs: StepGraphs, recorder: GraphRecorder) -> None:
    try:
        graphs.record(recorder)
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
