"""The adapters of a step's rows, and what they add to the products of linear layers.

A layer computes the product of all rows with its own weight, as without adapters; what an adapter
adds is computed for its rows alone, in float32. So a row has the same bits alone, beside rows of
the base, and beside those of other adapters; and a step without adapters computes nothing more.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import AdapterRows
from worker_service.adapters.lora import LoraAdapter, LoraModule
from worker_service.adapters.store import AdapterStore
from worker_service.errors import BadAdapter, InvalidOption, InvalidPlan
from worker_service.models.linear import Linear, LinearPart, PackedWeight, can_pack, pack
from worker_service.models.native import NativeModel


class _Product:
    """x @ weight.T in float32, whose rows do not depend on each other."""

    def __init__(self, weight: Tensor) -> None:
        weight = weight.float().contiguous()
        self._packed: PackedWeight | None = None
        self._weight = weight
        if can_pack(weight.dtype, weight.device):
            self._packed = pack(weight)

    def __call__(self, rows: Tensor) -> Tensor:
        if self._packed is not None:
            return self._packed.apply(rows)
        return nn.functional.linear(rows, self._weight)


class _PartDelta(NamedTuple):
    """What an adapter adds to some outputs of a layer."""

    ranks: slice
    """Its columns of the products with all A."""

    b: _Product
    scale: float
    outputs: slice


class Delta:
    """What an adapter adds to the outputs of a layer, which may be a stack of several layers."""

    def __init__(self, parts: Sequence[tuple[LinearPart, LoraModule]]) -> None:
        all_a, self._parts, first = [], [], 0
        for part, module in parts:
            all_a.append(module.a[:, part.inputs])
            b, ranks = part.rows_of(module.b), slice(first, first + module.rank)
            self._parts.append(_PartDelta(ranks, _Product(b), module.scale, part.outputs))
            first += module.rank
        self._a = _Product(torch.cat(all_a))

    def add_to(self, y: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Add to some rows of the product `y` of `x`; None: to all."""
        chosen = x if rows is None else x[rows]
        inner = self._a(chosen.float())
        for ranks, b, scale, outputs in self._parts:
            added = b(inner[:, ranks].contiguous()).mul_(scale)
            if rows is None:
                y[:, outputs].add_(added)
            else:
                y[rows, outputs] = (y[rows, outputs] + added).to(y.dtype)


class LayerAdapters:
    """The adapters of one linear layer. Implements `linear.Additions`."""

    def __init__(self, active: list[AdapterRows]) -> None:
        """active: those of the present step, which all layers share."""
        self._active = active
        self.deltas: dict[bytes, Delta] = {}
        """By digest, of the adapters in slots that change this layer."""

    def active(self) -> Iterator[tuple[Delta, Tensor | None]]:
        """The adapters of the present step that change this layer, and their rows."""
        for digest, rows in self._active:
            if (delta := self.deltas.get(digest)) is not None:
                yield delta, rows


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module of the checkpoint is in the model."""

    layer: Linear
    part: LinearPart


class AdapterSlots:
    """The adapters of a native model that its layers hold, ready for steps.

    `require` and `activate` belong to the model thread; `check` may be called on any.
    """

    def __init__(
        self, model: NativeModel, store: AdapterStore[LoraAdapter], max_slots: int, max_rank: int
    ) -> None:
        self._store, self._max_slots, self._max_rank = store, max_slots, max_rank
        self._model = model
        self._active: list[AdapterRows] = []
        self._places: dict[str, list[_Place]] = {}
        self._layers: dict[Linear, LayerAdapters] = {}
        self._slots: dict[bytes, None] = {}
        """Digests, the least recently used first."""
        for layer in model.layers.modules():
            if not isinstance(layer, Linear):
                continue
            layer.additions = self._layers[layer] = LayerAdapters(self._active)
            for name, part in layer.parts():
                self._places.setdefault(name, []).append(_Place(layer, part))

    def check(self, adapter: LoraAdapter) -> None:
        """Raise BadAdapter unless every module of an adapter is a linear layer of the model, of its
        shape, and within the limit of ranks."""
        for name, module in adapter.modules.items():
            if module.rank > self._max_rank:
                expected = f"at most {self._max_rank}, --max-lora-rank"
                raise BadAdapter(f"r: expected {expected}, got {module.rank} of {name}")
            places = self._places_of(name)
            if not places and not self._is_elsewhere(name):
                kinds = sorted({known.rpartition(".")[2] for known in self._places})
                raise BadAdapter(
                    f"target_modules: expected linear layers of {self._model.architecture}, which"
                    f" has {', '.join(kinds)}, got {name!r}"
                )
            for place in places:
                expected_shape = place.part.source_shape
                got = [module.b.shape[0], module.a.shape[1]]
                if got != expected_shape:
                    raise BadAdapter(f"{name}: expected a weight of {expected_shape}, got {got}")

    def _places_of(self, name: str) -> Sequence[_Place]:
        return self._places.get(self._canonical(name), ())

    def _canonical(self, name: str) -> str:
        return self._model.canonical_name(f"{name}.weight").removesuffix(".weight")

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a module is in a layer of another pipeline stage, which checks it. Layers differ:
        this stage does not know which modules that one has."""
        layers = re.escape(self._model.layers_name)
        match = re.fullmatch(rf"{layers}\.(\d+)\..+", self._canonical(name))
        here = {int(name.rpartition(".")[2]) for name, _ in self._model.named_layers()}
        return match is not None and int(match[1]) in {*range(self._model.num_layers)} - here

    def activate(self, rows: Sequence[AdapterRows]) -> None:
        """Let the layers compute these adapters in the next forward pass; none ends that.

        Raises InvalidPlan if they exceed the slots.
        """
        self._active.clear()
        if not rows:
            return
        if len(rows) > self._max_slots:
            problem = f"expected at most {self._max_slots} adapters in a step, --max-loras"
            raise InvalidPlan("seq_ids", f"{problem}, got {len(rows)}")
        for digest, _ in rows:
            if digest not in self._slots:
                self._fill_slot(digest, {digest for digest, _ in rows})
            self._slots[digest] = self._slots.pop(digest, None)
        self._active.extend(rows)

    def _fill_slot(self, digest: bytes, needed: set[bytes]) -> None:
        adapter = self._store.get(digest)
        if len(self._slots) >= self._max_slots:
            evicted = next(slot for slot in self._slots if slot not in needed)
            del self._slots[evicted]
            for additions in self._layers.values():
                additions.deltas.pop(evicted, None)
        for layer, parts in self._by_layer(adapter.modules).items():
            self._layers[layer].deltas[digest] = Delta(parts)
        self._slots[digest] = None

    def _by_layer(
        self, modules: Mapping[str, LoraModule]
    ) -> dict[Linear, list[tuple[LinearPart, LoraModule]]]:
        found: dict[Linear, list[tuple[LinearPart, LoraModule]]] = {}
        for name in sorted(modules):
            for place in self._places_of(name):
                found.setdefault(place.layer, []).append((place.part, modules[name]))
        return found


def require_native(model: object, device: torch.device) -> NativeModel:
    """The model, if it computes adapters. Raises InvalidOption."""
    if not isinstance(model, NativeModel):
        architecture = getattr(model, "architecture", type(model).__name__)
        problem = f"{architecture} runs through transformers"
        raise InvalidOption(f"enable_lora: expected a native model, {problem}")
    if device.type != "cpu":
        raise InvalidOption(f"enable_lora: expected a CPU, got {device}")
    return model
