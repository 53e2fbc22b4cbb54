"""What LoRA adapters add to products in C++; see src/adapters.h."""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.checks import DTYPES, require
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import batch_of, launch, new_tensor
from pagewire_kernels.cpu.tasks import (
    AdapterRows,
    AdapterSlot,
    AdapterSpan,
    AdapterTask,
    EmbeddingDeltaTask,
    ExpertAdapterTask,
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

Allocate = Callable[[int], Tensor]
"""Returns zeros: uint8 [num_bytes], aligned to a cache line."""


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

    def set(self, slots: Sequence[int], rows: Sequence[Tensor], num_rows: int = 0) -> None:
        """Set the rows of the adapters in some slots: int64 [n] each, ascending.

        num_rows: of the step, whatever their adapter, if `ExpertDeltas` are used.
        """
        groups = np.full(num_rows, -1, np.int32)
        for group, chosen in enumerate(rows) if num_rows else ():
            groups[chosen.numpy()] = group
        self._write("groups", groups)
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
    expert: int = 0
    factors: Tensor | None = None
    """float32 [num_outputs], that the sums are multiplied by, too; None: by nothing."""


class PackedDelta(NamedTuple):
    """What an adapter adds to the products of one layer, as the kernels read it."""

    slots: ctypes.Array[AdapterSlot]
    """By expert; one of another layer."""

    a: Tensor
    scales: Tensor
    b: Tensor
    spans: ctypes.Array[AdapterSpan]
    factors: Tensor | None
    """float32 [num_experts, outputs in blocks]; None: no sums are multiplied."""

    @property
    def num_bytes(self) -> int:
        """Its memory."""
        arrays = ctypes.sizeof(self.slots) + ctypes.sizeof(self.spans)
        factors = 0 if self.factors is None else self.factors.nbytes
        return self.a.nbytes + self.scales.nbytes + self.b.nbytes + factors + arrays


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
        num_experts: int = 1,
    ) -> None:
        """outputs: how many the layer has, of gate and up projection apart; rows: of steps;
        num_modules: the most parts of an adapter; max_rank: of a part; dtype: of the layer's rows,
        float32 or bfloat16; num_experts: that have weights of these shapes, or heads, of which each
        has its part of a row."""
        self._outputs, self._rows, self._dtype = outputs, rows, dtype
        self._max_rank = num_modules * _padded(max_rank)
        self._num_experts = num_experts
        self._slots = (AdapterSlot * (max_slots * num_experts))()
        self._kept: dict[int, PackedDelta] = {}
        """By slot."""
        self._library = library

    def pack(self, parts: Sequence[DeltaPart], allocate: Allocate | None = None) -> PackedDelta:
        """Pack what an adapter adds to the layer; it may be put into slots any number of times.

        allocate: memory for its matrices; None: as torch does.
        """
        allocate = allocate or _zeros
        firsts, ranks = [], [0] * self._num_experts
        for part in parts:
            firsts.append(ranks[part.expert])
            ranks[part.expert] += _padded(part.a.shape[0])
        rank, number_bytes = max(ranks), self._dtype.itemsize
        require(rank <= self._max_rank, f"at most {self._max_rank} ranks of an adapter")
        in_features = parts[0].a.shape[1]
        row_bytes = -(-in_features * number_bytes // _ROW_BYTES) * _ROW_BYTES
        a = allocate(self._num_experts * rank * row_bytes).view(self._dtype)
        a = a.view(self._num_experts, rank, row_bytes // number_bytes)
        sizes = [-(-size // _BLOCK_OUTPUTS) * _BLOCK_OUTPUTS for size in self._outputs]
        # The last panel may have a block beyond the outputs.
        b = torch.zeros(self._num_experts, sum(sizes) + _BLOCK_OUTPUTS, rank, dtype=self._dtype)
        scales = torch.zeros(self._num_experts, rank + _BLOCK_OUTPUTS)  # of whole registers
        has_factors = any(part.factors is not None for part in parts)
        factors = torch.ones(b.shape[:2]) if has_factors else None
        for first, part in zip(firsts, parts, strict=True):
            expert, ranks_of_part = part.expert, slice(first, first + part.a.shape[0])
            a[expert, ranks_of_part, :in_features] = part.a
            scales[expert, ranks_of_part] = part.scale
            for start, rows in self._in_blocks(part.first_output, part.b, sizes):
                b[expert, start : start + len(rows), ranks_of_part] = rows
            if factors is not None and part.factors is not None:
                for start, some in self._in_blocks(part.first_output, part.factors, sizes):
                    factors[expert, start : start + len(some)] = some
        a = self._arranged(a, scales)
        packed, spans = self._pack_b(b, allocate)
        slots = (AdapterSlot * self._num_experts)()
        span_bytes = ctypes.sizeof(spans) // self._num_experts
        for expert in range(self._num_experts):
            if ranks[expert] == 0:
                continue
            slots[expert] = AdapterSlot(
                a=address(a[expert]),
                a_row_bytes=a.stride(1) * a.element_size(),
                rank=rank,
                scales=address(scales[expert]),
                spans=ctypes.addressof(spans) + expert * span_bytes,
                factors=address(None if factors is None else factors[expert]),
            )
        return PackedDelta(slots, a, scales, packed, spans, factors)

    def _arranged(self, a: Tensor, scales: Tensor) -> Tensor:
        """A as the kernel reads it. a: [num_experts, rank, padded inputs]; scales: [num_experts,
        padded rank]."""
        return a

    def fill(self, slot: int, packed: PackedDelta) -> None:
        """Put an adapter that changes the layer into a slot."""
        self._kept[slot] = packed
        size = ctypes.sizeof(packed.slots)
        ctypes.memmove(ctypes.addressof(self._slots) + slot * size, packed.slots, size)

    def _in_blocks(self, first: int, b: Tensor, sizes: Sequence[int]) -> list[tuple[int, Tensor]]:
        """The rows of B, or factors, for outputs from `first` on, where they are if each of the
        layer's parts begins with a block."""
        found, start, padded_start = [], 0, 0
        for size, padded in zip(self._outputs, sizes, strict=True):
            low, high = max(first, start), min(first + len(b), start + size)
            if low < high:
                found.append((padded_start + low - start, b[low - first : high - first]))
            start, padded_start = start + size, padded_start + padded
        return found

    def _pack_b(self, b: Tensor, allocate: Allocate) -> tuple[Tensor, ctypes.Array[AdapterSpan]]:
        """The blocks of B, without the columns before the first and after the last that is not
        zero for any expert, and the spans of all experts. b: [num_experts, padded outputs, rank].
        """
        # Columns that are multiplied in one step stay together.
        of_blocks = b.unflatten(1, (-1, _BLOCK_OUTPUTS))
        of_blocks = of_blocks.unflatten(3, (-1, _STEP_BYTES // b.element_size())).transpose(2, 3)
        is_used = of_blocks.ne(0).flatten(3).any(dim=3).any(dim=0)
        steps = torch.arange(is_used.shape[1])
        first = torch.where(is_used, steps, len(steps)).amin(dim=1, keepdim=True)
        last = torch.where(is_used, steps, -1).amax(dim=1, keepdim=True)
        chosen = of_blocks[:, (steps >= first) & (steps <= last)]
        packed = allocate(chosen.nbytes).view(chosen.dtype).view(chosen.shape).copy_(chosen)
        ranges, sizes = torch.cat([first, (last + 1 - first).clamp(min=0)], 1).unique_consecutive(
            return_counts=True, dim=0
        )
        spans = (AdapterSpan * (len(b) * len(sizes)))()
        described = list(zip(ranges.tolist(), sizes.tolist(), strict=True))
        for expert, of_expert in enumerate(packed):
            block, at = 0, of_expert.data_ptr()
            for i, ((first_step, num_steps), num_blocks) in enumerate(described):
                span = spans[expert * len(described) + i]
                block_bytes = num_steps * _BLOCK_OUTPUTS * _STEP_BYTES
                span.b = at - block * block_bytes
                block, at = block + num_blocks, at + num_blocks * block_bytes
                span.end, span.first_step, span.num_steps = block, first_step, num_steps
        return packed, spans

    def clear(self, slot: int) -> None:
        """Let the adapter of a slot change nothing."""
        if (packed := self._kept.pop(slot, None)) is not None:
            size = ctypes.sizeof(packed.slots)
            ctypes.memset(ctypes.addressof(self._slots) + slot * size, 0, size)

    def multiply(self, x: Tensor) -> Tensor:
        """Launch the products with A: [num_rows, *], which `fields` expects.

        x: [num_rows, in_features], or of heads [num_rows, num_heads, in_features], with a dense
        last axis.
        """
        num_rows, num_heads = x.shape[0], self._num_experts
        inner = new_tensor((num_rows, num_heads * self._max_rank), self._dtype)
        num_threads = threads.count_for(x.numel() * _RANK_UNIT)
        task = AdapterTask(
            num_threads=num_threads,
            **rows_of(x=x, inner=inner),
            in_features=x.shape[-1],
            slots=ctypes.addressof(self._slots),
            rows=self._rows.address,
            num_heads=num_heads,
            x_head_stride=x.stride(1),
        )
        launch(self._library.kernel(f"multiply_a_{DTYPES[self._dtype]}"), task, num_threads)
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

    def _arranged(self, a: Tensor, scales: Tensor) -> Tensor:
        """A row of numbers for each token, which are scaled."""
        scaled = a[:, :, : self._num_tokens] * scales[:, : a.shape[1], None]
        return scaled.mT.to(self._dtype).contiguous()

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
        kernel = self._library.kernel(f"add_embedding_deltas_{DTYPES[self._dtype]}")
        launch(kernel, task, num_threads)


class ExpertDeltas(NativeDeltas):
    """What the adapters in slots add to the products of all experts of a layer with one of their
    weights."""

    def multiply_slots(
        self, x: Tensor, plan_address: int, num_slots: int, *, gathers: bool
    ) -> Tensor:
        """Launch the products of the slots of experts with A, as `multiply`: [num_slots, *].

        x: [num_rows or num_slots, in_features]; plan_address: of the step's `ExpertPlan`; gathers:
        whether x has the rows of a step, and not those of slots.
        """
        in_features = x.shape[1]
        inner = new_tensor((num_slots, self._max_rank), self._dtype)
        num_threads = threads.count_for(num_slots * in_features * _RANK_UNIT)
        task = ExpertAdapterTask(
            num_threads=num_threads,
            **rows_of(x=x, inner=inner),
            in_features=in_features,
            slots=ctypes.addressof(self._slots),
            rows=self._rows.address,
            plan=plan_address,
            gathers=gathers,
            num_experts=self._num_experts,
        )
        kernel = self._library.kernel(f"multiply_a_of_experts_{DTYPES[self._dtype]}")
        launch(kernel, task, num_threads)
        return inner


def _zeros(num_bytes: int) -> Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8)


def _padded(rank: int) -> int:
    return -(-rank // _RANK_UNIT) * _RANK_UNIT
