"""Reading GGUF files: metadata, and tensors one at a time, dequantized or as they are stored.

The header is parsed here and not by `gguf.GGUFReader`, which takes seconds for a large vocabulary
and trusts the lengths in the file.

A quantized tensor is a list of blocks of 32 or 256 numbers, each with its codes and scales. A block
of 256 numbers (`*_K`, `IQ4_XS`) consists of several parts, whose scales are integers in units of
the block's own scale. The numbers read from a block are exactly those that
`gguf.quants.dequantize` multiplies and adds, so both give the same bits.
"""

import logging
import math
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import (
    SIGNED_TABLE,
    UNSIGNED_TABLE,
    QuantizedWeight,
    assemble,
    slices_of_rows,
)
from worker_service.array_types import Float32Array
from worker_service.errors import BadCheckpoint

logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]
Numbers = tuple[Float32Array, npt.NDArray[Any] | None]
"""Scales or offsets of n blocks: one per block [n, 1], and for each part of a block an integer
multiple of it [n, parts]; None if blocks have one part."""

Parts = tuple[Bytes, Numbers, Numbers | None]
"""Codes or int8 numbers of n blocks [n, block_size], their scales, and their offsets."""


def _spread(field: Bytes, width: int, bits: int) -> Bytes:
    """Unpack numbers of `bits` bits: uint8 [n, num_bytes] to uint8 [n, num_bytes * 8 / bits].

    Each run of `width` bytes holds one number per byte in its lowest bits, then the next `width`
    numbers in the bits above these, and so on.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = field.reshape(len(field), -1, 1, width) >> shifts
    return (parts & np.uint8((1 << bits) - 1)).reshape(len(field), -1)


def _cut(blocks: Bytes, *sizes: int) -> list[Bytes]:
    """Split blocks into fields of these sizes in bytes, and the rest."""
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
"""By type: the function that reads its blocks, and what the codes mean
(`QuantizedWeight.table`)."""


def quantized_weight(data: Bytes, kind: str, shape: Sequence[int]) -> QuantizedWeight:
    """Convert the bytes of a quantized tensor without dequantizing it.

    kind: type of the tensor, a key of `_FORMATS`; shape: [out_features, in_features].
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


_DENSE_TYPES = ("F32", "F16", "BF16")
KNOWN_TYPES = (*_DENSE_TYPES, *_FORMATS)
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = dict(
    zip(
        (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12),
        (struct.Struct("<" + code) for code in "BbHhIif?Qqd"),
        strict=True,
    )
)
"""By the type number of a metadata value."""

_MAX_DIMS = 4
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location, type and shape of a tensor in its file."""

    name: str
    """Its name in the file."""

    file: Path
    shape: tuple[int, ...]
    """In PyTorch's order: the last dimension is contiguous."""

    type: str
    offset: int
    num_bytes: int

    def read(self) -> Tensor:
        """Read the tensor; a quantized one is dequantized to float32. Raises BadCheckpoint if the
        file has become shorter."""
        data = self._bytes()
        if self.type in ("F32", "F16"):
            values = torch.from_numpy(data.view(np.float32 if self.type == "F32" else np.float16))
        elif self.type == "BF16":
            values = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
        else:
            kind = gguf.GGMLQuantizationType[self.type]
            rows = data.reshape(*self.shape[:-1], -1)
            with np.errstate(invalid="ignore"):  # infinite scales are reported below
                values = torch.from_numpy(gguf.quants.dequantize(rows, kind))
            self._require_finite(values)
        return values.reshape(self.shape)

    @property
    def is_quantized(self) -> bool:
        """Whether this is a quantized matrix."""
        return len(self.shape) == 2 and self.type not in _DENSE_TYPES

    def read_quantized(self) -> QuantizedWeight | None:
        """Read a weight [out_features, in_features] without dequantizing it; None if it is dense.
        Raises BadCheckpoint if the file has become shorter."""
        if not self.is_quantized:
            return None
        num_rows, in_features = self.shape

        def read(rows: slice) -> QuantizedWeight:
            data = self._bytes(rows)
            part = quantized_weight(data, self.type, (rows.stop - rows.start, in_features))
            # The scales of parts of a block are whole numbers in these units.
            own, least = part.units, part.offset_units
            self._require_finite(part.scales if own is None else own)
            self._require_finite(part.offsets if least is None else least)
            return part

        return assemble(map(read, slices_of_rows(num_rows, in_features)), num_rows)

    def _require_finite(self, values: Tensor | None) -> None:
        if values is not None and not values.isfinite().all():
            raise BadCheckpoint(
                f"{self.file}: {self.name}: expected finite scales of {self.type} blocks, got"
                f" {values[~values.isfinite()][0]:g}"
            )

    def _bytes(self, rows: slice | None = None) -> npt.NDArray[np.uint8]:
        """The bytes of some rows of a matrix; None: of the whole tensor."""
        start, count = self.offset, self.num_bytes
        if rows is not None:
            row_bytes = self.num_bytes // self.shape[0]
            start, count = start + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes
        with self.file.open("rb") as stream:
            stream.seek(start)
            data = np.fromfile(stream, np.uint8, count)
        if len(data) < count:
            raise BadCheckpoint(f"{self.file} became shorter while it was read")
        return data


