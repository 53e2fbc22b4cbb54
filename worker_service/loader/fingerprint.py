"""A short name for what a model's files say."""

import hashlib
import struct
from pathlib import Path

from worker_service.errors import BadCheckpoint
from worker_service.loader.assets import iter_assets

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 100_000_000
"""As safetensors itself limits it."""


def fingerprint(model_dir: Path, load_format: str = "safetensors") -> str:
    """A hash over configuration, tokenizer and the headers of the weight files.

    The weights themselves are not read: two fine-tunings with the same shapes and the same other
    files have the same fingerprint unless their headers' metadata or their files' sizes differ.
    """
    digest = hashlib.sha256(load_format.encode())
    for name, content in iter_assets(model_dir):
        _add(digest, name.encode())
        _add(digest, content)
    if load_format == "safetensors":
        for file in sorted(model_dir.glob("*.safetensors")):
            _add(digest, file.name.encode())
            _add(digest, str(file.stat().st_size).encode())
            _add(digest, _header(file))
    return digest.hexdigest()[:32]


def _add(digest: "hashlib._Hash", data: bytes) -> None:
    """With its length, so that no two different lists of pieces look alike."""
    digest.update(_LENGTH.pack(len(data)))
    digest.update(data)


def _header(file: Path) -> bytes:
    with file.open("rb") as stream:
        start = stream.read(_LENGTH.size)
        if len(start) < _LENGTH.size:
            raise BadCheckpoint(f"{file} is truncated")
        (length,) = _LENGTH.unpack(start)
        return stream.read(min(length, _MAX_HEADER_BYTES))
