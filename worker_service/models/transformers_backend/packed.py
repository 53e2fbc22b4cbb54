"""Layers of a `transformers` model with packed weights, which are filled one at a time.

Linear layers, gated experts and the token embedding use weights in the layout of our kernels, dense
or quantized. `Packing` removes these weights from a model on the meta device, so that
`transformers` loads only the others, and packs each of them as soon as it is read. The peak memory
is therefore that of the packed model and one tensor.

Weights that are left to `transformers`, such as tensors that it splits or transposes, are packed
after loading.
"""

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from pagewire_kernels.cpu.adapters import ActiveRows, NativeDeltas
from pagewire_kernels.cpu.linear import NativeWeight
from pagewire_kernels.quantized_weight import QuantizedWeight, stack
from worker_service.errors import BadCheckpoint
from worker_service.models.interface import ModelContext
from worker_service.models.linear.additions import Additions, LinearPart
from worker_service.models.linear.packing import (
    PackedTable,
    PackedWeight,
    can_pack,
    can_pack_codes,
    can_stack,
    pack,
    pack_codes,
    refuse_quantized_rows,
    round_weight,
)
from worker_service.models.linear.vocabulary import HEAD_ROUNDING
from worker_service.models.transformers_backend.plain_linear import whole_part

logger = logging.getLogger(__name__)

Read = Callable[[str], Tensor | QuantizedWeight]
"""Reads a tensor of the checkpoint without dequantizing it."""

Sources = dict[str, tuple[list[tuple[str, int]], list[list[str]]]]
"""By parameter: the operations of `transformers` that produce it, and their input tensors: a list
for each place in the stack of outputs, with a tensor for each expert."""

Tables = dict[Tensor, PackedTable]
"""The packed tables of embeddings, by their placeholder `weight`."""

_JOINS = {2: [("Concatenate", 0)], 3: [("MergeModulelist", 0), ("Concatenate", 1)]}
"""The operations of `transformers` that stack outputs, by the dimensions of the result."""

_EXPERT = re.compile(r"(.*\.)\d+(\.[^.]+\.weight)")
"""The name of a tensor that belongs to one of several experts."""

_EXPERT_PARTS = ("gate_up_proj", "down_proj")

_ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Modules that select or weight experts; they are small, and not quantized."""

_MAX_NAMES = 4
"""Maximum number of tensors named in the log."""


class PackedLinear(nn.Module):
    """An `nn.Linear` whose weight is packed.

    Its `weight` has shape and dtype, for code that reads them, but no content. Once the layer is
    filled, products with it are NaN, which a trial run finds; until then it is on the meta device,
    where what initializes weights may write.
    """

    packed: PackedWeight
    name: str
    """Of the module in the model."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.additions: Additions | None = None
        """What adapters add to the product."""

        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = _outline(linear.weight)
        self.bias = linear.bias

    def fill(self, packed: PackedWeight) -> None:
        """Set the weight."""
        self.packed = packed
        self.weight = _outline(self.weight, "cpu")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        deltas = None if self.additions is None else self.additions.of_step()
        if deltas is None:
            product = self.packed.apply(rows, self.bias)
        else:
            assert isinstance(self.packed, NativeWeight), "it has made them"
            product = self.packed.apply(rows, self.bias, deltas=deltas)
        return product.view(*x.shape[:-1], self.out_features)

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """As `linear.Linear.parts`."""
        yield self.name, whole_part(self)

    def make_deltas(self, rows: ActiveRows, max_slots: int, max_rank: int) -> NativeDeltas | None:
        """As `linear.Linear.make_deltas`."""
        assert isinstance(self.packed, NativeWeight), "it is packed for a CPU"
        return self.packed.make_deltas(rows, max_slots, 1, max_rank)

    def norms(self, outputs: slice, a: Tensor, b: Tensor) -> Tensor:
        """As `linear.Linear.norms`."""
        assert isinstance(self.packed, NativeWeight), "it is packed for a CPU"
        return self.packed.norms(outputs.start, a, b)


