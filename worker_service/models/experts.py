"""Mixture of experts: a router, gated experts of which each row has a few, and shared experts.

The experts of a layer are packed together: for the C++ kernels on CPUs, which a recorded program
includes, and for the Triton kernels on GPUs. Where there are no kernels, and for formats that they
do not have, each expert is an ordinary linear layer. All add up the results of a row in the order
of experts, so that it has the same bits in any batch if the products have.

Each rank has some columns of every expert.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pagewire_kernels import reference
from pagewire_kernels.interface import LayerKernels
from pagewire_kernels.quantized_weight import QuantizedWeight
from pagewire_kernels.reference import Gate, Routing
from pagewire_kernels.select import Kernels
from worker_service.distributed.layout import Layout, Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.layers import ACTIVATIONS
from worker_service.models.linear import GatedLinear, Linear, PackedExperts, pack_experts


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedSpec:
    """Experts that all rows have, as one MLP."""

    inner_size: int
    is_gated: bool = False
    """Whether their output is multiplied by the sigmoid of a product of the row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertsSpec:
    """Experts in place of an MLP. Implements `decoder.FeedForwardSpec`.

    Attributes of `Experts` with tensors, for `LayerSpec.names`: `router`, `experts`, and if there
    are any `correction`, `shared.up`, `shared.down` and `shared.gate`.
    """

    routing: Routing
    inner_size: int
    """Of each expert."""

    activation: str
    """The activation's name in `config.json`."""

    shared: SharedSpec | None = None
    corrects: bool = False
    """Whether a bias of scores changes which experts are chosen."""

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
        self._routing, self._communicator = spec.routing, context.communicator
        inner = context.communicator.layout.even_shard(spec.inner_size, "columns of an expert")
        num_experts, activation = spec.routing.num_experts, ACTIVATIONS[spec.activation]
        in_full = replace(context, quantization=None)
        outputs = [Shard.full(num_experts)]
        self.router = Linear(Shard.full(size), outputs, bias=False, context=in_full)
        self.correction = CorrectionBias(num_experts, context) if spec.corrects else None
        gate = Gate(activation=activation)
        self.experts = ExpertWeights(num_experts, size, inner, gate, context)
        self.shared: SharedExperts | None = None
        if spec.shared is not None:
            self.shared = SharedExperts(spec.shared, size, activation, context, kernels)

    def forward(self, x: Tensor) -> Tensor:
        """x: [num_tokens, size]; returns the same shape."""
        logits = self.router.multiply(x, None, torch.float32)
        bias = None if self.correction is None else self.correction.bias
        shared, gate = (None, None) if self.shared is None else self.shared(x)
        y = self.experts(x, logits, self._routing, bias, shared, gate)
        layout = self._communicator.layout
        return y if layout.tensor_parallel_size == 1 else self._communicator.sum(y)


class CorrectionBias:
    """A bias of the scores of experts, float32 [num_experts]."""

    def __init__(self, num_experts: int, context: ModelContext) -> None:
        self.bias = torch.empty(num_experts, dtype=torch.float32, device=context.device)

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destination of the tensor with this name."""
        (name,) = names
        yield WeightTarget(name, self.bias)


class SharedExperts(nn.Module):
    """See `SharedSpec`."""

    def __init__(
        self,
        spec: SharedSpec,
        size: int,
        activation: str,
        context: ModelContext,
        kernels: LayerKernels,
    ) -> None:
        super().__init__()
        layout, full = context.communicator.layout, Shard.full(size)
        inner = layout.even_shard(spec.inner_size, "columns of shared experts")
        self.up = GatedLinear(size, [inner] * 2, activation, kernels, bias=False, context=context)
        self.down = Linear(inner, [full], bias=False, context=context)
        self.gate: Linear | None = None
        if spec.is_gated:
            in_full = replace(context, quantization=None)
            self.gate = Linear(full, [Shard.full(1)], bias=False, context=in_full)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x: [num_tokens, size]. Returns this rank's summand of the output, of the same shape, and
        the logits of the gate, float32 [num_tokens, 1]."""
        gate = None if self.gate is None else self.gate.multiply(x, None, torch.float32)
        return self.down(self.up(x)), gate


def _loaded(linears: Sequence[Linear]) -> list[Tensor | QuantizedWeight]:
    found = [linear.loaded() for linear in linears]
    return [weight for weight in found if weight is not None]


class ExpertWeights(nn.Module):
    """The weights of all experts of a layer, and their products."""

    def __init__(
        self, num_experts: int, size: int, inner: Shard, gate: Gate, context: ModelContext
    ) -> None:
        """inner: this rank's columns of each expert."""
        super().__init__()
        self._gate, self._context = gate, context
        num_first = num_experts * 2 * inner.size * size
        self.weight: Tensor | None = context.empty_weight(
            num_first + num_experts * size * inner.size
        )
        """All weights in one memory, so that they are packed when the last one is filled; None once
        they are packed."""

        gate_up = self.weight[:num_first].view(num_experts, 2 * inner.size, size)
        down = self.weight[num_first:].view(num_experts, size, inner.size)
        full = Shard.full(size)
        # In lists: modules of their own would be packed one by one.
        self._gate_up = [
            Linear(full, [inner] * 2, bias=False, context=context, weight=weight)
            for weight in gate_up
        ]
        self._down = [
            Linear(inner, [full], bias=False, context=context, weight=weight) for weight in down
        ]
        self._packed: PackedExperts | None = None

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the tensors of gate, up and down projections with these names, in which
        `*` stands for the expert's index."""
        for i, (gate_up, down) in enumerate(zip(self._gate_up, self._down, strict=True)):
            gate, up, of_down = (name.replace("*", str(i)) for name in names)
            yield from gate_up.targets(gate, up, transposed=transposed)
            yield from down.targets(of_down, transposed=transposed)

    def pack(self) -> None:
        """Pack the weights for this machine once they are loaded; the originals are freed."""
        if self.weight is None:
            return
        self.weight = None
        gate_up, down = _loaded(self._gate_up), _loaded(self._down)
        self._packed = pack_experts(gate_up, down, self._gate, self._context)
        if self._packed is not None:
            self._gate_up, self._down = [], []
            return
        for linears, weights in ((self._gate_up, gate_up), (self._down, down)):
            for linear, weight in zip(linears, weights, strict=True):
                linear.lay_out(weight)
                if self._context.needs_fixed_products:
                    linear.fix_order()

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        routing: Routing,
        bias: Tensor | None,
        shared: Tensor | None,
        shared_gate: Tensor | None,
    ) -> Tensor:
        """See `NativeExperts.apply`."""
        if self._packed is not None:
            return self._packed.apply(
                x, logits, routing, bias=bias, shared=shared, shared_gate=shared_gate
            )
        chosen, weights = reference.route(logits, routing, bias)
        total = reference.gated_experts(
            x,
            chosen,
            weights,
            lambda expert, rows: self._gate_up[expert](rows),
            lambda expert, rows: self._down[expert](rows),
            self._gate,
        )
        if shared is not None:
            total = reference.add_shared(total, shared, shared_gate)
        return total.to(x.dtype)
