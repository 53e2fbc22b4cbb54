"""What LoRA adapters add to products in C++; see src/adapters.h."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.checks import DTYPES
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import batch_of, launch, new_tensor
from pagewire_kernels.cpu.tasks import (
    AdapterRows,
    AdapterSlot,
    AdapterSpan,
    AdapterTask,
    EmbeddingDeltaTask,
    address,
    rows_of,
)

_ROW_BYTES = 64
"""Rows of A are padded to a multiple of this."""

_BLOCK_OUTPUTS = 16
"""The same constant as in src/adapters.h."""

_STEP_BYTES = 4
"""Columns of B that are multiplied at once."""

_RANK_UNIT = 4
"""Ranks are padded to a multiple of this."""


class ActiveRows:
    """The rows of the present step by slot of their adapter, which the layers of a model share."""

    def __init__(self) -> None:
        self._rows = AdapterRows()
        self._columns: dict[str, list[np.ndarray]] = {}
        """By field, also those that were too short. A thread that lost its core may read any of
        them at a later step (src/share.h)."""

    @property
    def address(self) -> int:
        """Of the structure that kernels read, which is never moved."""
        return ctypes.addressof(self._rows)

    def set(self, slots: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Set the rows of the adapters in some slots: int64 [n] each, ascending."""
        starts = np.cumsum([0, *map(len, rows)])
        self._write("slots", np.array(slots, np.int32))
        self._write("starts", starts)
        self._write("rows", np.concatenate([chosen.numpy() for chosen in rows] or [starts[:0]]))
        self._rows.num_groups = len(slots)

    def _write(self, name: str, numbers: np.ndarray) -> None:
        columns = self._columns.setdefault(name, [])
        if not columns or len(columns[-1]) < len(numbers):
            columns.append(np.zeros(max(64, 2 * len(numbers)), np.int32))
            setattr(self._rows, name, columns[-1].ctypes.data)
        columns[-1][: len(numbers)] = numbers


class DeltaPart(NamedTuple):
    """What an adapter adds to some outputs of a product: x @ a.T @ b.T * scale."""

    a: Tensor
    """[rank, in_features]."""

    b: Tensor
    """[num_outputs, rank]."""

    scale: float
    first_output: int


class PackedDelta(NamedTuple):
    """What an adapter adds to the products of one layer, as the kernels read it."""

    a: Tensor
    scales: Tensor
    b: Tensor
    spans: ctypes.Array[AdapterSpan]
    rank: int

    @property
    def num_bytes(self) -> int:
        """Its memory."""
        return self.a.nbytes + self.scales.nbytes + self.b.nbytes + ctypes.sizeof(self.spans)


