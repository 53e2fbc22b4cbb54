"""The headers of GGUF files: metadata, and where tensors are.

They are parsed here and not by `gguf.GGUFReader`, which takes seconds for a large vocabulary and
trusts the lengths in the file.
"""

import logging
import math
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from worker_service.errors import BadCheckpoint

logger = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_NUMBERS = (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12)
_SCALARS = dict(zip(_NUMBERS, (struct.Struct(f"<{code}") for code in "BbHhIif?Qqd"), strict=True))
"""By the type number of a metadata value."""

_MAX_DIMS = 4

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(?!00000)(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor is in its file, and what it is."""

    name: str
    shape: list[int]
    """In PyTorch's order."""
    type: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of one file."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    num_bytes: int
    """Its size; the tensors follow."""


def is_gguf(path: Path) -> bool:
    """Whether a path has the suffix of GGUF files."""
    return path.suffix.lower() == ".gguf"


def split_files(path: Path) -> tuple[Path, ...]:
    """All files of the model of which `path` is one part; `path` alone if it is not split."""
    match = _SPLIT.fullmatch(path.name)
    if match is None:
        return (path,)
    stem, _, count = match.groups()
    return tuple(
        path.with_name(f"{stem}-{part:05d}-of-{count}.gguf") for part in range(1, int(count) + 1)
    )


def read_header(file: Path, known_types: Collection[str]) -> Header:
    """Read the header of one file. known_types: of tensors. Raises BadCheckpoint."""
    with file.open("rb") as stream:
        return _Reader(file, stream).read(known_types)


def read_metadata(path: Path) -> dict[str, Any]:
    """The metadata of a model, without what describes its tensors. Raises BadCheckpoint."""
    found = []
    for file in split_files(path):
        with file.open("rb") as stream:
            found.append((file, _Reader(file, stream).read_metadata()[1]))
    return merge_metadata(found)


def merge_metadata(of_files: Iterable[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """The metadata of all files of a model, in their order: that of the first ones has precedence.
    Ids of special tokens that the vocabulary does not have are dropped, with a warning."""
    metadata: dict[str, Any] = {}
    for file, found in of_files:
        metadata = {**_without_wrong_ids(file, found), **metadata}
    return metadata


def _without_wrong_ids(file: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
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

    def read(self, known_types: Collection[str]) -> Header:
        """Read all of it. known_types: of tensors."""
        num_tensors, metadata = self.read_metadata()
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._fault(f"general.alignment: expected a power of two, got {alignment!r}")
        infos = [self._tensor_info(known_types) for _ in range(num_tensors)]
        start = -(-self._stream.tell() // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
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
        return Header(metadata, tensors, start)

    def read_metadata(self) -> tuple[int, dict[str, Any]]:
        """Return (the number of tensors, the metadata); what describes the tensors follows."""
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
        return num_tensors, metadata

    def _tensor_info(self, known_types: Collection[str]) -> TensorInfo:
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
        if kind is None or kind.name not in known_types:
            raise self._fault(
                f"{name}: unknown tensor type {number if kind is None else kind.name}; expected one"
                f" of {', '.join(known_types)}"
            )
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if not math.prod(shape) or shape[-1] % block:
            raise self._fault(
                f"{name}: expected rows of a multiple of {block} for {kind.name}, got {shape}"
            )
        num_bytes = math.prod(shape) // block * block_bytes
        return TensorInfo(name, shape, kind.name, offset, num_bytes)

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