@dataclass(frozen=True, slots=True)
class Gguf:
    """The headers of all GGUF files of a model."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    header_bytes: tuple[int, ...]
    """Size of each file's header, which precedes its tensors."""


def is_gguf(path: Path) -> bool:
    """Whether a path has the suffix of GGUF files."""
    return path.suffix.lower() == ".gguf"


def open_gguf(path: Path) -> Gguf:
    """Read the header of a file, and those of the other parts if the model is split.

    Raises BadCheckpoint, naming the file, if one is missing or damaged, or has a tensor of an
    unknown type.
    """
    files = split_files(path)
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise BadCheckpoint(f"{path} is one of {len(files)} parts; missing: {', '.join(missing)}")
    stats = tuple((stat.st_size, stat.st_mtime_ns) for stat in map(Path.stat, files))
    return _open_all(files, stats)


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of the model of which `path` is one part; `path` alone if it is not split."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    return tuple(
        path.with_name(f"{stem}-{part:05d}-of-{count}.gguf") for part in range(1, int(count) + 1)
    )


@lru_cache(maxsize=2)
def _open_all(files: tuple[Path, ...], _stats: tuple[tuple[int, int], ...]) -> Gguf:
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    sizes = []
    for file in files:
        with file.open("rb") as stream:
            found, parts, size = _Reader(file, stream).read()
        sizes.append(size)
        count = found.get("split.count", 1)
        if count not in (0, len(files)):
            raise BadCheckpoint(
                f"{file} is one of {count} parts (split.count): expected names that end in"
                f" -00001-of-{count:05d}.gguf and so on, as `gguf-split` writes them"
            )
        metadata = {**_without_wrong_ids(file, found), **metadata}
        for name, tensor in parts.items():
            if name in tensors:
                raise BadCheckpoint(f"{file}: {name} is also in {tensors[name].file.name}")
            tensors[name] = tensor
    return Gguf(files, metadata, tensors, tuple(sizes))


