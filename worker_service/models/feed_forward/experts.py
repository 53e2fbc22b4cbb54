"""Mixture of experts: a router, experts of which each row has a few, and shared experts.

The experts of a layer are packed together: for the C++ kernels on CPUs, which a recorded program
includes, and for the Triton kernels on GPUs. Where there are no kernels, and for formats that they
do not have, each expert is an ordinary linear layer. All add up the results of a row in the order
of experts, so that it has the same bits in any batch if the products have.

Each rank has some columns of every expert.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from pagewire_kernels import reference
from pagewire_kernels.cpu.adapters import ActiveRows, ExpertDeltas, NativeDeltas
from pagewire_kernels.cpu.experts import NativeExperts
from pagewire_kernels.quantized_weight import QuantizedWeight
from pagewire_kernels.reference import Gate, Routing
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.select import Kernels
from pagewire_kernels.slot_deltas import AddOfExperts, SlotDeltas
from worker_service.distributed.layout import Layout, Shard
from worker_service.models.feed_forward.mlp import gate_and_up
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers.activations import ACTIVATIONS
from worker_service.models.layers.vector import Vector
from worker_service.models.linear.additions import Additions, LinearPart, make_slots
from worker_service.models.linear.linear import Linear, float_linear
from worker_service.models.linear.packing import pack_experts

if TYPE_CHECKING:
    from pagewire_kernels.triton import TritonExperts


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSpec:
    """Experts that all rows have, as one MLP."""

    inner_size: int
    is_gated: bool = False
    """Whether their output is multiplied by the sigmoid of a product of the row."""

    is_fused: bool = False
    """Whether one tensor has the rows of the gate, then those of the layer that it multiplies."""

    scale: float = 1.0
    """The factor of their output."""

    gate: Gate | None = None
    """How their gate acts; None: as the activation says, without a limit."""


class ExpertStorage(Enum):
    """Which tensors of a checkpoint hold the weights of experts, and how `LayerSpec.names` lists
    them; `*` in a name stands for the expert's index."""

    SEPARATE = auto()
    """Each expert has modules, with their biases: gate, if there is one, up and down."""

    STACK = auto()
    """Tensors of all experts: rows of gate, then of up, [num_experts, 2 * inner_size, hidden_size],
    down, [num_experts, hidden_size, inner_size], and the biases of both."""

    STACKS = auto()
    """Tensors of all experts: gate and up, [num_experts, inner_size, hidden_size] each, and down,
    [num_experts, hidden_size, inner_size]. There are no biases."""

    TRANSPOSED_STACK = auto()
    """Tensors of all experts: rows of gate and up in turn, [num_experts, hidden_size, 2 *
    inner_size], down, [num_experts, inner_size, hidden_size], and the biases of both."""

    TRANSPOSED_HALVES = auto()
    """As `TRANSPOSED_STACK`, but all rows of gate are before those of up."""

    IN_TURN = auto()
    """Each expert has modules: rows of gate and up in turn, and down. The tensors of biases, which
    follow, are of all experts."""


