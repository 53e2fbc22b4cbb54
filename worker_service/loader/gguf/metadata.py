"""Typed access to the metadata of a GGUF model."""

from pathlib import Path
from typing import Any

from worker_service.errors import BadCheckpoint, UnsupportedModel, WorkerError
from worker_service.loader.gguf.architectures import Architecture
from worker_service.loader.gguf.file import Gguf

ROPE_FREQUENCIES = "rope_freqs.weight"
"""The tensor of divisors of the frequencies of RoPE."""


class Metadata:
    """The settings of one architecture, whose names begin with it."""

    def __init__(self, path: Path, gguf: Gguf, architecture: Architecture) -> None:
        self.path = path
        self.gguf = gguf
        self.tensors = gguf.tensors
        self.settings = gguf.metadata
        """All settings of the file, under their full names."""
        self.architecture = architecture
        self.unread = {
            key
            for key, value in gguf.metadata.items()
            if key.startswith(f"{architecture.name}.") and value and value != 1
        }
        """Settings that have not been read, without those of no effect."""

    def has_tensor(self, end: str) -> bool:
        """Whether there is a tensor with a name that ends so."""
        return any(name.endswith(end) for name in self.tensors)

    def require(self, key: str, expected: Any, meaning: str) -> None:
        """Raise UnsupportedModel if the value is not the one that is supported."""
        if (found := self.get(key, expected)) != expected:
            raise self.fault(key, meaning, found, UnsupportedModel)

    def number(self, key: str, default: int | None = None) -> int:
        """A positive number, the same for all layers. Raises BadCheckpoint."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or value < 1:
            raise self.fault(key, "a positive number, the same for all layers", value)
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number, of any kind. Raises BadCheckpoint."""
        value = self.get(key, default)
        if not isinstance(value, float | int) or not 0.0 < value < float("inf"):
            raise self.fault(key, "a positive number", value)
        return float(value)

    def get(self, key: str, default: Any = None) -> Any:
        """A setting of the architecture. Raises BadCheckpoint without it and a default."""
        self.unread.discard(f"{self.architecture.name}.{key}")
        value = self.settings.get(f"{self.architecture.name}.{key}", default)
        if value is None and key != "attention.sliding_window":
            raise BadCheckpoint(f"{self.path}: missing metadata {self.architecture.name}.{key}")
        return value

    def by_layer(self, key: str, num_layers: int) -> list[int]:
        """The number of each layer."""
        counts = self.get(key, 1)
        counts = counts if isinstance(counts, list) else [counts] * num_layers
        num_further = self.get("nextn_predict_layers", 0)  # which are after the others
        if len(counts) not in (num_layers, num_layers + num_further):
            raise self.fault(key, f"a number for each of {num_layers} layers", counts)
        return counts[:num_layers]

    def fault(
        self, key: str, expected: str, got: Any, kind: type[WorkerError] = BadCheckpoint
    ) -> WorkerError:
        """The error of a setting with another value than is expected."""
        return kind(
            f"{self.path}: {self.architecture.name}.{key}: expected {expected}, got {got!r}"
        )
