"""Random batches over a paged cache, for tests of attention backends."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import stored_head_size

Rows = tuple[int, int, int]
"""A sequence, the first position and the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes of a test's heads and blocks."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """None: `dtype`."""


def unwritten(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A cache of NaN; one of int8 has them as scales."""
    if dtype == torch.int8:
        return torch.full(shape, -1, dtype=dtype)
    return torch.full(shape, float("nan")).to(dtype)


class PagedSequences:
    """Some sequences whose queries, keys and values are known at every position.

    Their blocks lie scattered in one layer of a block-major cache of NaN, so that reading anything
    that was not written shows. The last block, the null block, is zero.
    """

    def __init__(self, shape: Shape, lengths: list[int], seed: int = 0) -> None:
        self.shape = shape
        self.lengths = lengths
        self.everything = [(i, 0, length) for i, length in enumerate(lengths)]
        generator = torch.Generator().manual_seed(seed)
        s = shape
        per_sequence = [-(-length // s.block_size) for length in lengths]
        num_blocks = sum(per_sequence) + 2
        order = torch.randperm(num_blocks, generator=generator).int()
        self.tables = torch.full((len(lengths), max(per_sequence)), -1, dtype=torch.int32)
        for row, blocks in zip(self.tables, order.split([*per_sequence, 2]), strict=False):
            row[: len(blocks)] = blocks
        dtype = s.cache_dtype or s.dtype
        head_size = stored_head_size(s.head_dim, dtype)
        self.cache = unwritten(
            (num_blocks + 1, 3, 2, s.block_size, s.num_kv_heads, head_size), dtype
        )
        self.cache[-1] = 0
        self.key_cache, self.value_cache = self.cache[:, 1, 0], self.cache[:, 1, 1]

        def rows(num_heads: int) -> list[Tensor]:
            return [
                torch.randn(length, num_heads, s.head_dim, generator=generator).to(s.dtype)
                for length in lengths
            ]

        self.queries, self.keys, self.values = (
            rows(n) for n in (s.num_heads, s.num_kv_heads, s.num_kv_heads)
        )

    def write(self, backend: Any = reference, parts: list[Rows] | None = None) -> None:
        """Store the keys and values of `parts`, all of them by default."""
        parts = parts or self.everything
        rows = self.rows(self.keys, parts), self.rows(self.values, parts)
        slots = self.metadata(parts).slot_mapping
        backend.write_kv(*rows, self.key_cache, self.value_cache, slots)

    def attend(self, parts: list[Rows], backend: Any = reference, **options: Any) -> Tensor:
        """The output of `parts`."""
        queries, caches = self.rows(self.queries, parts), (self.key_cache, self.value_cache)
        output: Tensor = backend.paged_attention(queries, *caches, self.metadata(parts), **options)
        return output

    def metadata(
        self, parts: list[Rows], *, num_decodes: int = 0, chunk: int = 0
    ) -> AttentionMetadata:
        """The batch of these parts."""
        tables = self.tables[[sequence for sequence, _, _ in parts]].contiguous()
        ranges = [(start, end) for _, start, end in parts]
        attention = AttentionMetadata.of_ranges(ranges, tables, self.shape.block_size, chunk)
        return replace(attention, num_decodes=num_decodes)

    def release(self, parts: list[Rows], window: int | None = None, chunk: int = 1) -> None:
        """Release the blocks that no row of the batch sees through a window, or in its chunk: fill
        them with NaN, and set their entries in the tables to -1."""
        for sequence, start, _ in parts:
            first = start // chunk * chunk if window is None else max(0, start - window + 1)
            released = self.tables[sequence][: first // self.shape.block_size]
            blocks = self.cache[released.long()]
            self.cache[released.long()] = unwritten(tuple(blocks.shape), blocks.dtype)
            released.fill_(-1)

    def rows(self, of: list[Tensor], parts: list[Rows]) -> Tensor:
        """Flattened rows of a batch's queries, keys or values."""
        return torch.cat([of[sequence][start:end] for sequence, start, end in parts])
