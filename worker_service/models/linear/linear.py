"""Linear layers: packed on CPUs; plain or batch-invariant on GPUs, with a kernel for few rows.

Sharded layers: a column-parallel linear layer is an ordinary one with fewer outputs, those of this
rank's heads or MLP columns. The next layer has these as inputs, and is row-parallel. With one rank,
each layer computes exactly what its ordinary counterpart does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor, nn

from pagewire_kernels.cpu.adapters import ActiveRows, NativeDeltas
from pagewire_kernels.cpu.linear import NativeGatedWeight, NativeWeight
from pagewire_kernels.quantized_weight import QuantizedWeight, stack
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.slot_deltas import SlotDeltas
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.linear.additions import (
    NUMBERS_AT_ONCE,
    Additions,
    LinearPart,
    make_slots,
)
from worker_service.models.linear.packing import (
    PackedWeight,
    can_pack,
    can_pack_codes,
    can_stack,
    is_on_cpu,
    obstacle,
    pack,
    pack_codes,
    pack_gated,
    refuse_quantized_rows,
    round_weight,
)


class Linear(nn.Module):
    """y = x @ W.T + b. The weight may be a stack of several weights."""

    can_adapt = True
    """Whether adapters may change the product."""

    def __init__(
        self,
        inputs: Shard,
        outputs: Sequence[Shard],
        *,
        bias: bool,
        context: ModelContext,
        weight: Tensor | None = None,
        sources: Sequence[int] | None = None,
        orders: Sequence[Tensor | None] | None = None,
    ) -> None:
        """inputs: this rank's inputs; outputs: this rank's outputs of each of the stacked weights.
        Only one of the two may be sharded. weight: None allocates it; sources: by stacked weight,
        the index of the checkpoint's tensor of which it is a part; None: each is a tensor; orders:
        by stacked weight, the `WeightTarget.order` of its outputs."""
        super().__init__()
        self.weight: Tensor | None
        self._inputs, self._outputs = inputs, outputs
        self._sources = range(len(outputs)) if sources is None else sources
        self._orders = [None] * len(outputs) if orders is None else orders
        num_outputs = sum(shard.size for shard in outputs)
        self.weight = context.empty_weight(num_outputs, inputs.size) if weight is None else weight
        self.bias = context.empty(num_outputs) if bias else None
        self.packed: PackedWeight | None = None
        self._is_packed = False
        """Also where torch multiplies by `weight`."""
        self._context = context
        self._quantization = context.quantization
        self._kept: dict[int, QuantizedWeight] = {}
        self._names: Sequence[str] = ()
        self._few_rows: ModuleType | None = None
        """The module of kernels for few rows, if there are any for the weight."""
        self.additions: Additions | None = None
        """What adapters add to the product."""

    @property
    def native_weight(self) -> NativeWeight | NativeGatedWeight | None:
        """The weight as the C++ kernels have it; None if torch computes the product."""
        return self.packed if isinstance(self.packed, NativeWeight) else None

    def make_deltas(
        self, rows: ActiveRows, max_slots: int, max_rank: int
    ) -> NativeDeltas | SlotDeltas | None:
        """Make slots for what adapters add to the C++ product, or on a GPU; None if torch computes
        the product on a CPU."""
        if self.native_weight is None:
            outputs = [part.outputs for _, part in self.parts()]
            a_shape = len(outputs), self._inputs.size
            return make_slots(self._context, outputs, a_shape, max_slots, max_rank)
        return self.native_weight.make_deltas(rows, max_slots, len([*self.parts()]), max_rank)

    def norms(self, outputs: slice, a: Tensor, b: Tensor) -> Tensor:
        """Norms of some outputs' rows of the sum of the weight, as products have it, and b @ a:
        float32 [num_outputs], on the device of a and b, which are float32, too: the host for C++
        kernels, otherwise the layer's."""
        if self.native_weight is not None:
            return self.native_weight.norms(outputs.start, a, b)
        # Whatever the layout of the weight: products with rows of one one are its columns.
        num_inputs, squares = self._inputs.size, torch.zeros_like(b[:, 0])
        for columns in torch.arange(num_inputs).split(max(1, NUMBERS_AT_ONCE // num_inputs)):
            ones = nn.functional.one_hot(columns.to(b.device), num_inputs)
            product = self._product(ones.to(self._context.dtype), None, torch.float32)
            of_columns = product[:, outputs] + (b @ a[:, columns]).t()
            squares += of_columns.square_().sum(dim=0)
        return squares.sqrt_()

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """(name of the checkpoint's module, its part of this product), once `targets` was called.
        A module that has several parts is named several times."""
        first, inputs = 0, self._inputs
        columns = slice(inputs.start, inputs.start + inputs.size)
        for name, shard, order in zip(self._names, self._outputs, self._orders, strict=False):
            outputs, first = slice(first, first + shard.size), first + shard.size
            yield name, LinearPart([shard.total, inputs.total], columns, shard, order, outputs)

    def targets(self, *names: str, transposed: bool = False) -> Iterator[WeightTarget]:
        """Destinations of the checkpoint's tensors of the layers with these names.

        transposed: whether the checkpoint stores weights as [in_features, out_features].
        """
        assert self.weight is not None
        sizes = [shard.size for shard in self._outputs]
        parts = self.weight.split(sizes)
        names = tuple(names[source] for source in self._sources)
        self._names = names
        for i, (name, part, outputs) in enumerate(zip(names, parts, self._outputs, strict=True)):
            order, rounding = self._orders[i], self._quantization
            axis, shard = (0, outputs) if self._inputs.is_full else (1, self._inputs)
            keep = None if transposed else partial(self._kept.__setitem__, i)
            if transposed:
                axis, part = 1 - axis, part.t()
            yield WeightTarget(f"{name}.weight", part, axis, shard, keep, rounding, order)
        if self.bias is not None:
            biases = self.bias.split(sizes)
            described = zip(names, biases, self._outputs, self._orders, strict=True)
            for name, part, outputs, order in described:
                yield WeightTarget(f"{name}.bias", part, shard=outputs, order=order)

    def pack(self) -> None:
        """Pack the weight for this machine once it is loaded, unless it is packed already; the
        original is freed."""
        weight = self.loaded()
        if weight is not None:
            self.lay_out(weight)

    def lay_out(self, weight: Tensor | QuantizedWeight) -> None:
        """Pack what `loaded` returned."""
        context, self.weight, self._is_packed = self._context, None, True
        if isinstance(weight, QuantizedWeight):
            self.packed = pack_codes(weight, context)
        elif is_on_cpu(context) and can_pack(weight.dtype, context.device):
            self.packed = pack(weight, consume=True)
        else:
            self.weight = weight.to(context.device)
            if context.device.type == "cuda" and not context.batch_invariant:
                self.use_few_rows_kernels()

    def loaded(self) -> Tensor | QuantizedWeight | None:
        """The whole weight, quantized if there are kernels for that; None once it is packed."""
        if self.weight is None or self._is_packed:
            return None
        parts = list(self.weight.split([shard.size for shard in self._outputs]))
        kept, self._kept = self._kept, {}
        if kept and self._quantization is not None:  # large tensors were rounded as they were read
            kept = {
                i: kept.get(i) or round_weight(part, self._quantization, consume=True)
                for i, part in enumerate(parts)
            }
        if len(kept) == len(parts) and can_stack([*kept.values()]):
            stacked = stack([kept[i] for i in range(len(parts))])
            if can_pack_codes(stacked, self._context):
                return stacked
            self._context.dequantized[obstacle(stacked)] += self.weight.nbytes
        elif kept:
            self._context.dequantized["other layers of the product differ"] += self.weight.nbytes
        refuse_quantized_rows([kept.get(i, part) for i, part in enumerate(parts)], self._names)
        for i, part in kept.items():
            parts[i].copy_(part.dequantize())
        if self._quantization is None:
            return self.weight
        return round_weight(self.weight, self._quantization, consume=True)

    def use_few_rows_kernels(self) -> None:
        """Multiply few rows by the Triton kernels for them, if they support the weight. They sum in
        another order than those for more rows."""
        if find_spec("triton") is not None and self.weight is not None:
            from pagewire_kernels.triton import few_rows  # triton is loaded only where it is used

            self._few_rows = few_rows if few_rows.can_multiply(self.weight) else None

    def fix_order(self) -> None:
        """Make products batch-invariant on a GPU: rows are summed in a fixed order.

        Quantized weights were packed for that already.
        """
        from pagewire_kernels.triton import (
            InvariantWeight,  # triton is loaded only where it is used
        )

        if self.weight is not None:
            self.packed = InvariantWeight(self.weight)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, out_features]."""
        return self.multiply(rows, self.bias)

    def multiply(
        self, rows: Tensor, bias: Tensor | None, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """As `forward`, with another bias; output_dtype: the weight's, or float32."""
        additions = self.additions
        if isinstance(self.packed, NativeWeight):
            deltas = None if additions is None else additions.of_step()
            return self.packed.apply(rows, bias, output_dtype=output_dtype, deltas=deltas)
        product = self._product(rows, bias, output_dtype)
        return product if additions is None else additions.add(product, rows, bias)

    def _product(
        self, rows: Tensor, bias: Tensor | None, output_dtype: torch.dtype | None
    ) -> Tensor:
        """The product with the weight alone."""
        if self.packed is not None:
            return self.packed.apply(rows, bias, output_dtype=output_dtype)
        assert self.weight is not None
        if self._few_rows is not None and self._few_rows.are_few(rows):
            return self._few_rows.multiply(rows, self.weight, bias, output_dtype)
        if bias is None and output_dtype == torch.float32 != rows.dtype and not rows.is_cpu:
            # Sums are float32 anyway. Rounding them to the dtype of the weight would make different
            # logits equal, and need a second pass over the product.
            return torch.mm(rows, self.weight.t(), out_dtype=torch.float32)
        product = nn.functional.linear(rows, self.weight, bias)
        return product if output_dtype is None else product.to(output_dtype)


class _LinearBeforeActivation(Linear):
    """A product that an activation follows."""

    def __init__(
        self,
        in_features: int,
        outputs: Sequence[Shard],
        activation: str,
        kernels: LayerKernels,
        *,
        bias: bool,
        context: ModelContext,
        sources: Sequence[int] | None = None,
    ) -> None:
        """outputs: as for `Linear`; of a gated layer those of G and of U."""
        inputs = Shard.full(in_features)
        super().__init__(inputs, outputs, bias=bias, context=context, sources=sources)
        self._activation = activation
        self._kernels = kernels


class ActivatedLinear(_LinearBeforeActivation):
    """activation(x @ W.T + b)."""

    def forward(self, rows: Tensor) -> Tensor:
        if isinstance(self.packed, NativeWeight):
            deltas = None if self.additions is None else self.additions.of_step()
            return self.packed.apply(rows, self.bias, deltas=deltas, activation=self._activation)
        return self._kernels.activate(super().forward(rows), self._activation)


class GatedLinear(_LinearBeforeActivation):
    """activation(x @ G.T + b) * (x @ U.T + c), where the weight is G, then U."""

    _gated: "NativeGatedWeight | None" = None

    def lay_out(self, weight: Tensor | QuantizedWeight) -> None:
        self._gated = pack_gated(weight, self._context, self._activation)
        if self._gated is not None:
            self.weight = None
        else:
            super().lay_out(weight)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, size]."""
        if self._gated is not None:
            deltas = None if self.additions is None else self.additions.of_step()
            return self._gated.apply(rows, self.bias, deltas)
        has_additions = self.additions is not None and self.additions.is_active
        if self._few_rows is not None and self._few_rows.are_few(rows) and not has_additions:
            return self._few_rows.multiply_gated(rows, self.weight, self.bias, self._activation)
        return self._kernels.act_and_mul(super().forward(rows), self._activation)

    @property
    def native_weight(self) -> NativeWeight | NativeGatedWeight | None:
        return self._gated or super().native_weight


class RowParallelLinear(Linear):
    """y = x @ W.T + b, where each rank has some columns of x and of W; every rank gets y."""

    def __init__(
        self, inputs: Shard, out_features: int, *, bias: bool, context: ModelContext
    ) -> None:
        super().__init__(inputs, [Shard.full(out_features)], bias=bias, context=context)
        self._communicator = context.communicator

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, in_features of this rank]; returns [num_rows, out_features]."""
        if self._inputs.is_full:
            return super().forward(rows)
        total = self._communicator.sum(self.multiply(rows, None))
        return total if self.bias is None else total + self.bias


