"""CUDA graphs of decode steps, one per padded batch size, captured once and replayed.

A decode step of a small model is hundreds of kernels of a few microseconds each, and launching a
kernel takes the host as long as the device takes to run it. A replay is a single launch. A graph
reads its inputs from fixed addresses: `static_inputs`, to which every step's inputs are copied,
`bitmask`, and the tensors of `DeviceRows`.

A batch is padded to the next size with rows that belong to no sequence: they have row
`padding_row`, write to no slot (slot mapping -1) and attend over nothing (context length 0).
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata, SamplingRows, StepInputs
from worker_service.array_types import Int32Array, Int64Array
from worker_service.models.interface import Model
from worker_service.pinned_memory import ALIGNMENT, Column
from worker_service.runner.batch import HostInputs
from worker_service.runner.device_rows import DeviceRows
from worker_service.runner.device_sampler import DeviceSampler

logger = logging.getLogger(__name__)

Replay = Callable[[], None]

_NUM_COLUMNS = 7
_MAX_CHANGES_BYTES = 2**18
"""Bytes of `static_inputs` after the inputs; a step with more row changes runs eagerly."""


class GraphRecorder(Protocol):
    """Captures work, to be replayed."""

    def record(self, work: Callable[[], None]) -> Replay:
        """Do the work once, and return a function that does it again on the same tensors."""
        ...


class CudaGraphRecorder:
    """Captures CUDA graphs. All share one memory pool, since they never run at the same time; its
    size is that of the largest graph, if that is captured first."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, work: Callable[[], None]) -> Replay:
        """Do the work once, which compiles kernels, then capture it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        )
        try:
            # A capture that fails leaves its stream current; the context around it does not.
            with torch.cuda.stream(current), capture:
                work()
        except RuntimeError:
            self._end_failed_capture()
            raise
        return graph.replay

    def _end_failed_capture(self) -> None:
        """Notify torch's allocator that the capture has ended. Otherwise it releases no cached
        memory and fails every later capture."""
        device = torch.cuda.current_device()
        # Fails if the allocator knows already, which it does unless the capture itself failed. The
        # functions are private to torch and may disappear.
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        # Since torch 2.10 the pinned memory allocator, which has no such call, refuses this pool.
        self._pool = torch.cuda.graph_pool_handle()


def graph_sizes(max_size: int) -> list[int]:
    """Padded batch sizes, smallest first: spacing grows with size, bounding padding waste."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_size + 1, 16)]
    below = [size for size in sizes if size < max_size]
    return [*below, max_size] if max_size > 0 else []


