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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pagewire_kernels.quantized_weight import QuantizedWeight, assemble
from worker_service.distributed.layout import Shard
from worker_service.errors import BadCheckpoint
from worker_service.load_progress import LoadProgress
from worker_service.loader.gguf_file import is_gguf, split_files
from worker_service.loader.gguf_model import GgufTensors, gguf_tensors, unread_settings
from worker_service.loader.model_files import read_json
from worker_service.loader.quantized_checkpoint import (
    QuantizedTensors,
    Schemes,
    dense_names,
    describe,
    find_weights,
)
from worker_service.loader.quantized_formats import FLOATS, StoredTensor, StoredWeight
from worker_service.models.interface import WeightTarget
from worker_service.models.linear import Linear, round_weight
from worker_service.models.native import LoadableModule, NativeModel

logger = logging.getLogger(__name__)


_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SAME_WEIGHTS = "consolidated"
"""How files of the same weights under Mistral's own names begin."""

_TEXT_MODEL = "language_model."
"""The part of names that says that a tensor belongs to the text model of a multimodal one."""

_TEXT_PARTS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")

_CODE_TYPES = ("I8", "F8_", "F6_", "F4")
"""Beginnings of types that only quantized tensors have; masks are U8, BOOL or whole numbers."""

_MAX_NAMES = 8
"""Maximum number of tensors named in an error message."""

_MAX_MAPPED_BYTES = 8 << 20
"""Bytes read from a file before it is closed and opened again."""

Wanted = tuple[str, WeightTarget]
"""The name of a tensor in its file, and a target that it fills."""

