"""Reading GGUF files: metadata, and tensors one at a time, dequantized or as they are stored."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import QuantizedWeight, assemble, slices_of_rows
from worker_service.errors import BadCheckpoint
from worker_service.gguf.header import merge_metadata, read_header, split_files
from worker_service.loader.gguf.blocks import BLOCK_TYPES, quantized_weight
from worker_service.loader.tensors import FLOATS, CheckpointTensor, Index, OpenFiles

KNOWN_TYPES = (*FLOATS, *BLOCK_TYPES)
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
Order = Callable[[int], Tensor]
"""From a number of rows or columns to the place in the file of each one of `transformers`."""


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


@dataclass(kw_only=True)
class GgufNumber(GgufTensor):
    """A number of the metadata in place of a tensor."""

    value: float

    def stored_values(self) -> Tensor:
        """The number."""
        return torch.full(tuple(self.shape), self.value)


@dataclass(kw_only=True)
class GgufDifference(GgufTensor):
    """A row that is the first one of a tensor, less the second."""

    both: GgufTensor

    def stored_values(self) -> Tensor:
        """The difference, in float32: [1, columns]."""
        first, second = self.both.stored_values().float()
        return (first - second)[None]

    @property
    def is_quantized(self) -> bool:
        """It is dequantized while it is read."""
        return False


@dataclass(frozen=True, slots=True, eq=False)
class Gguf:
    """The headers of all GGUF files of a model. Equal to itself only."""

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    header_bytes: tuple[int, ...]
    """Size of each file's header, which precedes its tensors."""


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


@lru_cache(maxsize=2)
def _open_all(files: tuple[Path, ...], _stats: tuple[tuple[int, int], ...]) -> Gguf:
    tensors: dict[str, GgufTensor] = {}
    headers = {file: read_header(file, KNOWN_TYPES) for file in files}
    for file, header in headers.items():
        count = header.metadata.get("split.count", 1)
        if not isinstance(count, int):
            raise BadCheckpoint(f"{file}: split.count: expected a number of files, got {count!r}")
        if count not in (0, len(files)):
            raise BadCheckpoint(
                f"{file} is one of {count} parts (split.count): expected names that end in"
                f" -00001-of-{count:05d}.gguf and so on, as `gguf-split` writes them"
            )
        for name, info in header.tensors.items():
            if name in tensors:
                raise BadCheckpoint(f"{file}: {name} is also in {tensors[name].file.name}")
            tensors[name] = GgufTensor(
                name=name,
                stored_name=name,
                file=file,
                files=OpenFiles(),
                shape=info.shape,
                type=info.type,
                offset=info.offset,
                num_bytes=info.num_bytes,
            )
    metadata = merge_metadata((file, header.metadata) for file, header in headers.items())
    sizes = tuple(header.num_bytes for header in headers.values())
    return Gguf(files, metadata, tensors, sizes)
