"""Fills the tensors of a model from a checkpoint, or with dummy weights.

A linear layer is packed as soon as its weight is complete, and its original is freed while it is
packed. The largest layers come first, so that the temporary memory of packing is needed while few
packed weights exist: the peak is hardly more than the packed model.
"""

import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from pagewire_kernels.quantized_weight import assemble
from worker_service.distributed.layout import Shard
from worker_service.errors import BadCheckpoint
from worker_service.gguf.header import is_gguf
from worker_service.load_progress import LoadProgress
from worker_service.loader.tensors import MAX_MAPPED_BYTES, CheckpointTensor, StoredTensor
from worker_service.loader.weights.checkpoint import Checkpoint, listed, log_unused
from worker_service.models.interface import WeightTarget
from worker_service.models.linear.packing import Packable, round_weight
from worker_service.models.native import LoadableModule

logger = logging.getLogger(__name__)

Wanted = tuple[CheckpointTensor, WeightTarget]
"""A tensor, and a target that it fills."""

OnFilled = Callable[[WeightTarget], None]


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
        log_unused(by_none)
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
        faults.append(f"missing tensors: {listed(missing)}")
    if unexpected:
        faults.append(f"unexpected tensors: {listed(unexpected)}")
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
        raise BadCheckpoint(f"weights do not fit {source}: {listed(wrong)}")


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