class NativeDeltas:
    """What the adapters in slots add to the products of one layer."""

    def __init__(
        self,
        outputs: Sequence[int],
        rows: ActiveRows,
        max_slots: int,
        num_modules: int,
        max_rank: int,
        library: Library,
        dtype: torch.dtype,
    ) -> None:
        """outputs: how many the layer has, of gate and up projection apart; rows: of steps;
        num_modules: the most parts of an adapter; max_rank: of a part; dtype: of the layer's rows,
        float32 or bfloat16."""
        self._outputs, self._rows, self._dtype = outputs, rows, dtype
        self._max_rank = num_modules * _padded(max_rank)
        self._slots = (AdapterSlot * max_slots)()
        self._kept: dict[int, PackedDelta] = {}
        """By slot."""
        self._kernel = library.kernel(f"multiply_a_{DTYPES[dtype]}")

    def pack(self, parts: Sequence[DeltaPart]) -> PackedDelta:
        """Pack what an adapter adds to the layer; it may be put into slots any number of times."""
        rank = sum(_padded(part.a.shape[0]) for part in parts)
        number_bytes = self._dtype.itemsize
        in_features = parts[0].a.shape[1]
        row_bytes = -(-in_features * number_bytes // _ROW_BYTES) * _ROW_BYTES
        a = torch.zeros(rank, row_bytes // number_bytes, dtype=self._dtype)
        sizes = [-(-size // _BLOCK_OUTPUTS) * _BLOCK_OUTPUTS for size in self._outputs]
        # The last panel may have a block beyond the outputs.
        b = torch.zeros(sum(sizes) + _BLOCK_OUTPUTS, rank, dtype=self._dtype)
        scales = torch.zeros(rank + _BLOCK_OUTPUTS)  # of whole registers
        first = 0
        for part in parts:
            size = part.a.shape[0]
            ranks = slice(first, first + size)
            a[ranks, :in_features] = part.a
            scales[ranks] = part.scale
            for start, rows in self._in_blocks(part.first_output, part.b, sizes):
                b[start : start + len(rows), ranks] = rows
            first += _padded(size)
        return PackedDelta(a, scales, *self._pack_b(b), rank)

    def fill(self, slot: int, packed: PackedDelta) -> None:
        """Put an adapter that changes the layer into a slot."""
        self._kept[slot] = packed
        self._slots[slot] = AdapterSlot(
            a=address(packed.a),
            a_row_bytes=packed.a.stride(0) * packed.a.element_size(),
            rank=packed.rank,
            scales=address(packed.scales),
            spans=ctypes.addressof(packed.spans),
        )

    def _in_blocks(self, first: int, b: Tensor, sizes: Sequence[int]) -> list[tuple[int, Tensor]]:
        """The rows of B for outputs from `first` on, where they are if each of the layer's parts
        begins with a block."""
        found, start, padded_start = [], 0, 0
        for size, padded in zip(self._outputs, sizes, strict=True):
            low, high = max(first, start), min(first + len(b), start + size)
            if low < high:
                found.append((padded_start + low - start, b[low - first : high - first]))
            start, padded_start = start + size, padded_start + padded
        return found

    def _pack_b(self, b: Tensor) -> tuple[Tensor, ctypes.Array[AdapterSpan]]:
        """The blocks of B, without the columns before the first and after the last that is not
        zero."""
        # Columns that are multiplied in one step stay together.
        of_blocks = b.unflatten(0, (-1, _BLOCK_OUTPUTS))
        of_blocks = of_blocks.unflatten(2, (-1, _STEP_BYTES // b.element_size())).transpose(1, 2)
        is_used = of_blocks.ne(0).flatten(2).any(dim=2)
        steps = torch.arange(is_used.shape[1])
        first = torch.where(is_used, steps, len(steps)).amin(dim=1, keepdim=True)
        last = torch.where(is_used, steps, -1).amax(dim=1, keepdim=True)
        packed = of_blocks[(steps >= first) & (steps <= last)]
        ranges, sizes = torch.cat([first, (last + 1 - first).clamp(min=0)], 1).unique_consecutive(
            return_counts=True, dim=0
        )
        spans = (AdapterSpan * len(sizes))()
        block, at = 0, packed.data_ptr()
        described = zip(spans, ranges.tolist(), sizes.tolist(), strict=True)
        for span, (first_step, num_steps), num_blocks in described:
            block_bytes = num_steps * _BLOCK_OUTPUTS * _STEP_BYTES
            span.b = at - block * block_bytes
            block, at = block + num_blocks, at + num_blocks * block_bytes
            span.end, span.first_step, span.num_steps = block, first_step, num_steps
        return packed, spans

    def clear(self, slot: int) -> None:
        """Let the adapter of a slot change nothing."""
        self._slots[slot] = AdapterSlot()
        self._kept.pop(slot, None)

    def multiply(self, x: Tensor) -> Tensor:
        """Launch the products with A: [num_rows, *], which `fields` expects.

        x: [num_rows, in_features], with a dense last axis.
        """
        num_rows, in_features = x.shape
        inner = new_tensor((num_rows, self._max_rank), self._dtype)
        num_threads = threads.count_for(num_rows * in_features * _RANK_UNIT)
        task = AdapterTask(
            num_threads=num_threads,
            **rows_of(x=x, inner=inner),
            in_features=in_features,
            slots=ctypes.addressof(self._slots),
            rows=self._rows.address,
        )
        launch(self._kernel, task, num_threads)
        return inner

    def fields(self, inner: Tensor) -> dict[str, int]:
        """The fields of the task of a product that adds B times `inner`, which must outlive it."""
        return {
            "delta_slots": ctypes.addressof(self._slots),
            "delta_rows": self._rows.address,
            **rows_of(inner=inner),
        }


class EmbeddingDeltas(NativeDeltas):
    """What the adapters in slots add to the rows of an embedding, whose inputs are tokens."""

    def __init__(
        self,
        size: int,
        num_tokens: int,
        rows: ActiveRows,
        max_slots: int,
        max_rank: int,
        library: Library,
        dtype: torch.dtype,
    ) -> None:
        """size: of a row; num_tokens: that the embedding has; the others: as of `NativeDeltas`."""
        super().__init__([size], rows, max_slots, 1, max_rank, library, dtype)
        self._num_tokens = num_tokens
        self._add = library.kernel(f"add_embedding_deltas_{DTYPES[dtype]}")

    def pack(self, parts: Sequence[DeltaPart]) -> PackedDelta:
        packed = super().pack(parts)
        scaled = packed.a[:, : self._num_tokens] * packed.scales[: packed.rank, None]
        return packed._replace(a=scaled.t().to(self._dtype).contiguous())

    def add(self, y: Tensor, token_ids: Tensor) -> None:
        """Add to rows of the embedding, [num_rows, size]. token_ids: int64 [num_rows]."""
        num_rows = len(token_ids)
        token_ids = token_ids.contiguous()
        task = EmbeddingDeltaTask(
            batch=ctypes.addressof(batch_of(num_rows, token_ids=token_ids)),
            slots=ctypes.addressof(self._slots),
            rows=self._rows.address,
            num_tokens=self._num_tokens,
            **rows_of(y=y),
            size=y.shape[1],
        )
        num_threads = threads.count_for(y.numel() * _RANK_UNIT)
        launch(self._add, task, num_threads)


def _padded(rank: int) -> int:
    return -(-rank // _RANK_UNIT) * _RANK_UNIT
