"""The block formats of GGUF, as codes with scales and offsets.

A block of 32 or 256 numbers holds its scales beside its codes; of 256, the scales of the parts are
whole numbers in units of the block's own. What comes out here are the numbers that
`gguf.quants.dequantize` multiplies and adds, so both give the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch

from pagewire_kernels.quantized_weight import SIGNED_TABLE, UNSIGNED_TABLE, QuantizedWeight
from worker_service.array_types import Float32Array

Bytes = npt.NDArray[np.uint8]
Numbers = tuple[Float32Array, npt.NDArray[Any] | None]
"""Of n blocks: a scale or an offset each [n, 1], and how many of these each part of a block has
[n, parts]; None: the block has one part."""

Parts = tuple[Bytes, Numbers, Numbers | None]
"""Of n blocks: codes or int8 numbers [n, block], scales, and offsets."""


def _spread(field: Bytes, width: int, bits: int) -> Bytes:
    """Numbers of some bits, of which each stretch of `width` bytes has first all the lowest."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = field.reshape(len(field), -1, 1, width) >> shifts
    return (parts & np.uint8((1 << bits) - 1)).reshape(len(field), -1)


def _cut(blocks: Bytes, *sizes: int) -> list[Bytes]:
    """Fields of these sizes, and the rest."""
    return np.split(blocks, np.cumsum(sizes), axis=1)


def _half(field: Bytes) -> Float32Array:
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def _signed(values: Bytes, zero: int) -> Bytes:
    return (values.view(np.int8) - np.int8(zero)).view(np.uint8)


def _scale_and_codes(blocks: Bytes) -> Parts:  # Q4_0, IQ4_NL
    scale, codes = _cut(blocks, 2)
    return _spread(codes, 16, 4), (_half(scale), None), None


def _q4_1(blocks: Bytes) -> Parts:
    scale, least, codes = _cut(blocks, 2, 2)
    return _spread(codes, 16, 4), (_half(scale), None), (_half(least), None)


def _fifth_bits(field: Bytes) -> Bytes:
    return np.unpackbits(field, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: Bytes) -> Parts:
    scale, high, low = _cut(blocks, 2, 4)
    return _signed(_spread(low, 16, 4) | _fifth_bits(high), 16), (_half(scale), None), None


def _q5_1(blocks: Bytes) -> Parts:
    scale, least, high, low = _cut(blocks, 2, 2, 4)
    codes = _spread(low, 16, 4) | _fifth_bits(high)
    return codes, (_half(scale), None), (_half(least), None)


def _q8_0(blocks: Bytes) -> Parts:
    scale, values = _cut(blocks, 2)
    return values, (_half(scale), None), None


def _q2_k(blocks: Bytes) -> Parts:
    parts, codes, scale, least = _cut(blocks, 16, 64, 2)
    return _spread(codes, 32, 2), (_half(scale), parts & 15), (-_half(least), parts >> 4)


def _q3_k(blocks: Bytes) -> Parts:
    high, low, parts, scale = _cut(blocks, 32, 64, 12)
    sixths = _spread(parts[:, :8], 8, 4) | _spread(parts[:, 8:], 4, 2) << np.uint8(4)
    codes = _spread(low, 32, 2) + 4 * _spread(high, 32, 1) + 4  # of SIGNED_TABLE
    return codes, (_half(scale), _signed(sixths, 32).view(np.int8)), None


def _q4_k(blocks: Bytes) -> Parts:
    scale, least, parts, codes = _cut(blocks, 2, 2, 12)
    scales, mins = gguf.quants.Q4_K.get_scale_min(np.ascontiguousarray(parts))
    return _spread(codes, 32, 4), (_half(scale), scales), (-_half(least), mins)


def _q5_k(blocks: Bytes) -> Parts:
    head, high, low = _cut(blocks, 16, 32)
    _, scales, offsets = _q4_k(np.concatenate([head, low], axis=1))
    return _spread(low, 32, 4) | _spread(high, 32, 1) << np.uint8(4), scales, offsets


def _q6_k(blocks: Bytes) -> Parts:
    low, high, parts, scale = _cut(blocks, 128, 64, 16)
    codes = _spread(low, 64, 4) | _spread(high, 32, 2) << np.uint8(4)
    return _signed(codes, 32), (_half(scale), np.ascontiguousarray(parts).view(np.int8)), None


def _iq4_xs(blocks: Bytes) -> Parts:
    scale, high, low, codes = _cut(blocks, 2, 2, 4)
    pairs = np.ascontiguousarray(high).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    sixths = _spread(low, 1, 4) | (pairs.astype(np.uint8) & np.uint8(3)) << np.uint8(4)
    return _spread(codes, 16, 4), (_half(scale), _signed(sixths, 32).view(np.int8)), None


_FORMATS: dict[str, tuple[Callable[[Bytes], Parts], tuple[int, ...] | None]] = {
    "Q4_0": (_scale_and_codes, SIGNED_TABLE),
    "Q4_1": (_q4_1, UNSIGNED_TABLE),
    "Q5_0": (_q5_0, None),
    "Q5_1": (_q5_1, None),
    "Q8_0": (_q8_0, None),
    "Q2_K": (_q2_k, UNSIGNED_TABLE),
    "Q3_K": (_q3_k, SIGNED_TABLE),
    "Q4_K": (_q4_k, UNSIGNED_TABLE),
    "Q5_K": (_q5_k, None),
    "Q6_K": (_q6_k, None),
    "IQ4_NL": (_scale_and_codes, tuple(gguf.quants.IQ4_NL.kvalues)),
    "IQ4_XS": (_iq4_xs, tuple(gguf.quants.IQ4_NL.kvalues)),
}
"""By type: how to read its blocks, and what the codes mean; see `QuantizedWeight.table`."""


def quantized_weight(data: Bytes, kind: str, shape: Sequence[int]) -> QuantizedWeight:
    """The weight in a tensor's bytes.

    kind: the tensor's type, one that is not dense; shape: [out_features, in_features].
    """
    read, table = _FORMATS[kind]
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    codes, scales, offsets = read(data.reshape(-1, block_bytes))

    def tensor(numbers: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers).reshape(shape[0], -1))

    def numbers(found: Numbers | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(scales or offsets, their units)"""
        if found is None or found[1] is None:
            return found and tensor(found[0]), None
        return tensor(found[1].astype(np.float32)), tensor(found[0])

    (of_scales, units), (of_offsets, offset_units) = numbers(scales), numbers(offsets)
    assert of_scales is not None
    return QuantizedWeight(
        codes=tensor(codes),
        scales=of_scales,
        offsets=of_offsets,
        units=units,
        offset_units=offset_units,
        table=table,
    )
