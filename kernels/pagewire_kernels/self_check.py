"""Small cases that GPU kernels compute on their device, compared with the reference.

A kernel that works elsewhere may be wrong with another compiler, driver or package. Wrong attention
and wrong matrix products do not crash, but produce wrong tokens, so kernels must pass these checks
before they are used.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import FP8, AttentionBackend, AttentionNeeds
from pagewire_kernels.quantized_weight import QuantizedWeight, quantize
from pagewire_kernels.reference.backend import ReferenceBackend

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_PRODUCT_TOLERANCE = 1e-4
"""Error of sums in float32, relative to their norm."""

_NUM_KV_HEADS, _GROUP = 2, 2
_LONG_CONTEXT = 512
"""Context length from which a backend may divide the context of a decode into splits."""
_FP8_SCALE = 0.02
_WINDOW = 7
_SOFT_CAP = 2.0


def self_check(backend: AttentionBackend, device: torch.device, needs: AttentionNeeds) -> None:
    """Raise ValueError if the backend's results are wrong; its own exceptions propagate.

    Computes a mixed batch (a prefill chunk, a whole prefill, a decode) and a batch of decodes, with
    the sliding window, soft cap, sinks and ALiBi slopes that the model needs, and whole texts.
    """
    case = _Case(needs, needs.block_size or backend.abilities.default_block_size)
    host = torch.device("cpu")
    expected_cache = case.written(ReferenceBackend(), host)
    cache = case.written(backend, device)
    tolerance = _TOLERANCE[torch.bfloat16 if needs.cache_dtype == FP8 else needs.dtype]
    for query_lens in ([case.block_size + 5, 3, 1], [1, 1, 1]):
        expected = case.attended(ReferenceBackend(), host, expected_cache, query_lens)
        _compare(case.attended(backend, device, cache, query_lens), expected, tolerance)
    if needs.packed:
        _compare(
            case.attended_texts(backend, device),
            case.attended_texts(ReferenceBackend(), host),
            tolerance,
        )


def _compare(output: Tensor, expected: Tensor, tolerance: float) -> None:
    error = float((output.cpu().float() - expected.float()).abs().max())
    if not error <= tolerance:  # false for a NaN, too
        raise ValueError(f"its results differ from the reference by {error:.3g}")


def check_products(
    pack: Callable[[QuantizedWeight], Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Raise ValueError if products with quantized weights are wrong; other exceptions propagate.

    pack: converts a weight to its packed form on the device, whose `apply` takes rows of `dtype`.
    Computes one row and many rows, which use different kernels.
    """
    draw = torch.Generator().manual_seed(0)
    dense, rows = (torch.randn(count, 1024, generator=draw) for count in (128, 130))
    rows = rows.to(dtype)
    floats = dense.to(FP8).view(torch.uint8)
    weights = [quantize(dense, quantization) for quantization in ("int4", "int8")]
    weights.append(QuantizedWeight(codes=floats, scales=torch.ones(128, 1), is_float=True))
    squares = tuple(n * abs(n) / 64 for n in range(-8, 8))
    weights.append(replace(weights[0], table=squares, is_float=True))
    for weight in weights:
        packed, expected = pack(weight), rows.float() @ weight.dequantize().T
        for num_rows in (1, len(rows)):
            output = packed.apply(rows[:num_rows].to(device), output_dtype=torch.float32).cpu()
            error = float((output - expected[:num_rows]).norm() / expected[:num_rows].norm())
            if not error <= _PRODUCT_TOLERANCE:  # false for a NaN, too
                raise ValueError(f"its results differ from the reference by {error:.3g}")


class _Case:
    """Three sequences, one of them long, in randomly ordered blocks, with the features that the
    model needs."""

    def __init__(self, needs: AttentionNeeds, block_size: int) -> None:
        self._needs = needs
        self.block_size = block_size
        self._lengths = [max(2 * block_size, _LONG_CONTEXT) + 5, 3, block_size]
        draw = torch.Generator().manual_seed(0)
        counts = [-(-length // block_size) for length in self._lengths]
        self._num_blocks = sum(counts) + 1
        order = torch.randperm(self._num_blocks, generator=draw).int()
        self._tables = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for table, blocks in zip(self._tables, order[:-1].split(counts), strict=True):
            table[: len(blocks)] = blocks
        self._query, self._key, self._value = (
            torch.randn(sum(self._lengths), num, needs.head_dim, generator=draw).to(needs.dtype)
            for num in (_NUM_KV_HEADS * _GROUP, _NUM_KV_HEADS, _NUM_KV_HEADS)
        )
        self._scale = _FP8_SCALE if needs.cache_dtype == FP8 else 1.0

    def written(self, backend: AttentionBackend, device: torch.device) -> Tensor:
        """Write all keys and values to a new cache, and return it."""
        size, needs = self.block_size, self._needs
        shape = (self._num_blocks, 2, size, _NUM_KV_HEADS, needs.head_dim)
        cache = torch.zeros(shape, device=device).to(needs.cache_dtype or needs.dtype)
        slots = [
            table[torch.arange(length) // size].long() * size + torch.arange(length) % size
            for table, length in zip(self._tables, self._lengths, strict=True)
        ]
        backend.write_kv(
            self._key.to(device),
            self._value.to(device),
            cache[:, 0],
            cache[:, 1],
            torch.cat(slots).to(device),
            key_scale=self._scale,
            value_scale=self._scale,
        )
        return cache

    def attended(
        self, backend: AttentionBackend, device: torch.device, cache: Tensor, query_lens: list[int]
    ) -> Tensor:
        """Compute attention of the last `query_lens[i]` rows of each sequence."""
        parts = self._query.split(self._lengths)
        rows = [part[-count:] for part, count in zip(parts, query_lens, strict=True)]
        ranges = [(end - count, end) for end, count in zip(self._lengths, query_lens, strict=True)]
        needs, heads = self._needs, torch.arange(1.0, _NUM_KV_HEADS * _GROUP + 1, device=device)
        return backend.paged_attention(
            torch.cat(rows).to(device),
            cache[:, 0],
            cache[:, 1],
            AttentionMetadata.of_ranges(ranges, self._tables.to(device), self.block_size),
            scale=needs.head_dim**-0.5,
            sliding_window=_WINDOW if needs.sliding_window else None,
            soft_cap=_SOFT_CAP if needs.soft_cap else None,
            sinks=heads / 4 if needs.sinks else None,
            alibi_slopes=2.0**-heads if needs.alibi else None,
            key_scale=self._scale,
            value_scale=self._scale,
        )

    def attended_texts(self, backend: AttentionBackend, device: torch.device) -> Tensor:
        """Compute attention over all sequences as whole texts."""
        return backend.packed_attention(
            self._query.to(device),
            self._key.to(device),
            self._value.to(device),
            AttentionMetadata.of_texts(self._lengths, device),
            scale=self._needs.head_dim**-0.5,
            window=_WINDOW if self._needs.sliding_window else None,
        )
