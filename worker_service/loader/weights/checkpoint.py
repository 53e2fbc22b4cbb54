"""The weight files of a model: safetensors and GGUF. Pickles are refused: they may run any code.

Quantized tensors are read under the names of their dense weights, so that all other code sees dense
names only.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from worker_service.errors import BadCheckpoint
from worker_service.gguf.header import is_gguf, split_files
from worker_service.loader.files.json_files import read_json
from worker_service.loader.gguf.config import unread_settings
from worker_service.loader.gguf.names import gguf_tensors
from worker_service.loader.quantized.formats import StoredWeight
from worker_service.loader.quantized.schemes import Schemes, with_quantized_weights
from worker_service.loader.tensors import (
    FLOATS,
    CheckpointTensor,
    OpenFiles,
    StoredTensor,
    describe,
)
from worker_service.models.native import LoadableModule, NativeModel
from worker_service.text_part import of_other_parts, text_name

logger = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAME_WEIGHTS = "consolidated"
"""How files of the same weights under Mistral's own names begin."""

_CODE_TYPES = ("I8", "F8_", "F6_", "F4")
"""Beginnings of types that only quantized tensors have; masks are U8, BOOL or whole numbers."""

STACK_NAME = ".mlp.experts.gate_up_proj"
"""The end of the name of a tensor of all experts."""

_MAX_NAMES = 8
"""Maximum number of tensors named in an error message."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weight files of a model."""

    files: tuple[Path, ...]
    tensors: Mapping[str, CheckpointTensor]
    """By name; a quantized weight has the name of its dense weight."""

    opened: OpenFiles = field(default_factory=OpenFiles)
    """Reads the tensors."""

    unused: Sequence[str] = ()
    """Names of tensors that no text model reads."""

    @property
    def stored_as(self) -> str:
        """The format of most weights: `F32`, `BF16`, `Q4_1`, `gptq of 4 bits` and so on."""
        matrices = [tensor for tensor in self.tensors.values() if len(tensor.shape) > 1]
        quantized = [tensor for tensor in matrices if isinstance(tensor, StoredWeight)]
        types = Counter(tensor.type for tensor in quantized or matrices)
        return max(types, key=types.__getitem__, default="none")

    @property
    def is_quantized(self) -> bool:
        """Whether most weights are quantized."""
        return self.stored_as not in (*FLOATS, "F64")

    def sources(self, model: LoadableModule | type[LoadableModule]) -> dict[str, CheckpointTensor]:
        """All tensors by the model's canonical names. Raises BadCheckpoint if two have the same."""
        sources: dict[str, CheckpointTensor] = {}
        for name, tensor in self.tensors.items():
            other = sources.setdefault(model.canonical_name(name), tensor)
            if other is not tensor:
                raise BadCheckpoint(
                    f"{tensor.file}: {other.name} and {name} are the same tensor of the model"
                )
        return sources

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def is_empty_bias(self, tensor: CheckpointTensor) -> bool:
        """Whether this is an all-zero bias, which GPTQ tools add to layers without a bias."""
        module, _, kind = tensor.name.rpartition(".")
        weight = self.tensors.get(f"{module}.weight")
        if kind != "bias" or weight is None or not weight.is_quantized:
            return False
        return not tensor[...].any()


def open_checkpoint(model_dir: Path, schemes: Schemes = ()) -> Checkpoint:
    """Find the weight files and read their headers, which shows whether a file is truncated.

    schemes: how weights are quantized, if they are. Raises BadCheckpoint or UnsupportedModel,
    naming the file.
    """
    opened = OpenFiles()
    if is_gguf(model_dir):
        return Checkpoint(split_files(model_dir), gguf_tensors(model_dir, opened), opened)
    files = _weight_files(model_dir)
    stored = _stored_tensors(files, opened)
    if not schemes:
        _refuse_codes(stored.values())
    tensors = with_quantized_weights(schemes, stored) if schemes else dict(stored)
    weights = [tensor for tensor in tensors.values() if isinstance(tensor, StoredWeight)]
    unused = [name for weight in weights for name in weight.unused]
    others = of_other_parts(tensors, (tensor.stored_name for tensor in stored.values()))
    unused += [name for name in tensors if name in others]
    tensors = {name: tensors[name] for name in tensors if name not in others}
    return Checkpoint(tuple(files), tensors, opened, unused)