class PackedExperts(nn.Module):
    """The experts of a mixture-of-experts layer, each with its own packed weights.

    The result of a token is the sum over its experts in order of their indices, so that it does not
    depend on the other tokens of these experts.
    """

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self._apply_gate = experts._apply_gate  # keeps the module, and what its gate needs, alive
        self._num_experts = len(experts.down_proj)
        self.packed: dict[str, dict[int, PackedWeight]] = {"gate_up_proj": {}, "down_proj": {}}
        """By the name of the library's parameter, then by expert."""

        experts.gate_up_proj = experts.down_proj = None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states: [num_tokens, hidden_size]; the others: [num_tokens, top_k]."""
        output = torch.zeros_like(hidden_states)
        gate_up, down = self.packed["gate_up_proj"], self.packed["down_proj"]
        for expert in torch.unique(top_k_index).tolist():
            if expert >= self._num_experts:  # how some routers mark an unused choice
                continue
            token, place = torch.where(top_k_index == expert)
            rows, weights = hidden_states[token], top_k_weights[token, place, None]
            inner = self._apply_gate(gate_up[expert].apply(rows))
            result = down[expert].apply(inner) * weights
            output.index_add_(0, token, result.to(output.dtype))
        return output


def _is_plain(module: nn.Module) -> bool:
    return type(module) is nn.Linear or _is_experts(module)


def _remove_weight(embedding: Any, device: str = "meta") -> None:
    """device: where the embedding is, to which models may copy token ids."""
    weight = _outline(embedding.weight, device)
    del embedding.weight
    embedding.weight = weight


def _outline(weight: Tensor, device: str = "meta") -> Tensor:
    """A placeholder with the shape of a weight: a single NaN. It is no parameter, so that
    `transformers` does not expect it in a checkpoint."""
    return torch.full((), torch.nan, dtype=weight.dtype, device=device).expand(weight.shape)


def _is_experts(module: nn.Module) -> bool:
    """Whether the module follows `transformers`' convention for gated experts, without biases."""
    others = (getattr(module, name, False) for name in ("has_post_expert_norm", "has_bias"))
    gated = getattr(module, "has_gate", False) and not any(others)
    return gated and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj")


def _replace(model: Any, name: str) -> Any:
    """Replace a linear layer or experts by a packed module, which is returned."""
    module = model.get_submodule(name)
    replacement = (PackedLinear if isinstance(module, nn.Linear) else PackedExperts)(module)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)
    return replacement


