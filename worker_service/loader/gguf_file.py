"""Reading GGUF files: metadata, and tensors one at a time, dequantized or as they are stored.

The header is parsed here and not by `gguf.GGUFReader`, which takes seconds for a large vocabulary
and trusts the lengths in the file.
"""

import logging
import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import (
    QuantizedWeight,
    assemble,
    slices_of_rows,
)
from worker_service.errors import BadCheckpoint
from worker_service.loader.gguf_blocks import BLOCK_TYPES, quantized_weight
from worker_service.loader.tensors import (
    FLOATS,
    CheckpointTensor,
    Index,
    OpenFiles,
)

logger = logging.getLogger(__name__)

KNOWN_TYPES = (*FLOATS, *BLOCK_TYPES)
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
_SCALARS = dict(zip(_NUMBERS, (struct.Struct(f"<{code}") for code in "BbHhIif?Qqd"), strict=True))
"""By the type number of a metadata value."""

_MAX_DIMS = 4
Order = Callable[[int], Tensor]
"""From a number of rows or columns to the place in the file of each one of `transformers`."""

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(kw_only=True)
class GgufTensor(CheckpointTensor):
    """Location, type and shape of a tensor in its file."""

    stored_name: str
    """Its name in the file."""

    offset: int
    num_bytes: int

    rows: Order | None = None
    """The order of rows in the file; None: that of `transformers`."""

    columns: Order | None = None
    """The order of columns in the file, likewise."""

    has_one_added: bool = False
    """Whether the numbers in the file are those of `transformers` plus 1."""

    is_exponential: bool = False
    """Whether the numbers in the file are -exp of those of `transformers`."""

    def __getitem__(self, index: Index) -> Tensor:
        values = self.stored_values()
        if self.has_one_added:
            values = values.float() - 1.0
        if self.is_exponential:
            values = torch.log(-values.float())
        if self.rows is not None:
            values = values[self.rows(len(values))]
        if self.columns is not None:
            values = values[..., self.columns(values.shape[-1])]
        return values[index]

    def quantized(self) -> QuantizedWeight | None:
        """Read a weight without dequantizing it; None if it is dense."""
        if not self.is_quantized:
            return None
        weight = self._quantized_weight()
        if self.rows is not None:
            weight = weight.rows(self.rows(self.shape[0]))
        return weight if self.columns is None else weight.reordered(self.columns(self.shape[1]))

    def stored_values(self) -> Tensor:
        """Read the numbers in the file; those of a quantized tensor are dequantized to float32.
        Raises BadCheckpoint if the file has become shorter."""
        if self.type in FLOATS:
            numbers = torch.from_numpy(self._bytes(0, self.num_bytes)).view(_FLOATS[self.type])
        else:
            numbers = self._quantized_weight().dequantize()
        return numbers.reshape(self.shape)

    @property
    def is_quantized(self) -> bool:
        """Whether this is a quantized matrix."""
        return len(self.shape) == 2 and self.type not in FLOATS

    def _quantized_weight(self) -> QuantizedWeight:
        in_features = self.shape[-1]
        num_rows = math.prod(self.shape) // in_features

        def read(rows: slice) -> QuantizedWeight:
            first, last = (row * self.num_bytes // num_rows for row in (rows.start, rows.stop))
            data = self._bytes(first, last - first)
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
                f"{self.file}: {self.stored_name}: expected finite scales of {self.type} blocks,"
                f" got {values[~values.isfinite()][0]:g}"
            )

    def _bytes(self, first: int, count: int) -> npt.NDArray[np.uint8]:
        """Read `count` bytes of the tensor."""
        with self.file.open("rb") as stream:
            stream.seek(self.offset + first)
            data = np.fromfile(stream, np.uint8, count)
        if len(data) < count:
            raise BadCheckpoint(f"{self.file} became shorter while it was read")
        self.files.count(count)
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
        shape = [self._scalar(10, name) for _ in range(num_dims)][::-1]
        number, offset = self._scalar(4, name), self._scalar(10, name)
        import gguf  # only for GGUF files

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
                f"{name}: expected rows of a multiple of {block} for {kind.name}, got {shape}"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        return GgufTensor(
            name=name,
            stored_name=name,
            file=self._file,
            files=OpenFiles(),
            shape=shape,
            type=kind.name,
            offset=offset,
            num_bytes=num_bytes,
        )

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            return self._scalar(kind, key)
        item = self._scalar(4, key)
        if item == _STRING:
            return self._strings(key)
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

    def _strings(self, what: str) -> list[str]:
        """Read an array of strings, such as the tokens of a vocabulary, of which there may be
        hundreds of thousands: with few calls for each."""
        found, read, unpack = [], self._stream.read, _SCALARS[10].unpack
        for _ in range(self._count(8, what)):
            if len(prefix := read(8)) < 8:
                raise self._fault(f"truncated: it ends within {what}")
            (length,) = unpack(prefix)
            if length > self._size:
                raise self._fault(
                    f"truncated or damaged: {what} says {length}, more than the file holds"
                )
            if len(data := read(length)) < length:
                raise self._fault(f"truncated: it ends within {what}")
            found.append(data.decode("utf-8", "replace"))
        return found

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
