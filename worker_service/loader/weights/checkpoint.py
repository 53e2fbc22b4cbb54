"""Reading weights from safetensors and GGUF files. Pickles are refused: they may run any code.

Quantized tensors are read under the names of their dense weights, so that all other code sees dense
names only.

A linear layer is packed as soon as its weight is complete, and its original is freed while it is
packed. The largest layers come first, so that the temporary memory of packing is needed while few
packed weights exist: the peak is hardly more than the packed model.

Scales of an fp8 KV cache: quantization tools measure the range of keys and values per layer and
store one scale for each, `self_attn.k_scale` and `self_attn.v_scale`, or the same below `k_proj`
and `v_proj`. The default is 1, which suits models whose keys and values stay well below 448.
"""

import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import assemble
from worker_service.distributed.layout import Shard
from worker_service.errors import BadCheckpoint
from worker_service.gguf.header import is_gguf, split_files
from worker_service.load_progress import LoadProgress
from worker_service.loader.files.model_files import read_json
from worker_service.loader.gguf.config import unread_settings
from worker_service.loader.gguf.names import gguf_tensors
from worker_service.loader.quantized.formats import StoredWeight
from worker_service.loader.quantized.schemes import Schemes, with_quantized_weights
from worker_service.loader.tensors import (
    FLOATS,
    MAX_MAPPED_BYTES,
    CheckpointTensor,
    OpenFiles,
    StoredTensor,
    describe,
)
from worker_service.models.interface import WeightTarget
from worker_service.models.linear import Packable, round_weight
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

Wanted = tuple[CheckpointTensor, WeightTarget]
"""A tensor, and a target that it fills."""