OnFilled = Callable[[WeightTarget], None]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weight files of a model."""

    files: tuple[Path, ...]
    file_of: Mapping[str, Path]
    """By tensor name; a quantized weight has the name of its dense weight."""

    quantized: Mapping[str, StoredWeight] = field(default_factory=dict)
    unused: Sequence[str] = ()
    """Names of tensors that no text model reads."""

    stored_as: str = ""
    """The format of most weights: `F32`, `BF16`, `Q4_1`, `gptq of 4 bits` and so on."""

    is_quantized: bool = False
    """Whether most weights are quantized."""

    @contextmanager
    def open(self, file: Path) -> Iterator[Any]:
        """Open a file; the result has the methods of `safe_open`. Raises BadCheckpoint, naming the
        file, if it is damaged."""
        with _open(file) as tensors:
            if any(weight.file == file for weight in self.quantized.values()):
                tensors = QuantizedTensors(file, tensors, self.quantized, _open)
            yield tensors

    def sources(self, model: LoadableModule | type[LoadableModule]) -> dict[str, str]:
        """The names of all tensors by the model's canonical ones. Raises BadCheckpoint if two have
        the same."""
        sources: dict[str, str] = {}
        for name in self.file_of:
            other = sources.setdefault(model.canonical_name(name), name)
            if other != name:
                raise BadCheckpoint(
                    f"{self.file_of[name]}: {other} and {name} are the same tensor of the model"
                )
        return sources

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def dense_names(self) -> set[str]:
        """Names of the tensors that are not quantized."""
        with ExitStack() as files:
            tensors = self.tensors(files)
            return {
                n for n, tensor in tensors.items() if not getattr(tensor, "is_quantized", False)
            }

    def is_empty_bias(self, name: str) -> bool:
        """Whether a tensor is an all-zero bias, which GPTQ tools add to layers without a bias."""
        module, _, kind = name.rpartition(".")
        if kind != "bias" or f"{module}.weight" not in self.quantized:
            return False
        with self.open(self.file_of[name]) as tensors:
            return not tensors.get_tensor(name).any()

    def tensors(self, files: ExitStack) -> dict[str, Any]:
        """Slices of all tensors by name. A slice is read when it is indexed, which is possible
        until `files` is closed."""
        opened = {file: files.enter_context(self.open(file)) for file in self.files}
        return {name: opened[file].get_slice(name) for name, file in self.file_of.items()}

    @contextmanager
    def reader(self, on_read: Callable[[int], None] = lambda num_bytes: None) -> Iterator["Reader"]:
        """Open for reading. on_read: called with the number of bytes of each tensor."""
        with ExitStack() as files:
            yield Reader(self, files, on_read)


class Reader:
    """Reads a checkpoint's tensors by name.

    Pages read from a mapped file count as memory of this process until the file is closed, so it is
    opened again after `_MAX_MAPPED_BYTES`.
    """

    def __init__(
        self, checkpoint: Checkpoint, files: ExitStack, on_read: Callable[[int], None]
    ) -> None:
        self._checkpoint = checkpoint
        self._files = files
        self._on_read = on_read
        self._file: Path | None = None
        self._tensors: Any = None
        self._reopen_at = 0
        self.num_bytes = 0
        """Bytes read so far."""

    def tensors_of(self, name: str) -> Any:
        """The open file of a tensor, valid until the next call; see `Checkpoint.open`."""
        file = self._checkpoint.file_of[name]
        if file != self._file or self.num_bytes >= self._reopen_at:
            self._tensors = None
            self._files.close()
            self._tensors = self._files.enter_context(self._checkpoint.open(file))
            self._file, self._reopen_at = file, self.num_bytes + _MAX_MAPPED_BYTES
        return self._tensors

    def count(self, num_bytes: int) -> None:
        """Add bytes that were read from an open file."""
        self.num_bytes += num_bytes
        self._on_read(num_bytes)

    def __call__(self, name: str) -> Tensor | QuantizedWeight:
        """Read a tensor, without dequantizing it."""
        tensor = _read_quantized(self.tensors_of(name), name)
        if tensor is None:
            dense: Tensor = self._tensors.get_tensor(name)
            self.count(dense.nbytes)
            return dense
        self.count(tensor.codes.nbytes)
        return tensor


def _read_quantized(tensors: Any, name: str) -> QuantizedWeight | None:
    is_ours = isinstance(tensors, GgufTensors | QuantizedTensors)
    return tensors.get_quantized(name) if is_ours else None


def open_checkpoint(model_dir: Path, schemes: Schemes = ()) -> Checkpoint:
    """Find the weight files and read their headers, which shows whether a file is truncated.

    schemes: how weights are quantized, if they are. Raises BadCheckpoint or UnsupportedModel,
    naming the file.
    """
    files = list(split_files(model_dir)) if is_gguf(model_dir) else _weight_files(model_dir)
    stored: dict[str, StoredTensor] = {}
    is_multimodal = False
    for file in files:
        with _open(file) as tensors:
            is_multimodal |= isinstance(tensors, _TextTensors)
            for tensor in describe(file, tensors):
                if (other := stored.setdefault(tensor.name, tensor)) is not tensor:
                    raise BadCheckpoint(f"{file}: {tensor.name} is also in {other.file.name}")
    if not (schemes or is_gguf(model_dir)):
        _refuse_codes(stored.values())
    weights = find_weights(schemes, stored) if schemes else {}
    unused = [name for weight in weights.values() for name in weight.unused]
    file_of = dense_names(stored, weights)
    if is_multimodal:
        unused += [name for name in file_of if not name.startswith(_TEXT_PARTS)]
        file_of = {name: file_of[name] for name in file_of if name.startswith(_TEXT_PARTS)}
    labels = [weight.scheme.label for weight in weights.values()]
    types = [tensor.type for tensor in stored.values() if len(tensor.shape) > 1]
    [(stored_as, _)] = Counter(labels or types).most_common(1) or [("none", 0)]
    is_quantized = stored_as not in (*FLOATS, "F64")
    return Checkpoint(tuple(files), file_of, weights, unused, stored_as, is_quantized)


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


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    """As `Checkpoint.open`, but with tensors under their stored names."""
    if is_gguf(file):
        yield gguf_tensors(file)
        return
    try:
        with safe_open(file, framework="pt") as tensors:
            is_plain = not any(_TEXT_MODEL in name for name in tensors.keys())  # noqa: SIM118
            yield tensors if is_plain else _TextTensors(file, tensors)
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{file} is truncated or damaged: {error}") from error


class _TextTensors:
    """The tensors of an open file of a multimodal model, with the methods of `safe_open`. Those of
    the text model have the names that they would have without the other parts."""

    def __init__(self, file: Path, tensors: Any) -> None:
        self._tensors = tensors
        names = list(tensors.keys())
        self._stored = {_text_name(name): name for name in names}
        if len(self._stored) < len(names):
            raise BadCheckpoint(f"{file}: two tensors have the same name without {_TEXT_MODEL!r}")

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return list(self._stored)

    def get_slice(self, name: str) -> Any:
        """A tensor that is read when it is indexed."""
        return self._tensors.get_slice(self._stored[name])

    def get_tensor(self, name: str) -> Tensor:
        """Read a tensor."""
        tensor: Tensor = self._tensors.get_tensor(self._stored[name])
        return tensor


def _text_name(name: str) -> str:
    """The name of a tensor in the text model alone, such as `model.norm.weight` of
    `language_model.model.norm.weight` and `model.language_model.norm.weight`."""
    outer, found, inner = name.partition(_TEXT_MODEL)
    if not found or outer not in ("", "model."):
        return name
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


def has_own_head(model: type[NativeModel], checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint holds an LM head that differs from the embedding, or may differ
    because one of them is quantized or has another dtype."""
    sources = checkpoint.sources(model)
    names = {sources.get(name, "") for name in (model.embedding_name, "lm_head.weight")}
    if "" in names or not names <= checkpoint.dense_names():
        return "" not in names
    with checkpoint.reader() as read:
        first, second = (read(name) for name in names)
        assert isinstance(first, Tensor), "it is dense"
        assert isinstance(second, Tensor), "it is dense"
        return first.dtype != second.dtype or not torch.equal(first, second)


