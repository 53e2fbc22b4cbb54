"""Typed access to the metadata of a GGUF model."""

from pathlib import Path
from typing import Any

from worker_service.errors import BadCheckpoint, UnsupportedModel, WorkerError
from worker_service.loader.gguf.file import Gguf

ROPE_FREQUENCIES = "rope_freqs.weight"
"""The tensor of divisors of the frequencies of RoPE."""


class Metadata:
    """The settings of one architecture, whose names begin with it."""

    def __init__(self, path: Path, gguf: Gguf, architecture: str) -> None:
        self._path = path
        self._gguf = gguf
        self._architecture = architecture
        self.unread = {
            key
            for key, value in gguf.metadata.items()
            if key.startswith(f"{architecture}.") and value and value != 1
        }
        """Settings that have not been read, without those of no effect."""

    def _has(self, end: str) -> bool:
        """Whether there is a tensor with a name that ends so."""
        return any(name.endswith(end) for name in self._gguf.tensors)

    def _require(self, key: str, expected: Any, meaning: str) -> None:
        """Raise UnsupportedModel if the value is not the one that is supported."""
        if (found := self._get(key, expected)) != expected:
            raise self._fault(key, meaning, found, UnsupportedModel)

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int) or value < 1:
            raise self._fault(key, "a positive number, the same for all layers", value)
        return value

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, float | int) or not 0.0 < value < float("inf"):
            raise self._fault(key, "a positive number", value)
        return float(value)

    def _get(self, key: str, default: Any = None) -> Any:
        self.unread.discard(f"{self._architecture}.{key}")
        value = self._gguf.metadata.get(f"{self._architecture}.{key}", default)
        if value is None and key != "attention.sliding_window":
            raise BadCheckpoint(f"{self._path}: missing metadata {self._architecture}.{key}")
        return value

    def _by_layer(self, key: str, num_layers: int) -> list[int]:
        """The number of each layer."""
        counts = self._get(key, 1)
        counts = counts if isinstance(counts, list) else [counts] * num_layers
        num_further = self._get("nextn_predict_layers", 0)  # which are after the others
        if len(counts) not in (num_layers, num_layers + num_further):
            raise self._fault(key, f"a number for each of {num_layers} layers", counts)
        return counts[:num_layers]

    def _fault(
        self, key: str, expected: str, got: Any, kind: type[WorkerError] = BadCheckpoint
    ) -> WorkerError:
        return kind(f"{self._path}: {self._architecture}.{key}: expected {expected}, got {got!r}")