def _stored_tensors(files: Iterable[Path], opened: OpenFiles) -> dict[str, StoredTensor]:
    """All tensors. Those of the text model of a multimodal one have the names that they would have
    without the other parts."""
    stored: dict[str, StoredTensor] = {}
    for file in files:
        for described in describe(file, opened):
            tensor = replace(described, name=text_name(described.name))
            other = stored.setdefault(tensor.name, tensor)
            if other.file != file:
                raise BadCheckpoint(f"{file}: {tensor.name} is also in {other.file.name}")
            if other is not tensor:
                raise BadCheckpoint(f"{file}: two tensors are {tensor.name} of the text model")
    return stored


def _refuse_codes(tensors: Iterable[StoredTensor]) -> None:
    """Raise BadCheckpoint if a tensor is quantized: nothing says what its numbers stand for."""
    for tensor in tensors:
        is_code = tensor.type.startswith(_CODE_TYPES) or tensor.name.endswith("weight")
        if is_code and tensor.type not in (*FLOATS, "F64"):
            raise BadCheckpoint(
                f"{tensor.file}: {tensor.name} is stored as {tensor.type}, which looks quantized,"
                " but config.json has no quantization_config that says how; expected F16, BF16 or"
                " F32"
            )


def _weight_files(model_dir: Path) -> list[Path]:
    if (model_dir / _INDEX).is_file():
        weight_map = read_json(model_dir / _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise BadCheckpoint(f"{model_dir / _INDEX} holds no weight_map")
        files = sorted({model_dir / str(name) for name in weight_map.values()})
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise BadCheckpoint(f"{model_dir / _INDEX} names missing files: {listed(missing)}")
        return files
    if (model_dir / _SINGLE).is_file():
        return [model_dir / _SINGLE]
    files = sorted(model_dir.glob("*.safetensors"))
    if files:
        return files
    pickles = [file.name for pattern in _PICKLES for file in model_dir.glob(pattern)]
    if pickles:
        raise BadCheckpoint(
            f"{model_dir} holds only pickled weights ({listed(sorted(pickles))}), which are"
            " refused because loading them may run any code: convert them to safetensors"
        )
    raise BadCheckpoint(f"{model_dir} holds no *.safetensors file")


def has_own_head(model: type[NativeModel], checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint holds an LM head that differs from the embedding, or may differ
    because one of them is quantized or has another dtype."""
    sources = checkpoint.sources(model)
    found = [sources.get(name) for name in (model.embedding_name, "lm_head.weight")]
    tensors = [tensor for tensor in found if tensor is not None]
    return len(tensors) == len(found) and not are_equal(*tensors)


def are_equal(first: CheckpointTensor, second: CheckpointTensor) -> bool:
    """Whether two tensors are dense, and have the same dtype, shape and numbers."""
    if first.is_quantized or second.is_quantized or first.shape != second.shape:
        return False
    left, right = first[...], second[...]
    return left.dtype == right.dtype and torch.equal(left, right)


def warn_of_unused(checkpoint: Checkpoint) -> None:
    """Log the tensors and files of a checkpoint that are not read."""
    if checkpoint.unused:
        log_unused(checkpoint.unused)
    if is_gguf(checkpoint.files[0]):
        for key in unread_settings(checkpoint.files[0]):
            logger.warning("%s: %s is not used", checkpoint.files[0], key)
        return
    found = {file.name for file in checkpoint.files[0].parent.glob("*.safetensors")}
    others = sorted(found - {file.name for file in checkpoint.files})
    others = [name for name in others if not name.startswith(_SAME_WEIGHTS)]
    if others:
        logger.warning("weight files not read num=%d names=%s", len(others), listed(others))


def log_unused(names: Sequence[str]) -> None:
    logger.warning("tensors not used num=%d names=%s", len(names), listed(names))


def listed(names: Sequence[str]) -> str:
    """The first `_MAX_NAMES` names, and the number of the others."""
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")