class Packing:
    """Packs the weights of one model.

    Only modules of exactly torch's `Linear` are replaced: a subclass may compute something else.
    """

    def __init__(self, outline: Any, context: ModelContext) -> None:
        """outline: the model without memory."""
        self._context = context
        self._outline = outline
        self._weights: Mapping[str, Tensor] = outline.state_dict()
        self._tied: Mapping[str, str] = dict(outline.all_tied_weights_keys)
        names = {module: name for name, module in outline.named_modules()}
        self._embedding = f"{names[outline.get_input_embeddings()]}.weight"
        self._head = f"{names.get(outline.get_output_embeddings())}.weight"
        self._stacks: dict[str, list[tuple[str, ...]]] = {}
        """By parameter: for each packed weight, the tensors that it stacks."""

        self._sizes: dict[str, int] = {}
        """Number of elements of the tensors that are quantized in the checkpoint."""

        self._dequantized: set[str] = set()
        self.unused: set[str] = set()
        """Tensors that belong to no parameter."""

        self.tables: Tables = {}

    def plan(self, tensors: Mapping[str, Any], source: Path) -> dict[str, Any]:
        """Choose the tensors that are packed while loading. Returns those left to `transformers`.

        tensors: by name, read when they are indexed; source: their file or folder. Raises
        BadCheckpoint if a tensor of an expert is missing or has another shape; errors of
        `transformers` do not name it.
        """
        quantized = {n: t for n, t in tensors.items() if t.is_quantized}
        self._sizes = {name: prod(tensor.shape) for name, tensor in quantized.items()}
        sources = self._sources(tensors)
        unknown = sources.keys() - self._weights.keys()
        self.unused = {name for target in unknown for names in sources[target][1] for name in names}
        self._check_experts(tensors, sources, source)
        self._warn_of_untied(tensors, sources)
        if not can_pack(self._context.dtype, self._context.device):
            sources = {}
        for target, (operations, columns) in sources.items():
            stacks = list(zip(*columns, strict=False))
            if self._is_packable(target, operations) and all(
                self._fits(target, [tensors[name].shape for name in names], columns)
                for names in stacks
            ):
                self._stacks[target] = stacks
        for target in list(self._stacks):
            module, _, part = target.rpartition(".")
            parts = _EXPERT_PARTS if part in _EXPERT_PARTS else (part,)
            tied = {t: s for t, s in self._tied.items() if target in (t, s)}
            alone = any(t in sources and s not in sources for t, s in tied.items())
            is_complete = all(f"{module}.{stacked}" in self._stacks for stacked in parts)
            if not is_complete or alone or not all(map(self._is_linear, tied)):
                del self._stacks[target]
        planned = {name for stacks in self._stacks.values() for names in stacks for name in names}
        remaining = {name: tensor for name, tensor in tensors.items() if name not in planned}
        self._dequantized = self._sizes.keys() & remaining.keys()
        return remaining

    def _warn_of_untied(self, tensors: Mapping[str, Any], sources: Sources) -> None:
        """Log parameters that should be tied but are stored with different numbers, which stay
        apart, as in `transformers`."""
        for names in self._tied.items():
            stored = [sources[name][1][0][0] for name in names if name in sources]
            is_codes = any(name in self._sizes for name in stored)
            if len(stored) == 2 and (
                is_codes or not torch.equal(*(tensors[name][...].float() for name in stored))
            ):
                logger.warning(
                    "config.json ties %s to %s, but both are stored and differ: both are used",
                    *stored,
                )

    def _check_experts(self, tensors: Mapping[str, Any], sources: Sources, source: Path) -> None:
        """Raise BadCheckpoint, naming tensors of experts that are missing or of other shapes."""
        missing, misshapen = [], []
        for target, (operations, columns) in sources.items():
            stacks_experts = operations and operations == _JOINS[3][: len(operations)]
            if target not in self._weights or not stacks_experts:
                continue
            num_experts, rows, inputs = self._weights[target].shape
            expected = [rows // len(columns), inputs]
            for column in columns:
                example = _EXPERT.fullmatch(column[0]) if column else None
                if example is not None:
                    names = [f"{example[1]}{i}{example[2]}" for i in range(num_experts)]
                    missing += [name for name in names if name not in tensors]
                elif not column:
                    missing.append(f"those of a part of {target}")
                shapes = ((name, tensors[name].shape) for name in column)
                misshapen += [
                    f"{name} is {shape}, expected {expected}"
                    for name, shape in shapes
                    if shape != expected
                ]
        faults = {"missing tensors": missing, "misshapen tensors": misshapen}
        found = [f"{kind}: {', '.join(of[:_MAX_NAMES])}" for kind, of in faults.items() if of]
        if found:
            architecture = type(self._outline).__name__
            raise BadCheckpoint(f"{source}: weights do not fit {architecture}: {'; '.join(found)}")

    def _sources(self, tensors: Mapping[str, Any]) -> Sources:
        """The tensors from which `transformers` makes each parameter."""
        conversions = get_model_conversion_mapping(self._outline)
        renamings = [
            conversion for conversion in conversions if isinstance(conversion, WeightRenaming)
        ]
        converters = [
            conversion for conversion in conversions if isinstance(conversion, WeightConverter)
        ]
        prefix = self._outline.base_model_prefix
        found: dict[str, dict[str | None, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name in sorted(tensors, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self._weights)
            found[target][pattern].append(name)
        sources = {}
        for target, by_pattern in found.items():
            operations, columns = [], list(by_pattern.values())
            for converter in converters:
                if not by_pattern.keys().isdisjoint(converter.source_patterns):
                    columns = [by_pattern[pattern] for pattern in converter.source_patterns]
                    is_plain = len(converter.target_patterns) == 1
                    operations = [
                        (type(op).__name__ if is_plain else "", getattr(op, "dim", -1))
                        for op in converter.operations
                    ]
            sources[target] = operations, columns
        return sources

    def _is_linear(self, target: str) -> bool:
        module = self._outline.get_submodule(target.rpartition(".")[0])
        return type(module) is nn.Linear and target.endswith(".weight")

    def _is_packable(self, target: str, operations: list[tuple[str, int]]) -> bool:
        if target not in self._weights:
            return False
        joins = _JOINS.get(self._weights[target].dim(), [])
        if operations != joins[: len(operations)]:
            return False
        owner, _, part = target.rpartition(".")
        keeps_float32 = self._outline._keep_in_fp32_modules_strict
        if self._is_linear(target):
            return not any(name in owner for name in keeps_float32)
        if target == self._embedding:
            return isinstance(self._outline.get_input_embeddings(), nn.Embedding)
        module = self._outline.get_submodule(owner)
        is_plain = _is_experts(module) and not module.is_transposed
        return bool(operations) and is_plain and part in _EXPERT_PARTS

    def _fits(self, target: str, shapes: list[list[int]], columns: list[list[str]]) -> bool:
        """Whether the tensors of each stack, one for each expert, form the shape of the
        parameter."""
        *num_experts, rows, inputs = self._weights[target].shape
        return (
            {len(column) for column in columns} == set(num_experts or [1])
            and all(len(shape) == 2 and shape[1] == inputs for shape in shapes)
            and sum(shape[0] for shape in shapes) == rows
        )

    def remove_weights(self, model: Any) -> None:
        """Replace modules of a model on the meta device, so that `transformers` no longer expects
        their weights in a checkpoint."""
        for target, source in self._tied.items():
            if target in self._stacks or source in self._stacks:
                model.all_tied_weights_keys.pop(target)
        for target in {*self._stacks, *self._shared()}:
            name = target.rpartition(".")[0]
            module = model.get_submodule(name)
            if target == self._embedding:
                _remove_weight(module)
            elif not isinstance(module, PackedExperts):
                _replace(model, name)

    def _shared(self) -> list[str]:
        """Weights of linear layers that are tied to the packed table of the embedding."""
        return [t for t, s in self._tied.items() if s in self._stacks and t not in self._stacks]

    def fill(self, model: Any, read: Read) -> None:
        """Read and pack the planned tensors, and pack those that `transformers` has loaded."""
        for target, stacks in self._stacks.items():
            name, _, part = target.rpartition(".")
            owner = model.get_submodule(name)
            for i, names in enumerate(stacks):
                packed = self._pack(target, names, read)
                if isinstance(owner, PackedExperts):
                    owner.packed[part][i] = packed
                elif isinstance(owner, PackedLinear):
                    owner.fill(packed)
                else:
                    assert isinstance(packed, PackedTable)
                    _remove_weight(owner, "cpu")
                    self.tables[owner.weight] = packed
                    for tied in self._shared():
                        model.get_submodule(tied.rpartition(".")[0]).fill(packed)
        if self._dequantized:
            first = sorted(self._dequantized, key=dot_natural_key)[:_MAX_NAMES]
            logger.info(
                "weights dequantized num_tensors=%d num_bytes=%d names=%s",
                len(self._dequantized),
                sum(self._sizes[name] for name in self._dequantized) * self._context.dtype.itemsize,
                ", ".join(first),
            )
        self.pack_rest(model)

    def _pack(self, target: str, names: Sequence[str], read: Read) -> PackedWeight:
        parts = [read(name) for name in names]
        kept = [part for part in parts if isinstance(part, QuantizedWeight)]
        if target == self._embedding:
            kept = [part.in_order() for part in kept]
        if len(kept) == len(parts) and can_stack(kept):
            codes = stack(kept)
            if can_pack_codes(codes, self._context):
                return pack_codes(codes, self._context)
        refuse_quantized_rows(parts, names)
        self._dequantized.update(self._sizes.keys() & set(names))
        dense = [
            (p if isinstance(p, Tensor) else p.dequantize()).to(self._context.dtype) for p in parts
        ]
        return self._pack_dense(target, dense[0] if len(dense) == 1 else torch.cat(dense))

    def roundings(self) -> dict[str, str]:
        """The formats to which dense tensors are quantized, by name."""
        found = {target: self._rounding(target) for target in self._stacks}
        return {
            name: to
            for target, to in found.items()
            if to is not None
            for names in self._stacks[target]
            for name in names
        }

    def _rounding(self, target: str) -> str | None:
        """The format to which a parameter is quantized. The LM head has 8 bits; routers, and
        embeddings that are not tied to a head, are not quantized."""
        quantization = self._context.quantization
        if target == self._head or target in self._tied.values():
            return quantization and HEAD_ROUNDING
        is_rounded = target != self._embedding and _ROUTERS.isdisjoint(target.split("."))
        return quantization if is_rounded else None

    def _pack_dense(self, target: str, weight: Tensor) -> PackedWeight:
        rounding = self._rounding(target)
        if rounding is None:
            return pack(weight)
        return pack_codes(round_weight(weight, rounding), self._context)

    def pack_rest(self, model: Any) -> None:
        """Pack the weights that `transformers` has loaded, if this machine has packed products."""
        embedding = model.get_input_embeddings()
        names = [name for name, module in model.named_modules() if _is_plain(module)]
        for name in names:
            module = model.get_submodule(name)
            if isinstance(module, nn.Linear):
                self._pack_linear(model, name, module.weight, embedding)
                continue
            if can_pack(module.down_proj.dtype, module.down_proj.device):
                weights = {part: getattr(module, part).detach() for part in _EXPERT_PARTS}
                is_transposed = module.is_transposed
                packed = _replace(model, name).packed
                for part, stacked in weights.items():
                    for i, weight in enumerate(stacked.mT if is_transposed else stacked):
                        packed[part][i] = self._pack_dense(f"{name}.{part}", weight)

    def _pack_linear(self, model: Any, name: str, weight: Tensor, embedding: Any) -> None:
        if not can_pack(weight.dtype, weight.device):
            return
        packed = self._pack_dense(f"{name}.weight", weight.detach())
        _replace(model, name).fill(packed)
        if embedding.weight is weight and isinstance(packed, PackedTable):
            _remove_weight(embedding, "cpu")
            self.tables[embedding.weight] = packed
