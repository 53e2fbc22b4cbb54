"""A model's layers as a recorded program."""

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

Layers = Callable[[Tensor, Tensor, Tensor, AttentionMetadata], Tensor]
"""Of x [num_tokens, hidden_size], positions int64 [num_tokens], the KV cache and the metadata;
returns [num_tokens, ...]."""

_MIN_ROWS = 64


class RecordedLayers:
    """Does what `layers` do, by a program recorded of them.

    It is recorded when first called, and again for another cache, another number of threads, or a
    batch larger than it has buffers for. Layers that do anything but run kernels made for that are
    called as they are. An object serves one thread at a time.
    """

    def __init__(self, layers: Layers, library: Library) -> None:
        self._layers = layers
        self._library = library
        self._recording: _Recording | None = None
        self._is_recordable = True

    @property
    def is_recorded(self) -> bool:
        """Whether the last batch was computed by a program."""
        return self._recording is not None

    def __call__(
        self, x: Tensor, positions: Tensor, kv_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """As `layers`; x is left as it is."""
        if not self._is_recordable:
            return self._layers(x, positions, kv_cache, metadata)
        if self._recording is None or not self._recording.fits(x, kv_cache):
            self._recording = None  # its buffers, first
            try:
                self._recording = _Recording(self._layers, self._library, x, kv_cache, metadata)
            except NotRecordable as error:
                self._is_recordable = False
                logger.info("layers are not recorded as a program: they use %s", error)
                return self._layers(x, positions, kv_cache, metadata)
        return self._recording.run(x, positions, metadata)


class _Recording:
    """A program, what it reads and what it gives."""

    def __init__(
        self,
        layers: Layers,
        library: Library,
        x: Tensor,
        kv_cache: Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        """x, metadata: of the batch that is to be computed first."""
        max_rows = max(_MIN_ROWS, 1 << (x.shape[0] - 1).bit_length())
        self._made_for = _identity(kv_cache)
        self._num_threads = torch.get_num_threads()
        self._program = program = Program(library, max_rows)
        self._x = program.buffers.take((max_rows, *x.shape[1:]), x.dtype)
        metadata = replace(metadata, slot_mapping=program.slot_mapping)
        with record(program):
            self._output = layers(self._x, program.positions, kv_cache, metadata)
        logger.debug(
            "layers recorded max_rows=%d num_steps=%d buffer_bytes=%d",
            max_rows,
            program.num_steps,
            program.buffers.num_bytes,
        )

    def fits(self, x: Tensor, kv_cache: Tensor) -> bool:
        """Whether the program can compute these rows over this cache."""
        return (
            x.shape[0] <= self._program.max_rows
            and self._made_for == _identity(kv_cache)
            and self._num_threads == torch.get_num_threads()
        )

    def run(self, x: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        num_rows = x.shape[0]
        self._x[:num_rows].copy_(x)
        describe_batch(self._program.batch, metadata, positions)
        self._program.run(self._num_threads)
        return self._output[:num_rows].clone()


def _identity(kv_cache: Tensor) -> tuple[int, torch.Size, torch.dtype]:
    return kv_cache.data_ptr(), kv_cache.shape, kv_cache.dtype
