"""CUDA graphs of steps, one per padded batch size, captured once and replayed.

A step of a small model is hundreds of kernels of a few microseconds each, and launching a kernel
takes the host as long as the device takes to run it. A replay is a single launch. A graph reads its
inputs from fixed addresses: `static_inputs`, to which every step's inputs are copied, `bitmask`,
and the tensors of `DeviceRows`.

Batches of decodes have graphs by number of sequences, and mixed batches, of decodes and chunks of
prompts in any proportion, by number of tokens. A batch is padded to the next size with rows that
belong to no sequence: they have row `padding_row`, write to no slot (slot mapping -1) and attend
over nothing (context length 0).
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from pagewire_kernels.batch import LayerCaches, SamplingRows, StepInputs
from worker_service.array_types import Int32Array, Int64Array
from worker_service.models.interface import Model
from worker_service.pinned_memory import ALIGNMENT, Column
from worker_service.runner.batch.step_rows import HostInputs
from worker_service.runner.device.rows import DeviceRows
from worker_service.runner.device.sampler import DeviceSampler

logger = logging.getLogger(__name__)

Replay = Callable[[], None]

_NUM_COLUMNS = 7
_MAX_CHANGES_BYTES = 2**18
"""Bytes of `static_inputs` after the inputs; a step with more row changes runs eagerly."""

MAX_MIXED_CONTEXT = 8192
"""Tokens of a prompt's context up to which a mixed batch is replayed. Its graph does not split the
contexts of prompts among programs, for it does not know how few they are; over long contexts an
eager step takes the device less time, and the host no longer than the device."""


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


def mixed_sizes(max_tokens: int) -> list[int]:
    """Padded numbers of tokens of mixed batches, smallest first, at most a quarter apart."""
    sizes, size = [], 32
    while size < max_tokens:
        sizes.append(size)
        size += max(32, (1 << size.bit_length()) // 8)
    return [*sizes, max_tokens] if max_tokens > 0 else []


def _aligned(num_words: int) -> int:
    """Words of int32 up to the next aligned address."""
    words = ALIGNMENT // 4
    return -(-num_words // words) * words


class _MixedInputs(NamedTuple):
    """The inputs that only mixed batches have, int32: tensors, or on the host arrays."""

    seq_rows: Any
    """[num_seqs]; `padding_row` where there is no sequence."""

    context_lens: Any
    """[num_seqs]."""

    query_start: Any
    """[num_seqs + 1]; the number of tokens for the rest."""

    num_decodes: Any
    """[1]: of the first sequences."""

    last_states: Any
    """[largest batch of decodes]: the hidden states to sample from."""

    by_token: Any
    """[4, num_tokens]: token ids, positions, slot mapping, token rows."""


class StepGraphs:
    """Graphs of steps over one cache. There is one from the last hidden states to tokens for each
    number of rows, and one up to these states for each batch size, so that a step with log
    probabilities can replay the latter and sample eagerly, and one with constraints can send its
    bitmask in between."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCaches],
        device_rows: DeviceRows,
        sampler: DeviceSampler,
        sizes: Sequence[int],
        mixed: Sequence[int] = (),
    ) -> None:
        """sizes: of batches of decodes, in sequences; mixed: of other batches, in tokens.

        Records nothing yet."""
        self._model = model
        self._caches = caches
        self._device_rows = device_rows
        self._sampler = sampler
        self._sizes = sorted(sizes)
        self._mixed_sizes = sorted(mixed)
        device, largest = device_rows.block_tables.device, self._sizes[-1]
        self._mixed_start = self._num_words = _aligned(_NUM_COLUMNS * largest)
        if mixed:
            self._num_words += sum(map(_aligned, self._mixed_lengths(self._mixed_sizes[-1])))
        num_bytes = 4 * self._num_words + ALIGNMENT + _MAX_CHANGES_BYTES
        self.static_inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        """What graphs read, int32: [7, size] as `columns` makes them, then row changes; or these,
        then from a place that is the same for all sizes what only mixed batches have, then row
        changes."""
        self.outcome = torch.zeros(largest, dtype=torch.int64, device=device)
        """Output of `replay_sampling`: a token or failure per row."""
        self.bitmask = sampler.bitmask(largest, model.vocab_size)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._hidden: Tensor | None = None
        self._forwards: dict[int, Replay] = {}
        self._samplings: dict[int, Replay] = {}
        self._mixed: dict[int, Replay] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of what graphs read and write, and of the largest batch's block tables."""
        tensors = (self.static_inputs, self.outcome, self.bitmask, self._query_start)
        tables = 4 * self._sizes[-1] * self._device_rows.block_tables.shape[1]
        return tables + sum(tensor.nbytes for tensor in tensors)

    def record(self, recorder: GraphRecorder) -> None:
        """Record all sizes, the largest first, with a progress bar if stderr is a terminal."""
        started = time.monotonic()
        sizes, mixed = self._sizes[::-1], self._mixed_sizes[::-1]
        counts = len(sizes), sizes[0], len(mixed), max(mixed, default=0)
        logger.info(
            "recording steps num_decode_sizes=%d largest=%d num_mixed_sizes=%d most_tokens=%d",
            *counts,
        )
        console = Console(stderr=True)
        hidden = not console.is_terminal
        work = [*(partial(self._record_mixed, recorder, size) for size in mixed)]
        work += [partial(self._record_decodes, recorder, size) for size in sizes]
        for record in track(work, "recording steps", console=console, disable=hidden):
            record()
        logger.info("steps recorded seconds=%.1f", time.monotonic() - started)

    def _record_decodes(self, recorder: GraphRecorder, size: int) -> None:
        self._pad(self._inputs(size))
        self._forwards[size] = recorder.record(partial(self._forward, size))
        self._samplings[size] = recorder.record(partial(self._sample, size))

    def _record_mixed(self, recorder: GraphRecorder, size: int) -> None:
        self._pad_mixed(self._mixed_inputs(self.static_inputs.view(torch.int32), size))
        self._mixed[size] = recorder.record(partial(self._forward_mixed, size))

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
        columns = np.empty((_NUM_COLUMNS, size), np.int32)
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

    def mixed_size_for(self, inputs: HostInputs, num_sampling: int) -> int | None:
        """The smallest recorded number of tokens that holds a mixed batch; None if none does, or
        if it is better computed eagerly."""
        num_seqs, num_tokens = len(inputs.row_ids), len(inputs.token_ids)
        prompts = inputs.context_lens[inputs.num_decodes :]
        if max(num_seqs, num_sampling) > self._sizes[-1]:
            return None
        if prompts.max(initial=0) > MAX_MIXED_CONTEXT:
            return None
        return next((size for size in self._mixed_sizes if size >= num_tokens), None)

    def mixed_columns(
        self,
        inputs: HostInputs,
        sampling_rows: Sequence[Int64Array],
        last_states: Int64Array,
        size: int,
    ) -> Int32Array:
        """A mixed batch's inputs. sampling_rows: row ids, positions and mask rows of the sequences
        that sample from `last_states`."""
        words = np.zeros(self._num_words, np.int32)
        num_sampling, num_seqs = len(last_states), len(inputs.row_ids)
        num_padded = self.size_for(num_sampling)
        assert num_padded is not None, "mixed_size_for gave a size"
        columns = words[: _NUM_COLUMNS * num_padded].reshape(_NUM_COLUMNS, num_padded)
        self._pad(columns)
        for column, values in zip((0, 5, 6), sampling_rows, strict=True):
            columns[column, :num_sampling] = values
        target = self._mixed_inputs(words, size)
        self._pad_mixed(target)
        target.seq_rows[:num_seqs] = inputs.row_ids
        target.context_lens[:num_seqs] = inputs.context_lens
        target.query_start[:num_seqs] = inputs.query_start[:-1]
        target.query_start[num_seqs:] = inputs.query_start[-1]
        target.num_decodes[:] = inputs.num_decodes
        target.last_states[:num_sampling] = last_states
        by_token = inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.token_row_ids
        for row, values in zip(target.by_token, by_token, strict=True):
            row[: len(values)] = values
        return words

    def replay_forward(self, size: int) -> None:
        """Compute the static inputs of decodes up to the last hidden states."""
        self._forwards[size]()

    def replay_mixed(self, size: int) -> None:
        """Compute the static inputs of a mixed batch up to the last hidden states."""
        self._mixed[size]()

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

    def _pad(self, columns: Tensor | Int32Array) -> None:
        columns[:] = 0
        columns[0] = self._device_rows.padding_row
        columns[4] = columns[6] = -1

    def _mixed_lengths(self, size: int) -> tuple[int, ...]:
        """Of each of `_MixedInputs`."""
        largest = self._sizes[-1]
        num_seqs = min(size, largest)
        return num_seqs, num_seqs, num_seqs + 1, 1, largest, 4 * size

    def _mixed_inputs(self, words: Any, size: int) -> _MixedInputs:
        """Where the inputs of a mixed batch lie in `static_inputs`, or in an array of its words."""
        parts, start = [], self._mixed_start
        for length in self._mixed_lengths(size):
            parts.append(words[start : start + length])
            start += _aligned(length)
        parts[-1] = parts[-1].reshape(4, size)
        return _MixedInputs(*parts)

    def _pad_mixed(self, inputs: _MixedInputs) -> None:
        for each in inputs:
            each[:] = 0
        inputs.seq_rows[:] = inputs.by_token[3] = self._device_rows.padding_row
        inputs.by_token[2] = -1

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
        batch = self._sampler.prepare(
            inputs,
            self._device_rows.block_tables.shape[1],
            self._caches,
            self._query_start[: size + 1],
            max_query_len=1,
            max_context_len=self._model.max_model_len,
        )
        hidden = self._model.forward(batch)
        self._states(hidden)[:size].copy_(hidden)

    def _states(self, like: Tensor) -> Tensor:
        """Where graphs leave the hidden states to sample from, for the largest batch."""
        if self._hidden is None:  # in the first run, which is not captured
            self._hidden = like.new_zeros((self._sizes[-1], like.shape[1]))
        return self._hidden

    def _forward_mixed(self, size: int) -> None:
        words = self.static_inputs.view(torch.int32)
        given = self._mixed_inputs(words, size)
        token_ids, positions, slot_mapping, token_rows = given.by_token
        inputs = StepInputs(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            token_rows=token_rows,
            seq_rows=given.seq_rows,
            context_lens=given.context_lens,
        )
        batch = self._sampler.prepare(
            inputs,
            self._device_rows.block_tables.shape[1],
            self._caches,
            given.query_start,
            max_query_len=max(2, size),
            max_context_len=self._model.max_model_len,
            device_num_decodes=given.num_decodes,
        )
        hidden = self._model.forward(batch)
        torch.index_select(hidden, 0, given.last_states, out=self._states(hidden))

    def _sample(self, size: int) -> None:
        rows, outcome = self.rows(size, size), self.outcome[:size]
        logits = self.logits(size)
        if self._sampler.samples:
            self._sampler.sample(logits, rows, outcome)
        self._sampler.share(rows, outcome)
