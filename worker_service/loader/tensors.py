"""The tensors of a checkpoint, which are read when they are indexed.

All other code sees the same few methods, whether a tensor is in a safetensors file, in a GGUF file,
or a quantized weight that consists of several tensors.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire_kernels.quantized_weight import QuantizedWeight
from worker_service.errors import BadCheckpoint

Shape = list[int]
Index = EllipsisType | slice | tuple[slice, ...]

FLOATS = ("F16", "BF16", "F32")
"""The dtypes of dense weights, as safetensors names them."""

MAX_MAPPED_BYTES = 8 << 20
"""Bytes that are read from mapped files before these are closed."""


class OpenFiles:
    """The files of a checkpoint, each opened when one of its tensors is read.

    Pages read from a mapped file count as memory of this process until the file is closed, so files
    are closed after `MAX_MAPPED_BYTES`, and opened again.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        """Bytes read so far."""

        self._on_read: Callable[[int], object] = lambda num_bytes: None
        self._opened: dict[Path, Any] = {}
        self._close_at = MAX_MAPPED_BYTES

    def open(self, file: Path) -> Any:
        """An open file of safetensors. Raises BadCheckpoint, naming it, if it is damaged."""
        opened = self._opened.get(file)
        if opened is None:
            try:
                opened = self._opened[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                with suppress(FileNotFoundError):
                    file.open("rb").close()  # raises PermissionError, which the library hides
                raise BadCheckpoint(f"{file} is truncated or damaged: {error}") from error
        return opened

    def count(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        self.num_bytes += num_bytes
        self._on_read(num_bytes)
        if self.num_bytes >= self._close_at:
            self.close()

    def close(self) -> None:
        """Close all files, until they are read again."""
        self._opened.clear()
        self._close_at = self.num_bytes + MAX_MAPPED_BYTES

    @contextmanager
    def reporting(self, on_read: Callable[[int], object]) -> Iterator[None]:
        """Call `on_read` with the number of bytes of each tensor that is read meanwhile."""
        self._on_read, previous = on_read, self._on_read
        try:
            yield
        finally:
            self._on_read = previous
            self.close()


@dataclass(kw_only=True)
class CheckpointTensor(ABC):
    """A tensor of a checkpoint, which is read when it is indexed."""

    name: str
    """As `transformers` names it in a text model, dense."""

    file: Path
    files: OpenFiles
    shape: Shape
    """In PyTorch's order: the last dimension is contiguous."""

    type: str
    """The format in which it is stored."""

    @property
    def is_quantized(self) -> bool:
        """Whether this is a quantized matrix."""
        return False

    @abstractmethod
    def __getitem__(self, index: Index) -> Tensor:
        """Read a part of the tensor, dequantized. Raises BadCheckpoint."""

    def quantized(self) -> QuantizedWeight | None:
        """Read a weight [out_features, in_features] without dequantizing it; None if it is dense,
        or each input has a scale. Raises BadCheckpoint."""
        return None

    def read(self) -> Tensor | QuantizedWeight:
        """Read the tensor, without dequantizing it if possible."""
        quantized = self.quantized()
        return self[...] if quantized is None else quantized


@dataclass(kw_only=True)
class StoredTensor(CheckpointTensor):
    """A tensor as described by the header of its safetensors file, of which only the indexed part
    is read."""

    stored_name: str
    """Its name in the file."""

    def __getitem__(self, index: Index) -> Tensor:
        opened = self.files.open(self.file)
        if index is ...:  # of tensors without dimensions there are no slices
            part: Tensor = opened.get_tensor(self.stored_name)
        else:
            part = opened.get_slice(self.stored_name)[index]
        self.files.count(part.nbytes)
        return part


@dataclass(kw_only=True)
class ExpertTensor(StoredTensor):
    """The matrix of one expert in a tensor of all experts."""

    expert: int

    def __getitem__(self, index: Index) -> Tensor:
        part: Tensor = self.files.open(self.file).get_slice(self.stored_name)[self.expert]
        self.files.count(part.nbytes)
        return part.reshape(self.shape)[index]


def describe(file: Path, files: OpenFiles) -> Iterator[StoredTensor]:
    """Describe the tensors of a safetensors file. Raises BadCheckpoint if it is damaged."""
    opened = files.open(file)
    for name in opened.keys():  # noqa: SIM118 (no mapping)
        part = opened.get_slice(name)
        shape, kind = part.get_shape(), part.get_dtype()
        yield StoredTensor(
            name=name, stored_name=name, file=file, files=files, shape=shape, type=kind
        )
