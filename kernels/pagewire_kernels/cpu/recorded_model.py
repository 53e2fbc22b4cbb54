"""Runs a model's forward pass as one recorded program."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import torch
from torch import Tensor

from pagewire_kernels.batch import LayerMemory, StateUnits, StepBatch, tensor_of
from pagewire_kernels.cpu.layers import find_largest, take
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import Program, new_rows, record
from pagewire_kernels.cpu.tasks import describe_batch
from pagewire_kernels.cpu.threads import NotRecordable
from pagewire_kernels.interface import Computed, HeadOutput

logger = logging.getLogger(__name__)

Embed = Callable[[StepBatch], Tensor]
"""Maps the batch to the embedding of its tokens, [num_tokens, hidden_size]."""

Layers = Callable[[Tensor, StepBatch], Tensor]
"""Maps x [num_tokens, hidden_size], which may be overwritten, and the batch to hidden states
[num_tokens, ...]."""

Head = Callable[[Tensor], Tensor]
"""Maps hidden states [num_rows, ...] to logits, float32 [num_rows, vocab_size]."""

_MIN_ROWS = 64


class Part(Enum):
    """Optional parts of a program."""

    EMBEDDING = auto()
    HEAD = auto()


class RecordedModel:
    """Runs `embed`, `layers` and `head` in order, as a program recorded from them.

    The first call records the program; a call with another cache, another number of threads or a
    batch that exceeds the buffers records it again. Parts that use operations that cannot be
    recorded run eagerly: the embedding or the layers here, the head in the caller. Only one thread
    may use an object at a time.
    """

    def __init__(self, embed: Embed, layers: Layers, head: Head | None, library: Library) -> None:
        """head: None for a model without one."""
        self._embed, self._layers, self._head = embed, layers, head
        self._library = library
        self._recording: _Recording | None = None
        self._max_rows = self._max_sampled = 0
        """Maxima over all batches so far. A program has room for both, so that alternating batches
        of many rows and batches of many samples do not record it again and again."""
        self._parts = set(Part) if head is not None else {Part.EMBEDDING}
        self._records = True

    def __call__(self, batch: StepBatch) -> Computed:
        """Compute hidden states, and logits of `batch.sampled`, which are valid until the next
        call."""
        recording = self._recording
        if recording is None or not recording.fits(batch):
            x = self._embed(batch)
            recording = self._record(x, batch)
            if recording is None:
                return Computed(self._layers(x, batch))
        return recording.run(batch)

    def _record(self, x: Tensor, batch: StepBatch) -> "_Recording | None":
        """Record all parts that can be recorded. Returns None if the layers cannot."""
        self._max_rows = max(self._max_rows, x.shape[0])
        self._max_sampled = max(self._max_sampled, _num_sampled(batch))
        self._recording = None  # frees its buffers first
        while self._records and self._recording is None:
            recording = _Recording(self._library, batch, self._max_rows, self._max_sampled)
            try:
                self._record_parts(recording, x, batch)
            except NotRecordable as error:
                self._leave_out(recording.at, error)
            else:
                self._recording = recording
        return self._recording

    def _record_parts(self, recording: "_Recording", x: Tensor, batch: StepBatch) -> None:
        with recording.record():
            recording.embed(self._embed, x, batch, is_recorded=Part.EMBEDDING in self._parts)
            recording.run_layers(self._layers, batch)
            if self._head is not None and Part.HEAD in self._parts:
                recording.run_head(self._head)

    def _leave_out(self, part: Part | None, error: NotRecordable) -> None:
        if part is not None:
            logger.debug("not recorded part=%s reason=%s", part.name.lower(), error)
            self._parts.remove(part)
        else:
            logger.info("layers run eagerly, not as a recorded program: they use %s", error)
            self._records = False


class _Recording:
    """A program, its inputs and its outputs."""

    def __init__(self, library: Library, batch: StepBatch, num_rows: int, num_sampled: int) -> None:
        """batch: any batch over the caches; num_rows, num_sampled: minimum capacity of the
        buffers."""
        self.at: Part | None = None
        """The part that is being recorded; None for the layers."""
        self._library = library
        self._made_for = _identity(batch.caches)
        self._num_threads = torch.get_num_threads()
        self._program = Program(library, _room_for(num_rows), len(batch.attention))
        self._max_sampled = _room_for(num_sampled)
        self._embed: Embed | None = None
        """The embedding, if it is not recorded; its rows are copied into the program."""
        self._head: HeadOutput | None = None

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the operations in the `with` block."""
        with record(self._program):
            yield
        logger.debug(
            "model recorded max_rows=%d max_sampled=%d num_steps=%d buffer_bytes=%d",
            self._program.max_rows,
            self._max_sampled,
            self._program.num_steps,
            self._program.buffers.num_bytes,
        )

    def embed(self, embed: Embed, like: Tensor, batch: StepBatch, *, is_recorded: bool) -> None:
        """like: rows of the embedding."""
        self.at = Part.EMBEDDING
        if is_recorded:
            self._x = embed(self._program.inputs_of(batch))
        else:
            self._embed = embed
            self._x = new_rows(self._program.max_rows, like.shape[1], like.dtype)

    def run_layers(self, layers: Layers, batch: StepBatch) -> None:
        self.at = None
        self._hidden = layers(self._x, self._program.inputs_of(batch))

    def run_head(self, head: Head) -> None:
        self.at = Part.HEAD
        program, num_sampled = self._program, self._max_sampled
        program.num_sampled = num_sampled
        batch = program.batches[0]
        last = take(self._library, self._hidden, num_sampled, batch, "num_sampled", "sampled")
        logits = head(last)
        self._head = HeadOutput(logits, *find_largest(self._library, logits))

    def fits(self, batch: StepBatch) -> bool:
        """Whether the program can compute these rows with these caches."""
        return (
            batch.token_ids.shape[0] <= self._program.max_rows
            and _num_sampled(batch) <= self._max_sampled
            and self._made_for == _identity(batch.caches)
            and self._num_threads == torch.get_num_threads()
        )

    def run(self, batch: StepBatch) -> Computed:
        num_rows, sampled = batch.token_ids.shape[0], batch.sampled
        if self._embed is not None:
            self._x[:num_rows].copy_(self._embed(batch))
        for native, metadata in zip(self._program.batches, batch.attention, strict=True):
            describe_batch(native, num_rows, metadata, batch)
        self._program.run(self._num_threads)
        hidden = self._hidden[:num_rows]
        if self._head is None or sampled is None:
            return Computed(hidden)
        num_sampled = sampled.shape[0]
        return Computed(hidden, HeadOutput(*(part[:num_sampled] for part in self._head)))


def _room_for(num_rows: int) -> int:
    return max(_MIN_ROWS, 1 << max(0, num_rows - 1).bit_length())


def _num_sampled(batch: StepBatch) -> int:
    return 0 if batch.sampled is None else batch.sampled.shape[0]


def _identity(caches: Sequence[LayerMemory]) -> list[tuple[int, torch.Size, torch.dtype]]:
    """What differs between caches: the first layer's keys and the first state, by layer, and
    nothing without any."""
    firsts = {isinstance(kept[0], StateUnits): tensor_of(kept) for kept in reversed(caches)}
    found = [(first.data_ptr(), first.shape, first.dtype) for first in firsts.values()]
    return found * len(caches)
