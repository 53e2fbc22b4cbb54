"""CUDA graphs of steps, one per padded batch size, captured once and replayed.

A step of a small model is hundreds of kernels of a few microseconds each, and launching a kernel
takes the host as long as the device takes to run it. A replay is a single launch. A graph reads its
inputs from fixed addresses: `static_inputs`, to which every step's inputs are copied, `bitmask`,
and the tensors of `DeviceRows`.

Batches of decodes have graphs by number of sequences, and mixed batches, of decodes and chunks of
prompts in any proportion, by number of tokens. A batch is padded to the next size with rows that
belong to no sequence: they have row `padding_row`, which has no blocks, so that they write to no
slot, attend over nothing (context length 0) and have no adapter.

Where sequences may have adapters, there are two graphs of each kind and size, of which one adds
those in the slots that its column of rows names. A step without adapters replays the other one,
which is that of a worker without adapters.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from pagewire_kernels.batch import (
    LayerMemory,
    RowAdapters,
    SamplingRows,
    StepBatch,
    StepInputs,
)
from pagewire_kernels.slot_deltas import NO_SLOT
from worker_service.array_types import Int32Array, Int64Array
from worker_service.models.interface import Model
from worker_service.pinned_memory import ALIGNMENT, Staging
from worker_service.runner.batch.forward import forward_of
from worker_service.runner.batch.inputs import HostInputs
from worker_service.runner.device.columns import StepColumns
from worker_service.runner.device.reports import DevicePass
from worker_service.runner.device.rows import DeviceRows
from worker_service.runner.device.sampler import DeviceSampler

logger = logging.getLogger(__name__)

Replay = Callable[[], None]

_SAMPLING_COLUMNS = ("row_ids", "outputs", "mask_rows")
"""Inputs of sampling: as the first three of `SamplingRows`."""

_ADAPTER_SLOTS = "adapter_slots"
"""Of decodes and rows that sample, and in another column of the tokens of mixed batches."""

_DECODE_COLUMNS = ("token_ids", "positions", "context_lens")

_CHANGES_BYTES = 2**18
"""Bytes of `static_inputs` after the inputs; a step with more row changes copies its inputs once
more, on the device."""

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


class StepGraphs:
    """Graphs of steps over one cache. There is one from the last hidden states to tokens for each
    number of rows, and one up to these states for each batch size, so that a step with log
    probabilities can replay the latter and sample eagerly, and one with constraints can send its
    bitmask in between."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerMemory],
        device_rows: DeviceRows,
        sampler: DeviceSampler,
        sizes: Sequence[int],
        mixed: Sequence[int] = (),
        with_adapters: bool = False,
    ) -> None:
        """sizes: of batches of decodes, in sequences; mixed: of other batches, in tokens;
        with_adapters: whether rows may have adapters.

        Records nothing yet."""
        self._model = model
        self._caches = caches
        self._device_rows = device_rows
        self._sampler = sampler
        self._sizes = sorted(sizes)
        self._mixed_sizes = sorted(mixed)
        of_rows = dict.fromkeys(("row_ids", "seq_rows", "token_rows"), device_rows.padding_row)
        self._padding = {**of_rows, "mask_rows": -1, _ADAPTER_SLOTS: NO_SLOT}
        """Values of padding rows, by name of the column, other than 0."""
        self._kinds = (True, False) if with_adapters else (False,)
        """Whether graphs add adapters, by kind of graph."""
        self._of_adapters = (_ADAPTER_SLOTS,) if with_adapters else ()
        self._decode_names = (*_SAMPLING_COLUMNS, *_DECODE_COLUMNS, *self._of_adapters)
        device, largest = device_rows.sampling.latest.device, self._sizes[-1]
        self._mixed_start = self._num_words = _aligned(len(self._decode_names) * largest)
        if mixed:
            lengths = self._mixed_lengths(self._mixed_sizes[-1]).values()
            self._num_words += sum(map(_aligned, lengths))
        num_bytes = 4 * self._num_words + ALIGNMENT + _CHANGES_BYTES
        self.static_inputs = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        """What graphs read, int32: the columns of decodes, [num_columns, size], then row changes;
        or these, then from a place that is the same for all sizes what only mixed batches have,
        then row changes."""
        self.outcome = torch.zeros(largest, dtype=torch.int64, device=device)
        """Output of sampling: a token or failure per row."""
        self.bitmask = sampler.bitmask(largest, model.vocab_size)
        self._query_start = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._hidden: Tensor | None = None
        self._captured: list[Tensor] = []
        """What the model captures, for the largest batch; see `Computed`."""
        self._forwards: dict[tuple[int, bool], Replay] = {}
        """By size, and whether adapters are added; as the next two."""
        self._samplings: dict[tuple[int, bool], Replay] = {}
        self._mixed: dict[tuple[int, bool], Replay] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of what graphs read and write, and of the largest batch's block tables."""
        tensors = (self.static_inputs, self.outcome, self.bitmask, self._query_start)
        width = sum(tables.shape[1] for tables in self._device_rows.block_tables)
        tables = 4 * self._sizes[-1] * width
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
        recordings = [partial(self._record_mixed, size) for size in mixed]
        recordings += [partial(self._record_decodes, size) for size in sizes]
        work = [partial(made, recorder, adds) for made in recordings for adds in self._kinds]
        for record in track(work, "recording steps", console=console, disable=hidden):
            record()
        logger.info("steps recorded seconds=%.1f", time.monotonic() - started)

    def _record_decodes(self, size: int, recorder: GraphRecorder, adds: bool) -> None:
        self._pad(self._decode_columns(self._words, size))
        self._forwards[size, adds] = recorder.record(partial(self._forward, size, adds))
        self._samplings[size, adds] = recorder.record(partial(self._sample, size, adds))

    def _record_mixed(self, size: int, recorder: GraphRecorder, adds: bool) -> None:
        self._pad(self._mixed_columns(self._words, size))
        self._mixed[size, adds] = recorder.record(partial(self._forward_mixed, size, adds))

    def run(self, step: StepColumns, staging: Staging) -> DevicePass | None:
        """Send the inputs of a step, and compute it up to the last hidden states by the graph of a
        padded size; None if none was recorded that can: graphs embed tokens, and save no states."""
        inputs, reports, num_tokens = step.inputs, step.reports, None
        num_sampling = len(step.states)
        size = next((size for size in self._sizes if size >= num_sampling), None)
        if size is None or inputs.has_virtual_tokens or any(inputs.saves):
            return None
        all_sample = np.array_equal(step.sampling.row_ids, inputs.row_ids)
        if inputs.max_query_len > 1 or not all_sample:
            num_tokens = self.mixed_size_for(inputs, num_sampling)
            if num_tokens is None or len(reports.spans):
                return None
        words = self._host_words(step, size, num_tokens)
        sampling_rows = self._rows(size, num_sampling)
        further = [*reports.columns, *step.of_drafts, *step.changes]
        sent_words, *sent = staging.send([words, *further], self.static_inputs)
        if sent_words.data_ptr() != self.static_inputs.data_ptr():  # they did not fit
            self._words[: len(words)].copy_(sent_words)
        num_reported, adds = len(reports.columns), step.adapter_slots is not None
        num_before = num_reported + len(step.of_drafts)
        self._device_rows.apply(sent[num_before:])
        step.begin_drafts(sent[num_reported:num_before], self._sampler)
        (self._forwards[size, adds] if num_tokens is None else self._mixed[num_tokens, adds])()
        return DevicePass(
            rows=sampling_rows,
            logits=partial(self._logits, size, num_sampling, adds),
            reported=sent[:num_reported],
            sample=self._samplings[size, adds],
            outcome=self.outcome[:num_sampling],
            captured=tuple(kept[: len(inputs.token_ids)] for kept in self._captured),
        )

    def mixed_size_for(self, inputs: HostInputs, num_sampling: int) -> int | None:
        """The smallest recorded number of tokens that holds a mixed batch; None if none does, or
        if it is better computed eagerly."""
        num_seqs, num_tokens = len(inputs.row_ids), len(inputs.token_ids)
        if max(num_seqs, num_sampling) > self._sizes[-1]:
            return None
        if inputs.max_mixed_context > MAX_MIXED_CONTEXT:
            return None
        return next((size for size in self._mixed_sizes if size >= num_tokens), None)

    def _host_words(self, step: StepColumns, size: int, num_tokens: int | None) -> Int32Array:
        """The inputs of a step with padding, as they lie in `static_inputs`: of decodes, or of a
        mixed batch that is padded to `num_tokens`."""
        inputs = step.inputs
        num_words = len(self._decode_names) * size if num_tokens is None else self._num_words
        words = np.zeros(num_words, np.int32)
        decodes = self._decode_columns(words, size)
        self._pad(decodes)
        _fill(decodes, step.sampling._asdict())
        of_adapters: dict[str, Int64Array] = {}
        if step.adapter_slots is not None:
            of_adapters[_ADAPTER_SLOTS] = step.adapter_slots
            _fill(decodes, {_ADAPTER_SLOTS: step.adapter_slots[step.states]})
        by_token = {"token_ids": inputs.token_ids, "positions": inputs.positions}
        if num_tokens is None:
            _fill(decodes, {**by_token, "context_lens": inputs.context_lens})
            return words
        mixed = self._mixed_columns(words, num_tokens)
        self._pad(mixed)
        mixed["query_start"][:] = inputs.query_start[-1]
        mixed["num_decodes"][:] = inputs.num_decodes
        _fill(mixed, by_token | of_adapters)
        by_seq = {"seq_rows": inputs.row_ids, "context_lens": inputs.context_lens}
        _fill(mixed, {**by_seq, "query_start": inputs.query_start})
        _fill(mixed, {"token_rows": inputs.token_row_ids, "last_states": step.states})
        return words

    def _rows(self, size: int, num_rows: int) -> SamplingRows:
        """The rows in the static inputs, without padding."""
        columns = self._decode_columns(self._words, size)
        row_ids, outputs, mask_rows = (columns[name][:num_rows] for name in _SAMPLING_COLUMNS)
        return SamplingRows(row_ids, outputs, mask_rows, self.bitmask)

    def _logits(self, size: int, num_rows: int, adds: bool) -> Tensor:
        """Logits of the first rows of a padded size, float32 [num_rows, vocab_size], computed
        eagerly. adds: what adapters add."""
        assert self._hidden is not None, "recorded before"
        adapters: RowAdapters = ()
        if adds:
            adapters = self._decode_columns(self._words, size)[_ADAPTER_SLOTS][:num_rows]
        return self._model.compute_logits(self._hidden[:num_rows], adapters)

    @property
    def _words(self) -> Tensor:
        return self.static_inputs.view(torch.int32)

    def _decode_columns(self, words: Any, size: int) -> dict[str, Any]:
        """Columns of decodes by name, [size] each, in `static_inputs` or in an array like it."""
        names = self._decode_names
        columns = words[: len(names) * size].reshape(len(names), size)
        return dict(zip(names, columns, strict=True))

    def _mixed_lengths(self, size: int) -> dict[str, int]:
        """Columns that only mixed batches have, with their lengths."""
        largest = self._sizes[-1]
        num_seqs = min(size, largest)
        by_seq = {"seq_rows": num_seqs, "context_lens": num_seqs, "query_start": num_seqs + 1}
        by_token = ("token_ids", "positions", "token_rows", *self._of_adapters)
        return {**by_seq, "num_decodes": 1, "last_states": largest, **dict.fromkeys(by_token, size)}

    def _mixed_columns(self, words: Any, size: int) -> dict[str, Any]:
        """The same columns, in `static_inputs` or in an array like it."""
        columns, start = {}, self._mixed_start
        for name, length in self._mixed_lengths(size).items():
            columns[name] = words[start : start + length]
            start += _aligned(length)
        return columns

    def _pad(self, columns: dict[str, Any]) -> None:
        """Fill columns as those of padding rows."""
        for name, column in columns.items():
            column[:] = self._padding.get(name, 0)

    def _forward(self, size: int, adds: bool) -> None:
        columns = self._decode_columns(self._words, size)
        rows, query_start = columns["row_ids"], self._query_start[: size + 1]
        batch = self._batch(columns, rows, rows, query_start, adds, max_query_len=1)
        hidden = self._computed(batch)
        self._states(hidden)[:size].copy_(hidden)

    def _batch(
        self,
        columns: dict[str, Tensor],
        token_rows: Tensor,
        seq_rows: Tensor,
        query_start: Tensor,
        adds: bool,
        **metadata: Any,
    ) -> StepBatch:
        inputs = StepInputs(
            token_ids=columns["token_ids"],
            positions=columns["positions"],
            token_rows=token_rows,
            seq_rows=seq_rows,
            context_lens=columns["context_lens"],
        )
        length = self._model.max_model_len
        batch = self._sampler.prepare(inputs, self._caches, query_start, length, **metadata)
        return replace(batch, adapters=columns[_ADAPTER_SLOTS]) if adds else batch

    def _computed(self, batch: StepBatch) -> Tensor:
        """Compute the last hidden states, and keep what the model captures."""
        hidden, _, captured = forward_of(self._model)(batch)
        if not self._captured:  # in the first run, which is not captured, of the largest batch
            most = max([*self._sizes, *self._mixed_sizes])
            self._captured = [part.new_zeros((most, part.shape[1])) for part in captured]
        for kept, part in zip(self._captured, captured, strict=True):
            kept[: len(part)].copy_(part)
        return hidden

    def _states(self, like: Tensor) -> Tensor:
        """Where graphs leave the hidden states to sample from, for the largest batch."""
        if self._hidden is None:  # in the first run, which is not captured
            self._hidden = like.new_zeros((self._sizes[-1], like.shape[1]))
        return self._hidden

    def _forward_mixed(self, size: int, adds: bool) -> None:
        columns = self._mixed_columns(self._words, size)
        batch = self._batch(
            columns,
            columns["token_rows"],
            columns["seq_rows"],
            columns["query_start"],
            adds,
            max_query_len=max(2, size),
            device_num_decodes=columns["num_decodes"],
        )
        hidden = self._computed(batch)
        torch.index_select(hidden, 0, columns["last_states"], out=self._states(hidden))

    def _sample(self, size: int, adds: bool) -> None:
        rows, outcome = self._rows(size, size), self.outcome[:size]
        logits = self._logits(size, size, adds)
        if self._sampler.samples:
            self._sampler.sample(logits, rows, outcome)
        self._sampler.share(rows, outcome)


def _fill(columns: dict[str, Any], values: dict[str, Int64Array]) -> None:
    """Set the first elements of columns."""
    for name, column in values.items():
        columns[name][: len(column)] = column
