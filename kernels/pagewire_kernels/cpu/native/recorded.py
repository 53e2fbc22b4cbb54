"""A model's embedding and layers as a recorded program."""

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pagewire_kernels.cpu.native.compiled import Library
from pagewire_kernels.cpu.native.program import Program, record
from pagewire_kernels.cpu.native.structs import describe_batch
from pagewire_kernels.cpu.threads import NotRecordable
from pagewire_kernels.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

Embed = Callable[[Tensor, Tensor], Tensor]
"""Of token ids and positions, int64 [num_tokens]; returns [num_tokens, hidden_size]."""

Layers = Callable[[Tensor, Tensor, Tensor, AttentionMetadata], Tensor]
"""Of x [num_tokens, hidden_size], which may be overwritten, positions, the KV cache and the
metadata; returns [num_tokens, ...]."""

_MIN_ROWS = 64


class RecordedLayers:
    """Does what `layers` do to what `embed` gives, by a program recorded of them.

    It is recorded when first called, and again for another cache, another number of threads, or a
    batch larger than it has buffers for. What does anything but run kernels made for that is called
    as it is: the embedding, or all of it. An object serves one thread at a time.
    """

    def __init__(self, embed: Embed, layers: Layers, library: Library) -> None:
        self._embed = embed
        self._layers = layers
        self._library = library
        self._recording: _Recording | None = None
        self._records_embedding = True
        self._records_layers = True

    @property
    def is_recorded(self) -> bool:
        """Whether the last batch was computed by a program."""
        return self._recording is not None

    def __call__(
        self, token_ids: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """The hidden states, which the next call overwrites."""
        recording = self._recording
        if recording is None or not recording.fits(token_ids, kv_cache):
            x = self._embed(token_ids, positions)
            recording = self._record(x, kv_cache, metadata)
            if recording is None:
                return self._layers(x, positions, kv_cache, metadata)
        return recording.run(token_ids, positions, metadata)

    def _record(
        self, x: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> "_Recording | None":
        """As much of it as can be recorded."""
        self._recording = None  # its buffers, first
        while self._records_layers:
            try:
                self._recording = _Recording(
                    self._embed,
                    self._layers,
                    self._library,
                    x,
                    kv_cache,
                    metadata,
                    records_embedding=self._records_embedding,
                )
            except NotRecordable as error:
                self._note_failure(error)
            else:
                break
        return self._recording

    def _note_failure(self, error: NotRecordable) -> None:
        if self._records_embedding:
            logger.debug("the embedding may not be recordable: it uses %s", error)
            self._records_embedding = False
        else:
            logger.info("layers are not recorded as a program: they use %s", error)
            self._records_layers = False


class _Recording:
    """A program, what it reads and what it gives."""

    def __init__(
        self,
        embed: Embed,
        layers: Layers,
        library: Library,
        x: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        records_embedding: bool,
    ) -> None:
        """x, metadata: of the batch that is to be computed first."""
        max_rows = max(_MIN_ROWS, 1 << (x.shape[0] - 1).bit_length())
        self._embed = embed
        self._made_for = _identity(kv_cache)
        self._num_threads = torch.get_num_threads()
        self._program = program = Program(library, max_rows)
        self._x: Tensor | None = None
        """What an embedding that is not recorded is copied to."""
        if not records_embedding:
            self._x = program.buffers.take((max_rows, *x.shape[1:]), x.dtype)
        metadata = replace(metadata, slot_mapping=program.slot_mapping)
        with record(program):
            first = self._x
            if first is None:
                first = embed(program.token_ids, program.positions)
            self._output = layers(first, program.positions, kv_cache, metadata)
        logger.debug(
            "layers recorded max_rows=%d num_steps=%d buffer_bytes=%d",
            max_rows,
            program.num_steps,
            program.buffers.num_bytes,
        )

    def fits(self, token_ids: Tensor, kv_cache: Tensor) -> bool:
        """Whether the program can compute these rows over this cache."""
        return (
            token_ids.shape[0] <= self._program.max_rows
            and self._made_for == _identity(kv_cache)
            and self._num_threads == torch.get_num_threads()
        )

    def run(self, token_ids: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        num_rows = token_ids.shape[0]
        if self._x is not None:
            self._x[:num_rows].copy_(self._embed(token_ids, positions))
        describe_batch(self._program.batch, metadata, positions, token_ids)
        self._program.run(self._num_threads)
        return self._output[:num_rows]


def _identity(kv_cache: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return kv_cache.data_ptr(), kv_cache.shape, kv_cache.dtype
