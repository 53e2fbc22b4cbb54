"""The block formats of quantized tensors in GGUF files, converted without dequantizing them.

A quantized tensor is a list of blocks of 32 or 256 numbers, each with its codes and scales. A block
of 256 numbers (`*_K`, `IQ4_XS`) consists of several parts, whose scales are integers in units of
the block's own scale. The numbers read from a block are exactly those that
`gguf.quants.dequantize` multiplies and adds, so both give the same bits.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pagewire_kernels.quantized_weight import SIGNED_TABLE, UNSIGNED_TABLE, QuantizedWeight

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]

_TABLE = """
Q4_0    signed     0   scale:2 codes:16:16:4
Q4_1    unsigned   0   scale:2 offset:2 codes:16:16:4
Q5_0    bytes     16   scale:2 high:4:1:1:4 codes:16:16:4
Q5_1    bytes      0   scale:2 offset:2 high:4:1:1:4 codes:16:16:4
Q8_0    bytes      0   scale:2 codes:32
Q2_K    unsigned   0   parts:16 codes:64:32:2 scale:2 offset:2
Q3_K    signed    -4   high:32:32:1:2 codes:64:32:2 parts:8:8:4 high_parts:4:4:2:4 scale:2
Q4_K    unsigned   0   scale:2 offset:2 mixed_parts:12 codes:128:32:4
Q5_K    bytes      0   scale:2 offset:2 mixed_parts:12 high:32:32:1:4 codes:128:32:4
Q6_K    bytes     32   codes:128:64:4 high:64:32:2:4 parts:16 scale:2
IQ4_NL  nonlinear  0   scale:2 codes:16:16:4
MXFP4   halves     0   exponent:1 codes:16:16:4
IQ4_XS  nonlinear  0   scale:2 high_parts:2:1:2:4 parts:4:1:4 codes:128:16:4
"""
"""By type: the values of codes, what is subtracted from codes, and the fields of a block:
`name:bytes`, `:width:bits` where numbers are packed, `:shift` for upper bits (see `_unpack`)."""

_FORMATS = {name: fields for name, *fields in map(str.split, _TABLE.strip().splitlines())}
_VALUES = {
    "bytes": None,
    "signed": SIGNED_TABLE,
    "unsigned": UNSIGNED_TABLE,
    "halves": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "nonlinear": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
}
BLOCK_TYPES = tuple(_FORMATS)


def quantized_weight(data: Bytes, kind: str, shape: Sequence[int]) -> QuantizedWeight:
    """Convert the bytes of a quantized tensor without dequantizing it.

    kind: type of the tensor, one of `BLOCK_TYPES`; shape: [out_features, in_features].
    """
    values, zero, *layout = _FORMATS[kind]
    fields = _fields(data, layout)
    codes = fields["codes"]
    if "high" in fields:
        codes |= fields["high"]
    if zero != "0":
        codes -= np.uint8(int(zero) & 255)
    scale, offset = _half(fields, "scale"), _half(fields, "offset")
    if "exponent" in fields:  # of a power of two, e8m0; values are twice those of e2m1
        scale = np.ldexp(np.float32(1.0), fields["exponent"].astype(np.int32) - 128)
    multiples = _multiples(fields)

    def tensor(numbers: Numbers | None) -> torch.Tensor | None:
        if numbers is None:
            return None
        return torch.from_numpy(numbers.astype(np.float32).reshape(shape[0], -1))

    scales = tensor(scale if multiples is None else multiples[0])
    assert scales is not None, "every format has scales"
    return QuantizedWeight(
        codes=torch.from_numpy(np.ascontiguousarray(codes).reshape(shape[0], -1)),
        scales=scales,
        offsets=tensor(offset if multiples is None else multiples[1]),
        units=None if multiples is None else tensor(scale),
        offset_units=None if multiples is None or offset is None else tensor(-offset),
        table=_VALUES[values],
    )


def _half(fields: Mapping[str, Bytes], name: str) -> Numbers | None:
    return np.ascontiguousarray(fields[name]).view(np.float16) if name in fields else None


def _fields(data: Bytes, layout: Sequence[str]) -> dict[str, Bytes]:
    """The fields of n blocks by name, unpacked: [n, size of the field]."""
    fields = [field.split(":") for field in layout]
    ends = np.cumsum([int(num_bytes) for _, num_bytes, *_ in fields])
    blocks = data.reshape(-1, ends[-1])
    return {
        name: _unpack(part, *map(int, packing)) if packing else part
        for (name, _, *packing), part in zip(fields, np.split(blocks, ends[:-1], 1), strict=True)
    }


def _unpack(field: Bytes, width: int, bits: int, shift: int = 0) -> Bytes:
    """Unpack numbers of `bits` bits: uint8 [n, num_bytes] to uint8 [n, num_bytes * 8 / bits].

    Each run of `width` bytes holds one number per byte in its lowest bits, then the next `width`
    numbers in the bits above these, and so on. shift: to the left, of the results.
    """
    if bits == width == 1:
        parts = np.unpackbits(field, axis=1, bitorder="little")
    else:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
        parts = field.reshape(len(field), -1, 1, width) >> shifts
    parts &= np.uint8((1 << bits) - 1)
    if shift:
        parts <<= np.uint8(shift)
    return parts.reshape(len(field), -1)


def _multiples(fields: Mapping[str, Bytes]) -> tuple[Numbers, Numbers | None] | None:
    """The scales and offsets of the parts of n blocks, in units of the block's: [n, num_parts];
    None if a block is one part."""
    if "mixed_parts" in fields:
        from gguf.quants import Q4_K  # the package is loaded only for GGUF files

        scales, offsets = Q4_K.get_scale_min(np.ascontiguousarray(fields["mixed_parts"]))
        return scales, offsets
    parts = fields.get("parts")
    if parts is None:
        return None
    if "offset" in fields:
        return parts & 15, parts >> 4
    if "high_parts" in fields:
        parts = (parts | fields["high_parts"]) - np.uint8(32)
    return np.ascontiguousarray(parts).view(np.int8), None
