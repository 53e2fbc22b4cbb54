"""The adapters of a step's rows, and what they add to the products of linear layers.

A layer sums the products of all rows with its own weight, as without adapters. What an adapter adds
is computed for its rows alone, in float32, and added to these sums. So a row has the same bits
alone, beside rows of the base, and beside those of other adapters; and a step without adapters
computes nothing more.
"""

import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pagewire_kernels.batch import AdapterRows, RowAdapters, StepBatch
from pagewire_kernels.cpu.adapters import ActiveRows, DeltaPart, NativeDeltas, PackedDelta
from pagewire_kernels.cpu.linear import PAGE_BYTES, HugeMemory
from pagewire_kernels.slot_deltas import NO_SLOT, PackedSlot, SlotDeltas
from worker_service.adapters.peft_format import STACKS, LoraModule, ModelAdapter
from worker_service.adapters.store import AdapterStore
from worker_service.errors import BadAdapter, InvalidOption, InvalidPlan
from worker_service.models.feed_forward.experts import ExpertProduct, ExpertWeights
from worker_service.models.linear.additions import AdaptableLayer, LinearPart, ScalableLayer
from worker_service.models.linear.linear import Linear
from worker_service.models.linear.vocabulary import VocabEmbedding
from worker_service.models.mixers.latent_attention import Expansion
from worker_service.models.native import ActivatesAdapters, NativeModel

_OF_FIRST = re.compile(
    r"model\.(?:project_in|embed_tokens_per_layer|per_layer_model_projection|altup_projections\.\d+)"
)
_OF_LAST = re.compile(r"model\.(?:project_out|altup_unembed_projections\.\d+)|lm_head")
"""Modules of the first and the last pipeline stage."""


class _Step:
    """The adapters of the rows that some layers compute in the present step."""

    def __init__(self) -> None:
        self.adapters: Sequence[AdapterRows] = ()
        self.native_rows = ActiveRows()
        self.slots: Tensor | None = None
        """On a GPU: int32 [num_rows], see `RowAdapters`."""
        self.is_active = False
        """Whether the layers are ready for rows with adapters, even if the step has none."""

    def set(self, adapters: Sequence[AdapterRows], slots: Sequence[int], num_rows: int) -> None:
        """slots: of the adapters; num_rows: with and without one."""
        every = torch.arange(num_rows)
        chosen = [every if rows is None else rows for _, rows in adapters]
        self.native_rows.set(slots, chosen, num_rows)
        self.adapters, self.is_active = adapters, True

    def set_slots(self, slots: Tensor) -> None:
        """As `set`, on a GPU."""
        self.slots, self.is_active = slots, True

    def clear(self) -> None:
        """Let the layers compute no adapters."""
        self.adapters, self.slots, self.is_active = (), None, False


class LayerDelta(NamedTuple):
    """What an adapter adds to one layer."""

    modules: Sequence[tuple[LinearPart, LoraModule]]
    packed: PackedDelta | PackedSlot | None
    """As the kernels read it; None if torch multiplies the layer on a CPU."""