OnFilled = Callable[[WeightTarget], None]


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
            raise BadCheckpoint(f"{model_dir / _INDEX} names missing files: {_listed(missing)}")
        return files
    if (model_dir / _SINGLE).is_file():
        return [model_dir / _SINGLE]
    files = sorted(model_dir.glob("*.safetensors"))
    if files:
        return files
    pickles = [file.name for pattern in _PICKLES for file in model_dir.glob(pattern)]
    if pickles:
        raise BadCheckpoint(
            f"{model_dir} holds only pickled weights ({_listed(sorted(pickles))}), which are"
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
        _log_unused(checkpoint.unused)
    if is_gguf(checkpoint.files[0]):
        for key in unread_settings(checkpoint.files[0]):
            logger.warning("%s: %s is not used", checkpoint.files[0], key)
        return
    found = {file.name for file in checkpoint.files[0].parent.glob("*.safetensors")}
    others = sorted(found - {file.name for file in checkpoint.files})
    others = [name for name in others if not name.startswith(_SAME_WEIGHTS)]
    if others:
        logger.warning("weight files not read num=%d names=%s", len(others), _listed(others))


def _log_unused(names: Sequence[str]) -> None:
    logger.warning("tensors not used num=%d names=%s", len(names), _listed(names))


def load_weights(
    model: LoadableModule,
    checkpoint: Checkpoint,
    *,
    others: Container[str] = (),
    on_filled: OnFilled = lambda weight: None,
    progress: LoadProgress | None = None,
) -> None:
    """Fill the model's targets from the checkpoint.

    Of a tensor that is sharded over several ranks, only this rank's shard is read. others:
    canonical names of tensors that belong to other ranks; on_filled: called with each target once
    it is filled.

    Raises BadCheckpoint before anything is read, naming all missing and unexpected tensors, or all
    tensors of unexpected shapes.
    """
    targets: dict[str, list[WeightTarget]] = {}
    for weight in model.weight_targets():
        targets.setdefault(weight.name, []).append(weight)
    sources = checkpoint.sources(model)
    _check_names(model, checkpoint, targets, sources, others)
    wanted = [(sources[name], weight) for name, named in targets.items() for weight in named]
    targets.clear()  # or their memory would be held until the end
    _check_shapes(checkpoint, wanted)
    places = {file: place for place, file in enumerate(checkpoint.files)}
    wanted.sort(key=lambda entry: (_num_layer_bytes(entry[1]), -places[entry[0].file]))
    num_bytes = sum(weight.target.nbytes for _, weight in wanted)
    phase = (progress or LoadProgress(show_bar=False)).phase("loading weights", num_bytes)
    with phase as advance:
        while wanted:
            tensor, weight = wanted.pop()
            _fill(tensor, weight, model)
            advance(weight.target.nbytes)
            on_filled(weight)
    checkpoint.opened.close()


def _num_layer_bytes(weight: WeightTarget) -> int:
    """Bytes of all targets that are packed together: they are views of one tensor."""
    return weight.target.untyped_storage().nbytes()


def _fill(tensor: CheckpointTensor, weight: WeightTarget, model: LoadableModule) -> None:
    """Fill one target; a large dense tensor some rows at a time, so that little of it is mapped.

    If `--quantization` applies, each of these slices is quantized when it is read, so that the
    whole dense tensor is never in memory.
    """
    target = weight.target
    if weight.keep is not None and (quantized := tensor.quantized()) is not None:
        weight.keep(weight.part_of(quantized))
        return
    if tensor.is_quantized:
        model.dequantized["the format has no groups of whole numbers"] += target.nbytes
    is_small = target.dim() != 2 or target.nbytes <= MAX_MAPPED_BYTES
    if is_small or not isinstance(tensor, StoredTensor):
        target.copy_(weight.arranged(tensor[weight.source_index or ...]))
    elif weight.rounding is None or weight.keep is None:
        places = None if weight.order is None else weight.order.argsort()
        for rows, part in _read_by_rows(tensor, weight):
            target[rows if places is None else places[rows]] = part.to(target)
    else:
        parts = (part.to(target.dtype) for _, part in _read_by_rows(tensor, weight))
        rounded = (round_weight(part, weight.rounding) for part in parts)
        whole = assemble(rounded, target.shape[0])
        weight.keep(whole if weight.order is None else whole.rows(weight.order))


def _read_by_rows(tensor: CheckpointTensor, weight: WeightTarget) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the target's rows, and the tensor's content for each."""
    num_rows = weight.target.shape[0]
    step = max(1, MAX_MAPPED_BYTES * num_rows // weight.target.nbytes)
    shard = weight.shard or Shard.full(weight.source_shape[weight.axis])
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        index = (slice(first, last), slice(shard.start, shard.start + shard.size))
        if weight.axis == 0:
            index = (slice(shard.start + first, shard.start + last), slice(None))
        yield slice(first, last), tensor[index]


def _check_names(
    model: LoadableModule,
    checkpoint: Checkpoint,
    targets: Mapping[str, list[WeightTarget]],
    sources: Mapping[str, CheckpointTensor],
    others: Container[str],
) -> None:
    missing = [name for name in targets if name not in sources]
    unknown = [name for name in sources if name not in targets and name not in others]
    unused = [name for name in unknown if model.unused_names.fullmatch(name)]
    if by_none := [name for name in unused if not model.head_names.fullmatch(name)]:
        _log_unused(by_none)
    if num_of_head := len(unused) - len(by_none):
        logger.info("draft head found, for --speculative mtp num_tensors=%d", num_of_head)
    unexpected = [
        name
        for name in unknown
        if not (model.optional_names.fullmatch(name) or model.unused_names.fullmatch(name))
        and not checkpoint.is_empty_bias(sources[name])
    ]
    faults = []
    if missing:
        faults.append(f"missing tensors: {_listed(missing)}")
    if unexpected:
        faults.append(f"unexpected tensors: {_listed(unexpected)}")
    if faults:
        where = checkpoint.files[0] if len(checkpoint.files) == 1 else checkpoint.files[0].parent
        raise BadCheckpoint(
            f"{where}: weights do not fit {model.architecture}: {'; '.join(faults)}"
        )


def _check_shapes(checkpoint: Checkpoint, wanted: Iterable[Wanted]) -> None:
    wrong = [
        f"{tensor.name} is {tensor.shape}, expected {weight.source_shape}"
        for tensor, weight in wanted
        if tensor.shape != weight.source_shape
    ]
    if wrong:
        gguf = next((file for file in checkpoint.files if is_gguf(file)), None)
        source = f"the metadata of {gguf}" if gguf else checkpoint.files[0].with_name("config.json")
        raise BadCheckpoint(f"weights do not fit {source}: {_listed(wrong)}")


def fill_dummy_weights(
    targets: Iterator[WeightTarget], on_filled: OnFilled = lambda weight: None
) -> None:
    """Fill targets with small random numbers, the same in every run: weights for benchmarks.

    A tensor's numbers depend only on its name, so that the shards of all ranks belong to the same
    tensor. Biases are 0, and all other vectors, which are weights of norms, are 1. on_filled:
    called with each target.
    """
    generator = torch.Generator()
    for weight in targets:
        if weight.target.dim() == 1:
            weight.target.fill_(0.0 if weight.name.endswith("bias") else 1.0)
        else:
            generator.manual_seed(zlib.crc32(weight.name.encode()))
            values = torch.empty(weight.source_shape).uniform_(-0.05, 0.05, generator=generator)
            weight.target.copy_(weight.arranged(values[weight.source_index]))
        on_filled(weight)


def _listed(names: Sequence[str]) -> str:
    """The first `_MAX_NAMES` names, and the number of the others."""
    rest = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def load_kv_scales(model: NativeModel, checkpoint: Checkpoint) -> None:
    """Set the KV scales of each layer. Raises BadCheckpoint if one is not a positive number."""
    sources = checkpoint.sources(model)
    num_found = num_layers = 0
    for name, attention in model.kv_scale_holders():
        num_layers += 1
        for part, attribute in (("k", "key_scale"), ("v", "value_scale")):
            names = (f"{name}.{part}_scale", f"{name}.{part}_proj.{part}_scale")
            found = [sources[target_name] for target_name in names if target_name in sources]
            if found:
                setattr(attention, attribute, _read_scale(found[0]))
                num_found += 1
    logger.info("kv scales num_layers=%d num_found=%d others=1.0", num_layers, num_found)


def _read_scale(stored: CheckpointTensor) -> float:
    tensor = stored[...]
    scale = float(tensor) if tensor.numel() == 1 else 0.0
    if not 0.0 < scale < float("inf"):
        raise BadCheckpoint(
            f"{stored.file}: {stored.name}: expected one positive number, got"
            f" {_listed([str(number) for number in tensor.flatten().tolist()])}"
        )
    return scale


class EagerPacking:
    """Packs layers while weights are loaded. To be called with each target once it is
    filled."""

    def __init__(self, model: LoadableModule) -> None:
        self._num_missing = Counter(_memory_of(weight.target) for weight in model.weight_targets())
        self._layers: dict[int, list[Packable]] = defaultdict(list)
        """By the address of the weight's memory, which a tied head shares with the embedding."""
        for module in model.modules():
            if isinstance(module, Packable) and module.weight is not None:
                self._layers[_memory_of(module.weight)].append(module)

    def __call__(self, weight: WeightTarget) -> None:
        """Pack the layers whose weight this target has completed."""
        memory = _memory_of(weight.target)
        self._num_missing[memory] -= 1
        if self._num_missing[memory] == 0:
            for layer in self._layers.pop(memory, ()):
                layer.pack()


def _memory_of(tensor: Tensor) -> int:
    """The address of the tensor's storage, which is the same for all views of it."""
    return tensor.untyped_storage().data_ptr()