def _without_wrong_ids(file: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Drop ids of special tokens that the vocabulary does not have, as converters write for none,
    with a warning."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    num_tokens = len(tokens) if isinstance(tokens, list) else math.inf
    wrong = {
        key: value
        for key, value in metadata.items()
        if key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if isinstance(value, int) and not 0 <= value < num_tokens
    }
    for key, value in wrong.items():
        logger.warning("%s: %s: no token has the id %d; ignored", file, key, value)
    return {key: value for key, value in metadata.items() if key not in wrong}


class _Reader:
    """Reads the header of one file. Each length is checked against the file's before it is used."""

    def __init__(self, file: Path, stream: BinaryIO) -> None:
        self._file = file
        self._stream = stream
        self._size = file.stat().st_size

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor], int]:
        """Return (metadata, tensors by name, bytes before the tensors)."""
        if self._bytes(4, "magic") != _MAGIC:
            raise self._fault("expected a GGUF file, which begins with the bytes GGUF")
        version = self._scalar(4, "version")
        if version not in _VERSIONS:
            raise self._fault(f"expected GGUF version 2 or 3, little-endian, got {version}")
        num_tensors = self._count(24, "tensor count")
        num_keys = self._count(13, "metadata count")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a metadata key")
            metadata[key] = self._value(self._scalar(4, key), key)
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment: expected a power of two, got {alignment!r}")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        start = -(-self._stream.tell() // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        end = 0
        for tensor in infos:
            name, first = tensor.name, start + tensor.offset
            if name in tensors:
                raise self._fault(f"{name} occurs twice")
            if first + tensor.num_bytes > self._size:
                raise self._fault(
                    f"truncated or damaged: {name} needs {tensor.num_bytes} bytes at"
                    f" {first}, but the file has {self._size}"
                )
            if tensor.offset != end:
                before = next(reversed(tensors), "the header")
                raise self._fault(
                    f"damaged: {name}: expected the offset {end}, where {before} ends, got"
                    f" {tensor.offset}; the type, the shape or the offset of one of them is wrong"
                )
            end += -(-tensor.num_bytes // alignment) * alignment
            tensors[name] = replace(tensor, offset=first)
        if tensors and start + end + alignment <= self._size:
            raise self._fault(
                f"damaged: {self._size - start - end} bytes follow {name}, the last tensor, whose"
                " type or shape may be wrong"
            )
        return metadata, tensors, start

    def _tensor_info(self) -> GgufTensor:
        name = self._string("a tensor's name")
        num_dims = self._scalar(4, name)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._fault(f"{name}: expected 1 to {_MAX_DIMS} dimensions, got {num_dims}")
        shape = tuple(self._scalar(10, name) for _ in range(num_dims))[::-1]
        number, offset = self._scalar(4, name), self._scalar(10, name)
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            kind = None
        if kind is None or kind.name not in KNOWN_TYPES:
            raise self._fault(
                f"{name}: unknown tensor type {number if kind is None else kind.name}; expected one"
                f" of {', '.join(KNOWN_TYPES)}"
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not math.prod(shape) or shape[-1] % block:
            raise self._fault(
                f"{name}: expected rows of a multiple of {block} for {kind.name}, got {list(shape)}"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        return GgufTensor(name, self._file, shape, kind.name, offset, num_bytes)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            return self._scalar(kind, key)
        item = self._scalar(4, key)
        if item == _STRING:
            return [self._string(key) for _ in range(self._count(8, key))]
        if item not in _SCALARS:
            raise self._fault(f"{key}: unknown type of array elements {item}")
        scalar = _SCALARS[item]
        data = self._bytes(self._count(scalar.size, key) * scalar.size, key)
        return [value for (value,) in scalar.iter_unpack(data)]

    def _count(self, item_bytes: int, what: str) -> int:
        """Read a number of items that take at least `item_bytes` each."""
        count = int(self._scalar(10, what))
        if count * item_bytes > self._size - self._stream.tell():
            raise self._fault(
                f"truncated or damaged: {what} says {count}, more than the file holds"
            )
        return count

    def _string(self, what: str) -> str:
        return self._bytes(self._count(1, what), what).decode("utf-8", "replace")

    def _scalar(self, kind: int, what: str) -> Any:
        if kind not in _SCALARS:
            raise self._fault(f"{what}: unknown type of value {kind}")
        scalar = _SCALARS[kind]
        return scalar.unpack(self._bytes(scalar.size, what))[0]

    def _bytes(self, count: int, what: str) -> bytes:
        data = self._stream.read(count)
        if len(data) < count:
            raise self._fault(f"truncated: it ends within {what}")
        return data

    def _fault(self, message: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self._file}: {message}")


def headers(gguf: Gguf) -> Iterator[bytes]:
    """The bytes that precede the tensors of each file."""
    for file, size in zip(gguf.files, gguf.header_bytes, strict=True):
        with file.open("rb") as stream:
            yield stream.read(size)