class LayerAdapters:
    """The adapters of one layer. Implements `linear.Additions`."""

    def __init__(self, layer: AdaptableLayer, step: _Step, max_slots: int, max_rank: int) -> None:
        """max_rank: of an adapter's module."""
        self._layer, self._step = layer, step
        self._deltas = layer.make_deltas(step.native_rows, max_slots, max_rank)
        self._modules: dict[bytes, Sequence[tuple[LinearPart, LoraModule]]] = {}
        """By digest, of the adapters in slots that change this layer."""
        self.is_changed = False
        """Whether an adapter changes the layer, or has done so."""

    @property
    def device(self) -> torch.device | None:
        """The GPU that has the slots; None on a CPU."""
        return self._deltas.device if isinstance(self._deltas, SlotDeltas) else None

    @property
    def is_active(self) -> bool:
        """See `linear.Additions`."""
        return self._step.is_active

    def pack(
        self, modules: Sequence[tuple[LinearPart, LoraModule]], memory: HugeMemory
    ) -> "LayerDelta":
        """What an adapter adds to the layer. May be called on any thread.

        memory: of the adapter, on a CPU.
        """
        if self._deltas is None:
            return LayerDelta(modules, None)
        parts = []
        for part, module in modules:
            matrices, first = _matrices(part, module), part.outputs.start
            factors = self._factors(part, module, *matrices)
            parts.append(DeltaPart(*matrices, module.scale, first, part.expert or 0, factors))
        if isinstance(self._deltas, NativeDeltas):
            return LayerDelta(modules, self._deltas.pack(parts, memory.take))
        return LayerDelta(modules, self._deltas.pack(parts))

    @property
    def can_scale(self) -> bool:
        """Whether an adapter can also multiply the sums of the layer."""
        return isinstance(self._layer, ScalableLayer) and self._deltas is not None

    def _factors(self, part: LinearPart, module: LoraModule, a: Tensor, b: Tensor) -> Tensor | None:
        """What DoRA multiplies sums by: the magnitudes divided by the norms of the changed weight's
        rows. None for other adapters. Raises BadAdapter if a row is zero."""
        if module.magnitudes is None:
            return None
        assert isinstance(self._layer, ScalableLayer), "the others were refused"
        [magnitudes] = part.rows_of(module.magnitudes[:, None]).mT
        a, b = (matrix.to(device=self.device, dtype=torch.float32) for matrix in (a, b))
        with torch.cuda.device_of(a):  # each thread has its own
            norms = self._layer.norms(part.outputs, a, b * module.scale).cpu()
        if (norms == 0).any():
            problem = "expected a changed weight without rows of zeros"
            row = int((norms == 0).nonzero()[0])
            raise BadAdapter(f"use_dora: {problem}, got zeros in row {row}")
        return magnitudes / norms

    def fill(self, slot: int, digest: bytes, delta: "LayerDelta") -> None:
        """Put an adapter that changes the layer into a slot."""
        self.is_changed = True
        self._modules[digest] = delta.modules
        if isinstance(self._deltas, SlotDeltas):
            assert isinstance(delta.packed, PackedSlot)
            self._deltas.fill(slot, delta.packed)
        elif self._deltas is not None:
            assert isinstance(delta.packed, PackedDelta)
            self._deltas.fill(slot, delta.packed)

    def clear(self, slot: int, digest: bytes) -> None:
        """Empty a slot."""
        if self._modules.pop(digest, None) is not None and self._deltas is not None:
            self._deltas.clear(slot)

    def of_step(self) -> NativeDeltas | None:
        """See `linear.Additions`."""
        if not self.is_changed or not self._step.is_active:
            return None
        return self._deltas if isinstance(self._deltas, NativeDeltas) else None

    def add(self, y: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See `linear.Additions`."""
        if isinstance(self._deltas, SlotDeltas):
            if self._step.slots is not None:
                self._deltas.add(y, x, self._step.slots, bias=bias)
            return y
        for digest, rows in self._step.adapters:
            self._add_to(y, x, digest, rows, None)
        return y

    def add_of_expert(self, y: Tensor, x: Tensor, expert: int | Tensor, rows: Tensor) -> Tensor:
        """See `linear.Additions`."""
        if isinstance(self._deltas, SlotDeltas):
            if self._step.slots is not None:
                self._deltas.add(y, x, self._step.slots[rows], expert)
            return y
        if isinstance(expert, Tensor):
            for one in expert.unique().tolist():
                chosen = (expert == one).nonzero().flatten()
                y[chosen] = self.add_of_expert(y[chosen], x[chosen], one, rows[chosen])
            return y
        for adapter in self._step.adapters:
            if (found := adapter.among(rows)) is not None:
                self._add_to(y, x, *found, expert)
        return y

    def _add_to(
        self, y: Tensor, x: Tensor, digest: bytes, rows: Tensor | None, expert: int | None
    ) -> None:
        for part, module in self._modules.get(digest, ()):
            if part.expert != expert:
                continue
            chosen, (a, b) = x if rows is None else x[rows], _matrices(part, module)
            is_token = not chosen.is_floating_point()
            a, b = a.float(), b.float()
            inner = a.t()[chosen] if is_token else nn.functional.linear(chosen.float(), a)
            added = nn.functional.linear(inner, b).mul_(module.scale)
            columns = y[:, part.outputs]
            if rows is None:
                columns.add_(added)
            else:
                columns[rows] = (columns[rows] + added).to(y.dtype)


def _matrices(part: LinearPart, module: LoraModule) -> tuple[Tensor, Tensor]:
    """A and B of a part of a module, [rank, in_features] and [out_features, rank]."""
    if part.expert is not None and module.num_experts > 1:
        module = module.of_expert(part.expert)
    a, b = (module.b.t(), module.a.t()) if part.is_transposed else (module.a, module.b)
    return a[:, part.inputs], part.rows_of(b)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module of the checkpoint is in the model."""

    layer: AdaptableLayer
    part: LinearPart


@runtime_checkable
class OtherModel(Protocol):
    """A model that is not native, such as one that runs through `transformers`."""

    architecture: str
    max_model_len: int
    num_layers: int
    virtual_token_size: int | None
    adapters: ActivatesAdapters | None

    @property
    def adaptable_layers(self) -> Sequence[AdaptableLayer]:
        """Those that adapters may change, with the LM head."""
        ...

    @property
    def head(self) -> AdaptableLayer | None:
        """The LM head; None if adapters cannot change it."""
        ...

    def canonical_name(self, name: str) -> str:
        """As `NativeModel.canonical_name`."""
        ...


Model = NativeModel | OtherModel


def layers_of(model: Model) -> Iterator[AdaptableLayer]:
    """The layers that adapters may change: all linear ones, and in native models experts,
    embeddings of tokens and the LM head, which is last."""
    if not isinstance(model, NativeModel):
        yield from model.adaptable_layers
        return
    for layer in model.modules():
        if isinstance(layer, Linear | VocabEmbedding) and not layer.can_adapt:
            continue
        if isinstance(layer, Linear | VocabEmbedding) and layer not in (model.head, model.score):
            yield layer
        if isinstance(layer, ExpertWeights | Expansion):
            yield from layer.products
    if model.head is not None:
        yield model.head


class AdapterSlots:
    """The adapters of a native model that its layers hold, ready for steps.

    `activate` and `deactivate` belong to the model thread.
    """

    def __init__(
        self, model: Model, store: AdapterStore[ModelAdapter], max_slots: int, max_rank: int
    ) -> None:
        self._store, self._max_slots, self._max_rank = store, max_slots, max_rank
        self._model, self._step, self._head_step = model, _Step(), _Step()
        self._places: dict[str, list[_Place]] = {}
        self._layers: dict[AdaptableLayer, LayerAdapters] = {}
        self._packed: WeakKeyDictionary[ModelAdapter, Mapping[AdaptableLayer, LayerDelta]] = (
            WeakKeyDictionary()
        )
        """Of all adapters in the store."""
        self._slots: dict[bytes, int] = {}
        """By digest, the least recently used first."""
        self._prompts: dict[int, Tensor] = {}
        """By slot, the embeddings of virtual tokens, as layers get them."""
        self.changes = {"filled": 0, "evicted": 0}
        """Adapters that were put into slots, and those that others replaced there."""
        self._num_prepared = -1
        """Layers that adapters changed when a program was recorded last; -1: none was, and one of
        the model's that was recorded before reads the memory of other slots."""
        for layer in layers_of(model):
            step = self._head_step if layer is model.head else self._step
            added = LayerAdapters(layer, step, max_slots, max_rank)
            layer.additions = self._layers[layer] = added
            for name, part in layer.parts():
                self._places.setdefault(_joined(name), []).append(_Place(layer, part))
        devices = (added.device for added in self._layers.values())
        self._device = next((device for device in devices if device is not None), None)
        """The GPU that has the slots; None on a CPU."""

    def _check(self, adapter: ModelAdapter) -> None:
        if adapter.prompt is not None:
            self._check_prompt(*adapter.prompt.shape)
        for name, module in adapter.modules.items():
            if module.rank > self._max_rank:
                expected = f"at most {self._max_rank}, --max-lora-rank"
                raise BadAdapter(f"r: expected {expected}, got {module.rank} of {name}")
            places = self._places_of(name)
            if not places and not self._is_elsewhere(name):
                kinds = sorted({known.rpartition(".")[2] for known in self._places})
                raise BadAdapter(
                    f"target_modules: expected linear layers of {self._model.architecture}, which"
                    f" has {', '.join(kinds)} in {self._model.num_layers} layers, got {name!r}"
                )
            for place in places:
                self._check_shape(name, module, place)
                self._check_magnitudes(name, module, place)

    def _check_prompt(self, num_tokens: int, size: int) -> None:
        model, expected_size = self._model, self._model.virtual_token_size
        if expected_size is None:
            raise BadAdapter(
                "peft_type: expected LORA, since tokens of"
                f" {model.architecture} cannot be replaced by embeddings, got those of a prompt"
            )
        if size != expected_size:
            raise BadAdapter(f"token_dim: expected {expected_size}, got {size}")
        if num_tokens >= model.max_model_len:
            expected = f"fewer than the {model.max_model_len} tokens of a sequence"
            raise BadAdapter(f"num_virtual_tokens: expected {expected}, got {num_tokens}")

    def _check_shape(self, name: str, module: LoraModule, place: _Place) -> None:
        expected, got = place.part.source_shape, [module.b.shape[0], module.a.shape[1]]
        if place.part.is_transposed:
            expected = expected[::-1]
        if got != expected:
            raise BadAdapter(f"{name}: expected a weight of {expected}, got {got}")
        num_experts = len(self._places_of(name))
        allowed = {num_experts}
        if isinstance(place.layer, ExpertProduct):
            allowed.add(num_experts + place.layer.num_zero_experts)
        if not name.endswith(STACKS):
            allowed.add(1)
        if module.num_experts not in allowed:
            problem = f"expected weights of {num_experts} experts, got {module.num_experts}"
            raise BadAdapter(f"{name}: {problem}")

    def _check_magnitudes(self, name: str, module: LoraModule, place: _Place) -> None:
        if module.magnitudes is None:
            return
        if not self._layers[place.layer].can_scale:
            expected = "linear layers and embeddings that our kernels compute"
            raise BadAdapter(f"use_dora: expected {expected}, got {name}")
        num_inputs, columns = place.part.source_shape[1], place.part.inputs
        if columns.stop - columns.start != num_inputs:
            expected = f"all {num_inputs} inputs of {name} on one rank, as norms are of them"
            raise BadAdapter(f"use_dora: expected {expected}, got {columns.stop - columns.start}")

    def _places_of(self, name: str) -> Sequence[_Place]:
        name = self._canonical(name)
        names = (name, *_published(name))
        return next((self._places[name] for name in names if name in self._places), ())

    def _canonical(self, name: str) -> str:
        return _joined(self._model.canonical_name(f"{name}.weight").removesuffix(".weight"))

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a module is in a layer of another pipeline stage, which checks it. Layers differ:
        this stage does not know which modules that one has."""
        model = self._model
        if not isinstance(model, NativeModel):
            return False
        layout = model.communicator.layout
        name = self._canonical(name)
        if f"{name}.weight" == model.embedding_name or _OF_FIRST.fullmatch(name):
            return not layout.is_first_stage
        if _OF_LAST.fullmatch(name):
            return not layout.is_last_stage
        layers = re.escape(model.layers_name)
        match = re.fullmatch(rf"{layers}\.(\d+)\..+", name)
        here = {int(name.rpartition(".")[2]) for name, _ in model.named_layers()}
        is_there = match is not None and int(match[1]) in {*range(model.num_layers)} - here
        return is_there or name in model.names_elsewhere

    def activate(self, batch: StepBatch) -> bool:
        """Let the layers compute the adapters of a batch in the next forward pass.

        Returns whether they change layers that none has changed before, so that a recorded program
        lacks them. Raises InvalidPlan if they exceed the slots.
        """
        adapters = batch.adapters
        num_prepared = self._num_prepared
        if not isinstance(adapters, Tensor):
            self.place([digest for digest, _ in adapters])
        self._set(self._step, adapters, len(batch.token_ids))
        num_sampled = 0 if batch.sampled is None else len(batch.sampled)
        self.activate_head(batch.sampled_adapters(), num_sampled)
        self._num_prepared = sum(added.is_changed for added in self._layers.values())
        return self._num_prepared > num_prepared

    def place(self, digests: Sequence[bytes]) -> list[int]:
        """Put the adapters of a step into slots, which it keeps until the next call, and return
        these. On a GPU, what was queued before reads the previous adapters, and the host does not
        wait for it. Raises InvalidPlan if they exceed the slots."""
        if len(digests) > self._max_slots:
            problem = f"expected at most {self._max_slots} adapters in a step, --max-loras"
            raise InvalidPlan("seq_ids", f"{problem}, got {len(digests)}")
        for digest in digests:
            if digest not in self._slots:
                self._slots[digest] = self._fill_slot(digest, {*digests})
            self._slots[digest] = self._slots.pop(digest)
        return [self._slots[digest] for digest in digests]

    def activate_head(self, adapters: RowAdapters, num_rows: int) -> None:
        """Let the LM head compute adapters of the present step, by rows of its inputs."""
        head = self._model.head
        if head is not None and (self._device is not None or self._layers[head].is_changed):
            self._set(self._head_step, adapters, num_rows)

    def _set(self, step: _Step, adapters: RowAdapters, num_rows: int) -> None:
        if self._device is not None:
            step.set_slots(self._by_row(adapters, num_rows, self._device))
            return
        if isinstance(adapters, Tensor):
            adapters = self._by_adapter(adapters)
        step.set(adapters, [self._slots[digest] for digest, _ in adapters], num_rows)

    def _by_row(self, adapters: RowAdapters, num_rows: int, device: torch.device) -> Tensor:
        """The slots of rows; see `RowAdapters`."""
        if isinstance(adapters, Tensor):
            return adapters
        slots = torch.full((num_rows,), NO_SLOT, dtype=torch.int32, device=device)
        for digest, rows in adapters:
            slots[slice(None) if rows is None else rows] = self._slots[digest]
        return slots

    def _by_adapter(self, slots: Tensor) -> Sequence[AdapterRows]:
        """The adapters of rows by their slots, on a CPU; see `RowAdapters`."""
        found = {slot: digest for digest, slot in self._slots.items()}
        used = sorted({*slots.tolist()} - {NO_SLOT})
        return [AdapterRows(found[slot], (slots == slot).nonzero().flatten()) for slot in used]

    def put_prompts(self, x: Tensor, batch: StepBatch) -> Tensor:
        """See `ActivatesAdapters`."""
        slots = self._by_row(batch.adapters, len(x), x.device)
        for slot, prompt in self._prompts.items():
            is_virtual = (slots == slot) & (batch.positions < len(prompt))
            chosen = prompt[batch.positions.clamp(max=len(prompt) - 1)]
            x = torch.where(is_virtual.unsqueeze(1), chosen, x)
        return x

    def deactivate(self) -> None:
        """Let the layers compute no adapters."""
        self._step.clear()
        self._head_step.clear()

    def _fill_slot(self, digest: bytes, needed: set[bytes]) -> int:
        """Put an adapter into a free slot, or that of the one that was not needed for longest."""
        adapter, slot = self._store.get(digest), len(self._slots)
        if slot >= self._max_slots:
            evicted = next(found for found in self._slots if found not in needed)
            slot = self._slots.pop(evicted)
            for added in self._layers.values():
                added.clear(slot, evicted)
            self._prompts.pop(slot, None)
            self.changes["evicted"] += 1
        self.changes["filled"] += 1
        for layer, delta in self._prepared(adapter).items():
            self._layers[layer].fill(slot, digest, delta)
        if adapter.prompt is not None:
            assert isinstance(self._model, NativeModel), "others refuse prompts"
            prompt = adapter.prompt.to(self._model.hidden_like)
            self._prompts[slot] = prompt * self._model.virtual_token_scale
        return slot

    def prepare(self, adapter: ModelAdapter) -> None:
        """Check an adapter, and pack it for the layers, so that filling a slot takes no time.

        May be called on any thread. Raises BadAdapter unless every module of the adapter is a
        linear layer of the model, of its shape, and within the limit of ranks.
        """
        self._check(adapter)
        self._prepared(adapter)

    def _prepared(self, adapter: ModelAdapter) -> Mapping[AdaptableLayer, LayerDelta]:
        if (found := self._packed.get(adapter)) is None:
            memory, layers = _memory_of(adapter), self._by_layer(adapter.modules)
            found = {
                layer: self._layers[layer].pack(parts, memory) for layer, parts in layers.items()
            }
            self._packed[adapter] = found
        return found

    def _by_layer(
        self, modules: Mapping[str, LoraModule]
    ) -> dict[AdaptableLayer, list[tuple[LinearPart, LoraModule]]]:
        found: dict[AdaptableLayer, list[tuple[LinearPart, LoraModule]]] = {}
        for name in sorted(modules):
            for place in self._places_of(name):
                found.setdefault(place.layer, []).append((place.part, modules[name]))
        return found


def _memory_of(adapter: ModelAdapter) -> HugeMemory:
    """Memory for the packed matrices of an adapter, which is freed with it.

    The kernels read a little of every adapter in turns: with small pages, each such read would miss
    the TLB. Chunks begin at multiples of a huge page, so adapters of one shape would compete for
    the same sets of the caches; each begins elsewhere in its chunk.
    """
    memory = HugeMemory()
    memory.take(
        int.from_bytes(adapter.info.digest[:2]) % (PAGE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
    )
    return memory


_OF_EXPERT = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_SHARED = re.compile(r"(?:\.mlp)?\.(?:shared?_experts?|shared_mlp)\.")
_EXPERT = re.compile(r"(.+\.layers\.\d+)\.(?:\w+\.)?(experts\..+?)(w[123])?")


def _joined(name: str) -> str:
    """One name of modules that have several: `transformers` calls the modules of mixtures
    otherwise than some checkpoints do."""
    if (match := _EXPERT.fullmatch(name)) is not None:
        return f"{match[1]}.{match[2]}{_OF_EXPERT.get(match[3], '')}"
    return _SHARED.sub(".mlp.shared_experts.", name.replace(".block_sparse_moe.", ".mlp."))


def _published(name: str) -> tuple[str, str]:
    """The names that a module may have in checkpoints, for one that `transformers` calls otherwise:
    in Kimi Linear and GLM-5 Next, and in Ling 3."""
    name = name.replace(".forget_gate.", ".")
    of_ling = name.replace(".self_attn.o_proj", ".attention.dense")
    return name, of_ling.replace(".self_attn.", ".attention.")


def require_adaptable(model: object) -> Model:
    """The model, if it computes adapters. Raises InvalidOption."""
    if isinstance(model, NativeModel) or (isinstance(model, OtherModel) and model.adaptable_layers):
        return model
    architecture = getattr(model, "architecture", type(model).__name__)
    raise InvalidOption(
        "enable_lora: expected a model with linear layers that adapters may change, got"
        f" {architecture}, which runs through transformers"
    )