class FloatLinear(Linear):
    """A product with a float32 weight among weights of fewer bits: it is the sum of weights in
    their dtype, of which three have all the bits of a bfloat16 model's. A weight that needs fewer,
    such as one that was rounded when it was saved, has fewer."""

    _MAX_TERMS = 3

    def __init__(
        self, size: int, num_outputs: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        """size: of the rows."""
        in_float = replace(context, dtype=torch.float32)
        outputs = [Shard.full(num_outputs)]
        super().__init__(Shard.full(size), outputs, bias=False, context=in_float)
        self._num_outputs, self._kernels = num_outputs, kernels
        self._context = context

    def lay_out(self, weight: Tensor | QuantizedWeight) -> None:
        assert isinstance(weight, Tensor), "these are not rounded"
        terms: list[Tensor] = []
        rest = weight
        while not terms or (rest.any() and len(terms) < self._MAX_TERMS):
            terms.append(rest.to(self._context.dtype))
            rest = rest - terms[-1].float()
        super().lay_out(torch.cat(terms))

    def multiply(
        self, rows: Tensor, bias: Tensor | None, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """rows: [num_rows, size]. Returns float32 [num_rows, num_outputs]."""
        assert bias is None
        assert output_dtype == torch.float32
        total, *others = super().multiply(rows, None, output_dtype).split(self._num_outputs, 1)
        for product in others:
            total = self._kernels.add(total, product)
        return total


def float_linear(
    size: int, num_outputs: int, context: ModelContext, kernels: LayerKernels
) -> Linear:
    """A product of rows of this size with a float32 weight, whatever the dtype of the others."""
    if context.dtype != torch.float32:
        return FloatLinear(size, num_outputs, context, kernels)
    return Linear(Shard.full(size), [Shard.full(num_outputs)], bias=False, context=context)
