"""The fingerprint of a model: a hash of what its results depend on."""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from worker_service.errors import BadCheckpoint
from worker_service.gguf.header import is_gguf
from worker_service.loader.gguf.file import open_gguf
from worker_service.pooling_facts import PoolingFacts

_DENSE_LAYERS = "*_Dense/*.safetensors"
"""Those of sentence-transformers."""

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors itself."""

_NUM_SAMPLES, _SAMPLE_BYTES = 256, 64
"""Pieces of each weight file in a fingerprint, at equal distances: at least one of each matrix that
is a 256th of its file."""


def fingerprint(
    model_dir: Path,
    assets: Mapping[str, bytes],
    load_format: str = "safetensors",
    quantization: str | None = None,
    pooling: PoolingFacts | None = None,
) -> str:
    """Hash the assets, headers and samples of weight files, load format, quantization, and how the
    model pools, if it does.

    Not all weights are read, but `_NUM_SAMPLES` pieces of each file: two checkpoints with the same
    headers, such as two versions of a fine-tuned model, have the same fingerprint only if they
    agree in all of these. Returns 32 hexadecimal digits. Raises BadCheckpoint for a truncated file.
    """
    digest = hashlib.sha256(load_format.encode())
    if quantization is not None:
        _add(digest, quantization.encode())
    if pooling is not None:
        _add(digest, repr(pooling).encode())
    for name, content in assets.items():
        _add(digest, name.encode())
        _add(digest, content)
    if load_format == "safetensors":
        for name, file, header_bytes in _weight_files(model_dir):
            size = file.stat().st_size
            _add(digest, name.encode())
            _add(digest, str(size).encode())
            with file.open("rb", buffering=0) as stream:
                _add(digest, stream.read(header_bytes))
                for i in range(_NUM_SAMPLES):
                    stream.seek(header_bytes + (size - header_bytes) * i // _NUM_SAMPLES)
                    _add(digest, stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


def _weight_files(model_dir: Path) -> Iterator[tuple[str, Path, int]]:
    """Yield (name, file, bytes of its header), where the names of GGUF files are empty."""
    if is_gguf(model_dir):
        gguf = open_gguf(model_dir)
        for file, num_bytes in zip(gguf.files, gguf.header_bytes, strict=True):
            yield "", file, num_bytes
    for file in sorted([*model_dir.glob("*.safetensors"), *model_dir.glob(_DENSE_LAYERS)]):
        with file.open("rb") as stream:
            start = stream.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise BadCheckpoint(f"{file} is truncated")
        yield file.name, file, _LENGTH.size + min(*_LENGTH.unpack(start), _MAX_HEADER_BYTES)


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    """Hash the data after its length, so that different lists of pieces have different digests."""
    digest.update(_LENGTH.pack(len(data)))
    digest.update(data)