class DecodeGraphs:
    """Graphs of decode steps over one cache. There are two per size, one up to the last hidden
    states and one from these to tokens, so that a step with log probabilities can replay the first
    and sample eagerly, and one with constraints can send its bitmask in between."""

    def __init__(
        self,
        model: Model,
        kv_cache: Tensor,
        device_rows: DeviceRows,
        sampler: DeviceSampler,
        sizes: Sequence[int],
    ) -> None:
        """Records nothing yet."""
        self._model = model
        self._kv_cache = kv_cache
        self._device_rows = device_rows
        self._sampler = sampler
        self._sizes = sorted(sizes)
        device, largest = kv_cache.device, self._sizes[-1]
        num_bytes = 4 * _NUM_COLUMNS * largest + ALIGNMENT + _MAX_CHANGES_BYTES
        self.static_inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        """What graphs read: int32 [7, size] as `columns` makes them, then row changes."""
        self.outcome = torch.zeros(largest, dtype=torch.int64, device=device)
        """Output of `replay_sampling`: a token or failure per row."""
        self.bitmask = sampler.bitmask(largest, model.vocab_size)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._hidden: Tensor | None = None
        self._forwards: dict[int, Replay] = {}
        self._samplings: dict[int, Replay] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of what graphs read and write, and of the largest batch's block tables."""
        tensors = (self.static_inputs, self.outcome, self.bitmask, self._query_start)
        tables = 4 * self._sizes[-1] * self._device_rows.block_tables.shape[1]
        return tables + sum(tensor.nbytes for tensor in tensors)

    def record(self, recorder: GraphRecorder) -> None:
        """Record all sizes, the largest first, with a progress bar if stderr is a terminal."""
        started = time.monotonic()
        sizes = self._sizes[::-1]
        logger.info("recording decode steps num_sizes=%d largest=%d", len(sizes), sizes[0])
        console = Console(stderr=True)
        hidden = not console.is_terminal
        for size in track(sizes, "recording decode steps", console=console, disable=hidden):
            self._fill_with_padding(size)
            self._forwards[size] = recorder.record(partial(self._forward, size))
            self._samplings[size] = recorder.record(partial(self._sample, size))
        seconds = time.monotonic() - started
        logger.info("decode steps recorded num_sizes=%d seconds=%.1f", len(sizes), seconds)

    def size_for(self, num_rows: int) -> int | None:
        """The smallest recorded size that holds `num_rows` rows; None if none does."""
        return next((size for size in self._sizes if size >= num_rows), None)

    def have_room_for(self, changes: Sequence[Column]) -> bool:
        """Whether these fit into `static_inputs` after the inputs."""
        return sum(column.nbytes + ALIGNMENT for column in changes) <= _MAX_CHANGES_BYTES

    def columns(
        self, inputs: HostInputs, positions: Int64Array, mask_rows: Int64Array, size: int
    ) -> Int32Array:
        """[7, size]: a decode step's inputs, with padding rows. positions, mask_rows: as in
        `SamplingRows`."""
        columns = np.zeros((_NUM_COLUMNS, size), np.int32)
        self._pad(columns)
        num_rows = len(inputs.row_ids)
        for column, values in enumerate(
            (
                inputs.row_ids,
                inputs.token_ids,
                inputs.positions,
                inputs.context_lens,
                inputs.slot_mapping,
                positions,
                mask_rows,
            )
        ):
            columns[column, :num_rows] = values
        return columns

    def replay_forward(self, size: int) -> None:
        """Compute the static inputs up to the last hidden states."""
        self._forwards[size]()

    def replay_sampling(self, size: int) -> None:
        """Sample from these hidden states into `outcome`."""
        self._samplings[size]()

    def rows(self, size: int, num_rows: int) -> SamplingRows:
        """The rows in the static inputs, without padding."""
        row_ids, *_, positions, mask_rows = self._inputs(size)[:, :num_rows]
        return SamplingRows(
            row_ids=row_ids, positions=positions, mask_rows=mask_rows, bitmask=self.bitmask
        )

    def logits(self, num_rows: int) -> Tensor:
        """Logits of the first rows, float32 [num_rows, vocab_size], computed eagerly."""
        assert self._hidden is not None, "recorded before"
        return self._model.compute_logits(self._hidden[:num_rows])

    def _inputs(self, size: int) -> Tensor:
        num_bytes = 4 * _NUM_COLUMNS * size
        return self.static_inputs[:num_bytes].view(torch.int32).view(_NUM_COLUMNS, size)

    def _fill_with_padding(self, size: int) -> None:
        inputs = self._inputs(size)
        inputs.zero_()
        self._pad(inputs)

    def _pad(self, columns: Tensor | Int32Array) -> None:
        columns[0] = self._device_rows.padding_row
        columns[4] = columns[6] = -1

    def _forward(self, size: int) -> None:
        row_ids, token_ids, positions, context_lens, slot_mapping, *_ = self._inputs(size)
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            token_rows=row_ids,
            seq_rows=row_ids,
            context_lens=context_lens,
        )
        prepared = self._sampler.prepare(inputs, self._device_rows.block_tables.shape[1])
        hidden = self._model.forward(
            prepared.token_ids,
            prepared.positions,
            self._kv_cache,
            AttentionMetadata(
                query_start=self._query_start[: size + 1],
                context_lens=context_lens,
                block_tables=prepared.block_tables,
                slot_mapping=prepared.slot_mapping,
                max_query_len=1,
                max_context_len=self._model.max_model_len,
            ),
        )
        if self._hidden is None:  # allocated for the largest size, which is recorded first
            self._hidden = torch.zeros_like(hidden)
        self._hidden[:size].copy_(hidden)

    def _sample(self, size: int) -> None:
        self._sampler.sample(self.logits(size), self.rows(size, size), self.outcome[:size])
