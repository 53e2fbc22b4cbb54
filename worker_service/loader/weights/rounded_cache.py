"""`--quantization-cache`: keeps quantized weights on disk, so that later starts reuse them.

A cache file holds all weights of a checkpoint that `--quantization` rounds, and is read like a file
of a quantized checkpoint; all other tensors come from the checkpoint itself. Its name consists of a
key, which hashes everything that the rounded numbers depend on, and of a digest of its content. It
is written under a temporary name and then renamed, so that readers never see an incomplete file and
several workers may write it at the same time. A damaged file is replaced by the rename, not deleted
before it: the name is that of the right content, which another worker may have restored meanwhile.
"""

import hashlib
import json
import logging
import os
import shutil
import struct
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import Int8Activations, QuantizedWeight, choose_group_size
from worker_service.errors import InvalidOption
from worker_service.load_progress import LoadProgress
from worker_service.loader.quantized.formats import ROUNDED, Scheme, StoredRounded
from worker_service.loader.tensors import describe
from worker_service.loader.weights.checkpoint import Checkpoint
from worker_service.models.linear.packing import round_weight

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
"""Incremented when the rounded numbers or their layout in the file change."""

_UNFINISHED = "-unfinished"
_ABANDONED_AFTER_S = 24 * 3600.0
"""Age at which the writer of an unfinished file is assumed to have been killed."""


def with_rounded_weights(
    checkpoint: Checkpoint,
    roundings: Mapping[str, str],
    dtype: torch.dtype,
    folder: Path,
    progress: LoadProgress,
) -> Checkpoint:
    """Return the checkpoint with rounded weights from the cache, which is written if it is missing.

    roundings: the format of `quantize`, by tensor name; dtype: to which weights are converted
    before they are rounded; folder: of the cache files. If the cache cannot be written, a warning
    is logged and the checkpoint is returned unchanged. Raises InvalidOption if the folder cannot be
    created.
    """
    tensors = checkpoint.tensors
    roundings = {name: to for name, to in roundings.items() if not tensors[name].is_quantized}
    if not roundings:
        return checkpoint
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidOption(
            f"quantization_cache: expected a folder that can be created and written to: {error}"
        ) from error
    key = _key(checkpoint, roundings, dtype)
    (file, damaged), done = _find(folder, key), "read from the cache"
    if file is None:
        done = "written to the cache"
        try:
            file = _write(folder, key, checkpoint, roundings, dtype, progress)
            for other in damaged - {file}:
                with suppress(OSError):  # it is not used, whether or not it can be deleted
                    other.unlink()
        except OSError as error:
            logger.warning("rounded weights not cached folder=%s error=%s", folder, error)
            return checkpoint
    logger.info("rounded weights %s file=%s num_tensors=%d", done, file, len(roundings))
    stored = {tensor.name: tensor for tensor in describe(file, checkpoint.opened)}
    weights = {}
    for name, to in roundings.items():
        scheme = Scheme(
            format=ROUNDED,
            bits=4 if to == "int4" else 8,
            block=(1, choose_group_size(tensors[name].shape[1], to)),
            activations=Int8Activations() if to == "w8a8" else None,
        )
        weights[name] = StoredRounded(name.removesuffix(".weight"), scheme, stored)
    return Checkpoint((*checkpoint.files, file), {**tensors, **weights}, checkpoint.opened)


def _key(checkpoint: Checkpoint, roundings: Mapping[str, str], dtype: torch.dtype) -> str:
    """The key of a cache file. Checkpoint files enter it by path, size and modification time:
    hashing their content would take as long as rounding it."""
    stats = [(str(file.resolve()), file.stat()) for file in checkpoint.files]
    files = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    facts = (FORMAT_VERSION, str(dtype), files, sorted(roundings.items()))
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def _find(folder: Path, key: str) -> tuple[Path | None, set[Path]]:
    """The cache file of a key, if there is one, and damaged ones, for which warnings are logged."""
    damaged = set[Path]()
    for file in folder.glob(f"{key}-*.safetensors"):
        try:
            if file.stem == f"{key}-{_digest(file)}":
                return file, damaged
            problem = "another digest"
        except FileNotFoundError:  # another worker has deleted it
            continue
        except OSError as error:
            problem = str(error)
        logger.warning(
            "cached weights are damaged, rounding again file=%s problem=%s", file, problem
        )
        damaged.add(file)
    return None, damaged


def _write(
    folder: Path,
    key: str,
    checkpoint: Checkpoint,
    roundings: Mapping[str, str],
    dtype: torch.dtype,
    progress: LoadProgress,
) -> Path:
    """Round the weights and write them one at a time. Returns the file."""
    _delete_abandoned(folder)
    with tempfile.TemporaryDirectory(
        dir=folder, prefix=f"{key}-", suffix=_UNFINISHED
    ) as unfinished:
        part = Path(unfinished) / "part"
        with (
            part.open("wb") as stream,
            progress.phase("rounding weights", checkpoint.num_bytes) as advance,
            checkpoint.opened.reporting(advance),
        ):
            stream.write(_header(checkpoint, roundings))
            for name, to in roundings.items():
                weight = checkpoint.tensors[name][...]
                for tensor in _stored(round_weight(weight.to(dtype), to)).values():
                    stream.write(tensor.contiguous().view(torch.uint8).numpy().data)
            stream.flush()
            os.fsync(stream.fileno())
        return part.replace(folder / f"{key}-{_digest(part)}.safetensors")


def _stored(rounded: QuantizedWeight) -> dict[str, Tensor]:
    """The tensors that are written for a weight, by the suffix of their name."""
    codes = rounded.codes
    if rounded.bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    if rounded.is_float:
        codes = codes.view(torch.float8_e4m3fn)
    tensors = {"codes": codes, "scales": rounded.scales.half()}
    if rounded.offsets is not None:
        tensors["offsets"] = rounded.offsets.half()
    return tensors


_DTYPES = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16"}


def _header(checkpoint: Checkpoint, roundings: Mapping[str, str]) -> bytes:
    """The header of a cache file. It is written here because safetensors' own writer needs all
    tensors in memory."""
    entries, offset = {}, 0
    for name, to in roundings.items():
        num_rows, in_features = checkpoint.tensors[name].shape
        outline = torch.zeros([1, in_features])
        for suffix, tensor in _stored(round_weight(outline, to)).items():
            end = offset + num_rows * tensor.nbytes
            entries[f"{name.removesuffix('.weight')}.{suffix}"] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": [num_rows, tensor.shape[1]],
                "data_offsets": [offset, end],
            }
            offset = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header


def _delete_abandoned(folder: Path) -> None:
    """Delete the unfinished files of workers that were killed."""
    for left in folder.glob(f"*{_UNFINISHED}"):
        with suppress(OSError):  # another worker may delete it at the same time
            if time.time() - left.stat().st_mtime > _ABANDONED_AFTER_S:
                shutil.rmtree(left)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:32]