def warn_of_unused(checkpoint: Checkpoint) -> None:
    """Log the tensors and files of a checkpoint that are not read."""
    if checkpoint.unused:
        logger.warning(
            "tensors not used num=%d names=%s", len(checkpoint.unused), _listed(checkpoint.unused)
        )
    if is_gguf(checkpoint.files[0]):
        for key in unread_settings(checkpoint.files[0]):
            logger.warning("%s: %s is not used", checkpoint.files[0], key)
        return
    found = {file.name for file in checkpoint.files[0].parent.glob("*.safetensors")}
    others = sorted(found - {file.name for file in checkpoint.files})
    others = [name for name in others if not name.startswith(_SAME_WEIGHTS)]
    if others:
        logger.warning("weight files not read num=%d names=%s", len(others), _listed(others))


def load_weights(
    model: LoadableModule,
    checkpoint: Checkpoint,
    *,
    others: Container[str] = (),
    on_filled: OnFilled = lambda weight: None,
    progress: LoadProgress | None = None,
) -> int:
    """Fill the model's targets from the checkpoint. Returns the number of bytes read.

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
    wanted.sort(
        key=lambda entry: (_num_layer_bytes(entry[1]), -places[checkpoint.file_of[entry[0]]])
    )
    num_bytes = sum(weight.target.nbytes for _, weight in wanted)
    phase = (progress or LoadProgress(show_bar=False)).phase("loading weights", num_bytes)
    with phase as advance, checkpoint.reader() as reader:
        while wanted:
            name, weight = wanted.pop()
            _fill(reader, name, weight, model)
            advance(weight.target.nbytes)
            on_filled(weight)
        return reader.num_bytes


def _num_layer_bytes(weight: WeightTarget) -> int:
    """Bytes of all targets that are packed together: they are views of one tensor."""
    return weight.target.untyped_storage().nbytes()


def _fill(reader: Reader, name: str, weight: WeightTarget, model: LoadableModule) -> None:
    """Fill one target; a large dense tensor some rows at a time, so that little of it is mapped.

    If `--quantization` applies, each of these slices is quantized when it is read, so that the
    whole dense tensor is never in memory.
    """
    tensors, target = reader.tensors_of(name), weight.target
    if weight.keep is not None and (quantized := _read_quantized(tensors, name)) is not None:
        weight.keep(weight.part_of(quantized))
        reader.count(quantized.codes.nbytes)
        return
    # None: indexing reads only that part.
    is_quantized = getattr(tensors.get_slice(name), "is_quantized", None)
    if is_quantized:
        model.dequantized["the format has no groups of whole numbers"] += target.nbytes
    if is_quantized is not None or target.dim() != 2 or target.nbytes <= _MAX_MAPPED_BYTES:
        part = tensors.get_slice(name)[weight.source_index or ...]
        target.copy_(part)
        reader.count(part.nbytes)
    elif weight.rounding is None or weight.keep is None:
        for rows, part in _read_by_rows(reader, name, weight):
            target[rows].copy_(part)
    else:
        parts = (part.to(target.dtype) for _, part in _read_by_rows(reader, name, weight))
        rounded = (round_weight(part, weight.rounding) for part in parts)
        weight.keep(assemble(rounded, target.shape[0]))


def _read_by_rows(
    reader: Reader, name: str, weight: WeightTarget
) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of the target's rows, and the tensor's content for each."""
    num_rows = weight.target.shape[0]
    step = max(1, _MAX_MAPPED_BYTES * num_rows // weight.target.nbytes)
    shard = weight.shard or Shard.full(weight.source_shape[weight.axis])
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        columns = slice(None)
        if weight.axis == 0:
            rows_read = slice(shard.start + rows.start, shard.start + rows.stop)
        else:
            rows_read, columns = rows, slice(shard.start, shard.start + shard.size)
        part = reader.tensors_of(name).get_slice(name)[rows_read, columns]
        reader.count(part.nbytes)
        yield rows, part


def _check_names(
    model: LoadableModule,
    checkpoint: Checkpoint,
    targets: Mapping[str, list[WeightTarget]],
    sources: Mapping[str, str],
    others: Container[str],
) -> None:
    missing = [name for name in targets if name not in sources]
    unknown = [name for name in sources if name not in targets and name not in others]
    unexpected = [
        name
        for name in unknown
        if not model.optional_names.fullmatch(name) and not checkpoint.is_empty_bias(sources[name])
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
    wrong = []
    with ExitStack() as files:
        tensors = checkpoint.tensors(files)
        for name, weight in wanted:
            found, expected = tensors[name].get_shape(), weight.source_shape
            if found != expected:
                wrong.append(f"{name} is {found}, expected {expected}")
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
            weight.target.copy_(values[weight.source_index])
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
                setattr(attention, attribute, _read_scale(checkpoint, found[0]))
                num_found += 1
    logger.info("kv scales num_layers=%d num_found=%d others=1.0", num_layers, num_found)


def _read_scale(checkpoint: Checkpoint, name: str) -> float:
    with checkpoint.open(checkpoint.file_of[name]) as tensors:
        tensor = tensors.get_tensor(name)
    scale = float(tensor) if tensor.numel() == 1 else 0.0
    if not 0.0 < scale < float("inf"):
        raise BadCheckpoint(
            f"{checkpoint.file_of[name]}: {name}: expected one positive number, got"
            f" {_listed([str(number) for number in tensor.flatten().tolist()])}"
        )
    return scale


class EagerPacking:
    """Packs linear layers while weights are loaded. To be called with each target once it is
    filled."""

    def __init__(self, model: LoadableModule) -> None:
        self._num_missing = Counter(_memory_of(weight.target) for weight in model.weight_targets())
        self._linears: dict[int, list[Linear]] = defaultdict(list)
        """By the address of the weight's memory, which a tied head shares with the embedding."""
        for module in model.modules():
            if isinstance(module, Linear) and module.weight is not None:
                self._linears[_memory_of(module.weight)].append(module)

    def __call__(self, weight: WeightTarget) -> None:
        """Pack the layers whose weight this target has completed."""
        memory = _memory_of(weight.target)
        self._num_missing[memory] -= 1
        if self._num_missing[memory] == 0:
            for linear in self._linears.pop(memory, ()):
                linear.pack()


def _memory_of(tensor: Tensor) -> int:
    """The address of the tensor's storage, which is the same for all views of it."""
    return tensor.untyped_storage().data_ptr()