_STACKS = (
    ExpertStorage.STACK,
    ExpertStorage.STACKS,
    ExpertStorage.TRANSPOSED_STACK,
    ExpertStorage.TRANSPOSED_HALVES,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Experts in place of an MLP. Implements `decoder.FeedForwardSpec`.

    Attributes of `Experts` with tensors, for `LayerSpec.names`: `router`, `experts`, and if there
    are any `correction`, `factors`, `shared.up`, `shared.down`, `shared.gate`, `latents.up` (to
    latents) and `latents.down` (to rows).
    """

    routing: Routing
    inner_size: int
    """Of each expert."""

    activation: str
    """The activation's name in `config.json`."""

    is_gated: bool = True
    """Whether the activation of a gate multiplies up, in shared experts, too; otherwise it is that
    of up. Without gates storage is `SEPARATE`."""

    latent_size: int | None = None
    """Of latents, linear functions of rows, which all but shared experts read and write in their
    place; None: there are none."""

    shared: SharedSpec | None = None
    corrects: bool = False
    """Whether a bias of scores changes which experts are chosen."""

    correction_is_row: bool = False
    """Whether the checkpoint stores this bias as a matrix of one row."""

    has_factors: bool = False
    """Whether each expert has a factor of its weights."""

    bias: bool = False
    """Whether router and experts have biases."""

    has_float_router: bool = False
    """Whether the router's weight is float32, whatever the dtype of the others."""

    gate: Gate | None = None
    """How an expert's gate acts; None: as the two fields say."""

    storage: ExpertStorage = ExpertStorage.SEPARATE

    def require_shards(self, layout: Layout) -> None:
        """Raise InvalidOption unless the ranks can share the columns."""
        layout.even_shard(self.inner_size, "columns of an expert")
        if self.shared is not None:
            layout.even_shard(self.shared.inner_size, "columns of shared experts")

    def build(self, size: int, context: ModelContext, kernels: Kernels) -> "Experts":
        """The experts for rows of this size."""
        return Experts(self, size, context, kernels.layers)


class Experts(nn.Module):
    """See `ExpertsSpec`."""

    def __init__(
        self, spec: ExpertsSpec, size: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__()
        layout, self._communicator = context.communicator.layout, context.communicator
        self._routing = replace(spec.routing, adds_zero_experts=layout.tensor_rank == 0)
        inner = layout.even_shard(spec.inner_size, "columns of an expert")
        num_experts, activation = spec.routing.num_experts, ACTIVATIONS[spec.activation]
        in_full, outputs = replace(context, quantization=None), Shard.full(num_experts)
        self.router: Linear
        if spec.has_float_router:
            assert not spec.bias, "no family has both"
            self.router = float_linear(size, num_experts, in_full, kernels)
        else:
            self.router = Linear(Shard.full(size), [outputs], bias=spec.bias, context=in_full)
        self.correction: Vector | None = None
        if spec.corrects:
            self.correction = Vector(outputs, context, axes_before=int(spec.correction_is_row))
        self.factors = Vector(outputs, context) if spec.has_factors else None
        self.latents = (
            None if spec.latent_size is None else Latents(size, spec.latent_size, context)
        )
        self.experts = ExpertWeights(spec, spec.latent_size or size, inner, context)
        self._kernels = kernels
        self.shared: SharedExperts | None = None
        if spec.shared is not None:
            self.shared = SharedExperts(
                spec.shared, size, activation, context, kernels, is_gated=spec.is_gated
            )

    def forward(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """x: [num_tokens, size]; routed: the router's rows, None for the same. Returns the same
        shape."""
        rows = x if routed is None else routed
        logits = self.router.multiply(rows, self.router.bias, torch.float32)
        bias = None if self.correction is None else self.correction.numbers
        shared, gate = (None, None) if self.shared is None else self.shared(x)
        factors = None if self.factors is None else self.factors.numbers
        if self.latents is None:
            y = self.experts(x, logits, self._routing, bias, factors, shared, gate)
        else:
            assert gate is None, "no family has both"
            y = self.latents.up(x)
            y = self.latents.down(self.experts(y, logits, self._routing, bias, factors, None, None))
            y = y if shared is None else self._kernels.add(y, shared)
        layout = self._communicator.layout
        return y if layout.tensor_parallel_size == 1 else self._communicator.sum(y)


class Latents(nn.Module):
    """See `ExpertsSpec.latent_size`. Every rank has both weights in full, and multiplies its
    summand of latents."""

    def __init__(self, size: int, latent_size: int, context: ModelContext) -> None:
        super().__init__()
        full, latent = Shard.full(size), Shard.full(latent_size)
        self.up = Linear(full, [latent], bias=False, context=context)
        self.down = Linear(latent, [full], bias=False, context=context)


class SharedExperts(nn.Module):
    """See `SharedSpec`."""

    def __init__(
        self,
        spec: SharedSpec,
        size: int,
        activation: str,
        context: ModelContext,
        kernels: LayerKernels,
        *,
        is_gated: bool,
    ) -> None:
        """is_gated: as in `ExpertsSpec`."""
        super().__init__()
        layout, full = context.communicator.layout, Shard.full(size)
        inner = layout.even_shard(spec.inner_size, "columns of shared experts")
        self._kernels, self._scale, self._gate = kernels, spec.scale, spec.gate
        self.up: Linear
        if is_gated:
            self.up = gate_and_up(
                size,
                inner,
                activation if spec.gate is None else None,
                kernels,
                is_fused=spec.is_fused,
                bias=False,
                context=context,
            )
        else:
            self.up = Linear(full, [inner], bias=False, context=context)
            self._gate = spec.gate or Gate(activation=activation, multiplies=False)
        self.down = Linear(inner, [full], bias=False, context=context)
        self.gate: Linear | None = None
        if spec.is_gated:
            in_full = replace(context, quantization=None)
            self.gate = Linear(full, [Shard.full(1)], bias=False, context=in_full)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x: [num_tokens, size]. Returns this rank's summand of the output, of the same shape, and
        the logits of the gate, float32 [num_tokens, 1]."""
        gate = None if self.gate is None else self.gate.multiply(x, None, torch.float32)
        y: Tensor = self.up(x)
        if self._gate is not None:
            y = self._kernels.apply_gate(y, self._gate)
        y = self.down(y)
        return y if self._scale == 1.0 else self._kernels.scale(y, self._scale), gate


def _loaded(linears: Sequence[Linear]) -> list[Tensor | QuantizedWeight]:
    found = [linear.loaded() for linear in linears]
    return [weight for weight in found if weight is not None]


class ExpertProduct:
    """The products of all experts of a layer with their weights of gate and up projection, or of
    the down projection, as adapters change them."""

    def __init__(self, weights: "ExpertWeights", part: int, num_zero_experts: int) -> None:
        """part: 0 of gate and up, 1 of down; num_zero_experts: for which `transformers` has weights
        of gate and up, but not of down."""
        self._weights, self._part = weights, part
        self.num_zero_experts = 0 if part else num_zero_experts
        """Further experts in an adapter's stack of all experts' weights, which change nothing."""
        self.additions: Additions | None = None
        """What adapters add to the products."""

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """As `Linear.parts`, by the names of modules of one expert, and of a parameter with the
        weights of all."""
        return self._weights.parts(self._part)

    def make_deltas(
        self, rows: ActiveRows, max_slots: int, max_rank: int
    ) -> NativeDeltas | SlotDeltas | None:
        """As `Linear.make_deltas`."""
        return self._weights.make_deltas(self._part, rows, max_slots, max_rank)

    def deltas(self) -> ExpertDeltas | None:
        """What the C++ products add in the present step; None: nothing."""
        found = None if self.additions is None else self.additions.of_step()
        assert found is None or isinstance(found, ExpertDeltas)
        return found

    def adder(self) -> AddOfExperts | None:
        """The function that adds to the products on a GPU in the present step; None: nothing is
        added."""
        if self.additions is None or not self.additions.is_active:
            return None
        return self.additions.add_of_expert


class ExpertWeights(nn.Module):
    """The weights of all experts of a layer, and their products."""

    def __init__(self, spec: ExpertsSpec, size: int, inner: Shard, context: ModelContext) -> None:
        """inner: this rank's columns of each expert."""
        super().__init__()
        self._gate = spec.gate or Gate(
            activation=ACTIVATIONS[spec.activation], multiplies=spec.is_gated
        )
        self._context, self._inner, self._storage = context, inner, spec.storage
        num_experts, parts = spec.routing.num_with_weights, [inner] * (1 + spec.is_gated)
        self._num_first = num_outputs = len(parts) * inner.size
        num_first = num_experts * num_outputs * size
        self.weight: Tensor | None = context.empty_weight(
            num_first + num_experts * size * inner.size
        )
        """All weights in one memory, so that they are packed when the last one is filled; None once
        they are packed."""

        gate_up = self.weight[:num_first].view(num_experts, num_outputs, size)
        down = self.weight[num_first:].view(num_experts, size, inner.size)
        self._stacks = [gate_up, down]
        full = Shard.full(size)
        outputs = [inner.times(2)] if self._takes_turns else parts
        # In lists: modules of their own would be packed one by one.
        self._gate_up = [
            Linear(full, outputs, bias=False, context=context, weight=weight) for weight in gate_up
        ]
        self._down = [
            Linear(inner, [full], bias=False, context=context, weight=weight) for weight in down
        ]
        self._gate_up_bias = context.empty(num_experts, num_outputs) if spec.bias else None
        self._down_bias = context.empty(num_experts, size) if spec.bias else None
        self._biases: tuple[Tensor | None, Tensor | None] = (None, None)
        self._packed: NativeExperts | TritonExperts | None = None
        self._size, self._num_experts = size, num_experts
        self._place = ""
        """The name of the layer."""
        num_zero = spec.routing.num_zero_experts
        self.products = ExpertProduct(self, 0, num_zero), ExpertProduct(self, 1, num_zero)

    def parts(self, part: int) -> Iterator[tuple[str, LinearPart]]:
        """See `ExpertProduct.parts`."""
        inner, size, name = self._inner, self._size, f"{self._place}.experts"
        inputs, all_inputs = slice(inner.start, inner.start + inner.size), slice(0, size)
        is_transposed = self._storage is ExpertStorage.TRANSPOSED_HALVES
        if part == 1:
            full, outputs = Shard.full(size), slice(0, size)
            of_down = LinearPart([size, inner.total], inputs, full, None, outputs)
            for expert in range(self._num_experts):
                of_expert = of_down._replace(expert=expert)
                yield f"{name}.{expert}.down_proj", of_expert
                yield f"{name}.down_proj", of_expert._replace(is_transposed=is_transposed)
            return
        of_gate = LinearPart([inner.total, size], all_inputs, inner, None, slice(0, inner.size))
        if not self._gate.multiplies:
            for expert in range(self._num_experts):
                of_expert = of_gate._replace(expert=expert)
                yield f"{name}.{expert}.up_proj", of_expert
                yield f"{name}.up_proj", of_expert
            return
        of_up = of_gate._replace(outputs=slice(inner.size, 2 * inner.size))
        rows = torch.arange(inner.start, inner.start + inner.size)
        both = [2 * rows, 2 * rows + 1] if self._takes_turns else [rows, rows + inner.total]
        of_both = LinearPart(
            [2 * inner.total, size],
            all_inputs,
            Shard.full(2 * inner.total),
            torch.cat(both),
            slice(0, 2 * inner.size),
            is_transposed=is_transposed,
        )
        for expert in range(self._num_experts):
            yield f"{name}.{expert}.gate_proj", of_gate._replace(expert=expert)
            yield f"{name}.{expert}.up_proj", of_up._replace(expert=expert)
            yield f"{name}.gate_up_proj", of_both._replace(expert=expert)

    def make_deltas(
        self, part: int, rows: ActiveRows, max_slots: int, max_rank: int
    ) -> NativeDeltas | SlotDeltas | None:
        """See `ExpertProduct.make_deltas`."""
        if isinstance(self._packed, NativeExperts):
            num_modules = (3, 2)[part]
            return self._packed.make_deltas(part, rows, max_slots, num_modules, max_rank)
        inner, outputs, num_inputs = self._inner.size, [slice(0, self._size)], self._inner.size
        if part == 0:
            num_inputs, firsts = self._size, range(0, self._num_first, inner)
            outputs = [slice(first, first + inner) for first in firsts]
        a_shape, limits = (len(outputs), num_inputs), (max_slots, max_rank)
        return make_slots(self._context, outputs, a_shape, *limits, self._num_experts)

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the tensors with these names; see `ExpertStorage`."""
        layer = re.match(r".*?\.\d+(?=\.)", names[0])
        self._place = "" if layer is None else layer[0]
        modules, biases = names, names[2:]
        if self._storage is not ExpertStorage.SEPARATE:
            modules = names[: 3 if self._storage is ExpertStorage.STACKS else 2]
        if self._storage in _STACKS:
            yield from self._stacked_targets(*modules)
        else:
            for i, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
                *of_gate_up, of_down = (name.replace("*", str(i)) for name in modules)
                yield from gate_up.targets(*of_gate_up, transposed=transposed)
                yield from down.targets(of_down, transposed=transposed)
        if self._gate_up_bias is None or self._down_bias is None:
            return
        if self._storage is not ExpertStorage.SEPARATE:
            yield from self._double_targets(biases[0], self._gate_up_bias)
            yield WeightTarget(biases[1], self._down_bias)
            return
        num_parts = len(modules) - 1
        all_biases = zip(*self._gate_up_bias.chunk(num_parts, 1), self._down_bias, strict=True)
        for i, of_expert in enumerate(all_biases):
            shards = (*[self._inner] * num_parts, None)
            for name, target, shard in zip(modules, of_expert, shards, strict=True):
                yield WeightTarget(f"{name.replace('*', str(i))}.bias", target, shard=shard)

    @property
    def _takes_turns(self) -> bool:
        """Whether the rows of gate and up take turns in the checkpoint."""
        return self._storage in (ExpertStorage.TRANSPOSED_STACK, ExpertStorage.IN_TURN)

    def _stacked_targets(self, *names: str) -> Iterator[WeightTarget]:
        all_gate_up, all_down = self._stacks
        *parts, down = names
        if self._storage is ExpertStorage.STACKS:
            for name, part in zip(parts, all_gate_up.chunk(2, dim=1), strict=True):
                yield WeightTarget(name, part, 1, self._inner)
            yield WeightTarget(down, all_down, 2, self._inner)
            return
        [gate_up] = parts
        if self._storage is ExpertStorage.STACK:
            yield from self._double_targets(gate_up, all_gate_up)
            yield WeightTarget(down, all_down, 2, self._inner)
            return
        if self._storage is ExpertStorage.TRANSPOSED_STACK:
            yield WeightTarget(gate_up, all_gate_up.mT, 2, self._inner.times(2))
        else:
            total = self._inner.total
            for start, part in zip((0, total), all_gate_up.chunk(2, dim=1), strict=True):
                yield WeightTarget(gate_up, part.mT, 2, self._inner.within(start, 2 * total))
        yield WeightTarget(down, all_down.mT, 1, self._inner)

    def _double_targets(self, name: str, target: Tensor) -> Iterator[WeightTarget]:
        """Destinations of a tensor of gate and up, [num_experts, 2 * inner_size, ...]."""
        if self._takes_turns:
            yield WeightTarget(name, target, 1, self._inner.times(2))
            return
        total = self._inner.total
        for start, part in zip((0, total), target.chunk(2, dim=1), strict=True):
            yield WeightTarget(name, part, 1, self._inner.within(start, 2 * total))

    def pack(self) -> None:
        """Pack the weights for this machine once they are loaded; the originals are freed.

        May be called before the biases are loaded, and then again.
        """
        self._biases = self._arranged_biases()
        if self.weight is None:
            return
        self.weight, self._stacks = None, []
        gate_up, down = _loaded(self._gate_up), _loaded(self._down)
        if self._takes_turns:
            gate_up = [_apart(weight) for weight in gate_up]
        self._packed = pack_experts(gate_up, down, self._gate, self._context)
        if self._packed is not None:
            self._gate_up, self._down = [], []
            return
        for linears, weights in ((self._gate_up, gate_up), (self._down, down)):
            for linear, weight in zip(linears, weights, strict=True):
                linear.lay_out(weight)
                if self._context.needs_fixed_products:
                    linear.fix_order()

    def _arranged_biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Biases of gate, then up, and of down, which only one rank adds."""
        gate_up, down = self._gate_up_bias, self._down_bias
        if gate_up is not None and self._takes_turns:
            gate_up = _apart(gate_up.t()).t().contiguous()
        adds = self._context.communicator.layout.tensor_rank == 0
        return gate_up, down if adds else None

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None,
        factors: Tensor | None,
        shared: Tensor | None,
        shared_gate: Tensor | None,
    ) -> Tensor:
        """See `NativeExperts.apply`."""
        gate_up_bias, down_bias = self._biases
        if isinstance(self._packed, NativeExperts):
            gate_up_deltas, down_deltas = (product.deltas() for product in self.products)
            return self._packed.apply(
                x,
                logits,
                routing,
                bias=bias,
                factors=factors,
                gate_up_bias=gate_up_bias,
                down_bias=down_bias,
                shared=shared,
                shared_gate=shared_gate,
                gate_up_deltas=gate_up_deltas,
                down_deltas=down_deltas,
            )
        if self._packed is not None:
            return self._packed.apply(
                x,
                logits,
                routing,
                bias=bias,
                factors=factors,
                gate_up_bias=gate_up_bias,
                down_bias=down_bias,
                shared=shared,
                shared_gate=shared_gate,
                add_to_gate_up=self.products[0].adder(),
                add_to_down=self.products[1].adder(),
            )
        chosen, weights = reference.route(logits, routing, bias, factors)
        total = reference.gated_experts(
            x,
            chosen,
            weights,
            self._product(0, self._gate_up, gate_up_bias),
            self._product(1, self._down, down_bias),
            self._gate,
            routing,
        )
        if shared is not None:
            total = reference.add_shared(total, shared, shared_gate)
        return total.to(x.dtype)

    def _product(
        self, part: int, linears: list[Linear], biases: Tensor | None
    ) -> reference.Product:
        """Multiplies rows by one expert's weights, without a kernel for all of them."""
        additions = self.products[part].additions

        def multiply(expert: int, inputs: Tensor, rows: Tensor) -> Tensor:
            y = linears[expert].multiply(inputs, None if biases is None else biases[expert])
            return y if additions is None else additions.add_of_expert(y, inputs, expert, rows)

        return multiply


Rows = TypeVar("Rows", Tensor, QuantizedWeight, Tensor | QuantizedWeight)


def _apart(weight: Rows) -> Rows:
    """All rows of gate, then those of up, of a weight that has them in turn."""
    order = torch.arange(weight.shape[0]).view(-1, 2).t().flatten()
    return weight[order] if isinstance(weight, Tensor) else weight.rows(order)
