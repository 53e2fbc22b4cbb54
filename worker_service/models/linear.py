"""Linear layers: packed on CPUs; plain or batch-invariant on GPUs, with a kernel for few rows.

A quantized weight stays packed if the device has kernels for it, and is dequantized otherwise.
Memory for its dense form is allocated on the host but never written to, so that it is not
committed.

Weights are packed once, after loading, by the C++ kernels, whose products have the same bits for a
row whatever the other rows are. Where these kernels were not built, torch's own `linear` is used,
which is slower and does not guarantee that.

Sharded layers: a column-parallel linear layer is an ordinary one with fewer outputs, those of this
rank's heads or MLP columns. The next layer has these as inputs, and is row-parallel. With one rank,
each layer computes exactly what its ordinary counterpart does.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pagewire_kernels import reference
from pagewire_kernels.cpu import linear as native
from pagewire_kernels.cpu.adapters import ActiveRows, EmbeddingDeltas, NativeDeltas
from pagewire_kernels.cpu.checks import DTYPES
from pagewire_kernels.cpu.experts import NativeExperts, can_pack_experts
from pagewire_kernels.cpu.heads import NativeHeads
from pagewire_kernels.cpu.linear import HugeMemory, NativeGatedWeight, NativeWeight, discard
from pagewire_kernels.cpu.native_library import Library, library
from pagewire_kernels.quantized_weight import GROUP_INPUTS, QuantizedWeight, quantize, stack
from pagewire_kernels.reference import Gate
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.slot_deltas import SlotDeltas
from worker_service.distributed.layout import Shard
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.models.interface import ModelContext, WeightTarget

if TYPE_CHECKING:  # Triton is imported only if it is used
    from pagewire_kernels.triton import TritonExperts

HEAD_ROUNDING = "int8"
"""The format of LM heads, and of embeddings tied to them, if other layers are quantized."""

_NUMBERS_AT_ONCE = 1 << 22
"""Numbers of an embedding that are squared at once."""


class PackedWeight(Protocol):
    """A weight [out_features, in_features] in a layout of its own."""

    out_features: int
    in_features: int

    def apply(
        self, rows: Tensor, bias: Tensor | None = None, *, output_dtype: torch.dtype | None = None
    ) -> Tensor:
        """rows: [num_rows, in_features]; returns [num_rows, out_features].

        output_dtype: the weight's, or float32.
        """
        ...


@runtime_checkable
class PackedTable(PackedWeight, Protocol):
    """A packed weight whose rows can be gathered, as by an embedding."""

    def gather(self, token_ids: Tensor) -> Tensor:
        """Gather rows by token. token_ids: int64 [num_rows]. Returns [num_rows, in_features]."""
        ...


@runtime_checkable
class Packable(Protocol):
    """A module whose weights are laid out for this machine once they are loaded."""

    weight: Tensor | None
    """What is filled; None once it is packed."""

    def pack(self) -> None:
        """Pack the weights, unless they are packed already."""
        ...


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this machine has products of `dtype` with packed weights, quantized or not."""
    return device.type == "cpu" and _native_library(dtype) is not None


def can_pack_codes(weight: QuantizedWeight, context: ModelContext) -> bool:
    """Whether the device has products with this quantized weight."""
    if context.packs_with_triton:
        from pagewire_kernels import triton  # imported only if it is used

        return triton.can_pack_codes(weight)
    return can_pack(context.dtype, context.device) and native.can_pack_codes(weight)


def _obstacle(weight: QuantizedWeight) -> str:
    """The reason why the device has no products with this quantized weight."""
    if weight.group_size == 1:
        return "scattered groups that ranks share, or that differ in one product"
    if weight.group_size % GROUP_INPUTS:
        return f"groups of {weight.group_size} inputs"
    return "no kernels for these codes or this dtype"


def can_stack(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether these weights can be stacked to one product."""
    kinds = {(part.is_float, part.is_float and part.table, part.activations) for part in parts}
    return len(kinds) == 1


def refuse_quantized_rows(parts: Sequence[Tensor | QuantizedWeight], names: Sequence[str]) -> None:
    """Raise UnsupportedModel if a weight that must be dequantized needs quantized activations.

    names: of the layers, for the error message.
    """
    found = [part.activations if isinstance(part, QuantizedWeight) else None for part in parts]
    if any(found):
        raise UnsupportedModel(
            "quantization_config: expected the same 8-bit input_activations, and weights with one"
            f" scale of an output and at most 65536 inputs, for all of {', '.join(names)}, got"
            f" {', '.join(map(str, found))}"
        )


def pack_codes(weight: QuantizedWeight, context: ModelContext) -> PackedWeight:
    """Pack a quantized weight for the device. The memory of the original is freed while packing."""
    if context.packs_with_triton:
        from pagewire_kernels.triton import TritonQuantizedWeight

        return TritonQuantizedWeight(
            weight, context.dtype, context.device, batch_invariant=context.batch_invariant
        )
    return pack(weight, context.dtype, consume=True)


def round_weight(weight: Tensor, quantization: str, *, consume: bool = False) -> QuantizedWeight:
    """Quantize a dense weight to a format of `quantize`.

    consume: whether the memory of the original is freed meanwhile. Raises InvalidOption if no group
    size divides the inputs.
    """
    try:
        return quantize(weight, quantization, discard if consume else None)
    except ValueError as error:
        raise InvalidOption(
            f"quantization: a linear layer of shape {list(weight.shape)} cannot be rounded to"
            f" {quantization}: {error}; leave --quantization out"
        ) from error


def pack(
    weight: Tensor | QuantizedWeight, dtype: torch.dtype | None = None, *, consume: bool = False
) -> PackedWeight:
    """Pack a weight for this CPU; see `can_pack`.

    dtype: of the rows, if the weight is quantized; consume: whether the memory of the original is
    freed meanwhile, if possible.
    """
    if isinstance(weight, Tensor):
        dtype = weight.dtype
    assert dtype is not None
    native_library = _native_library(dtype)
    assert native_library is not None, "can_pack"
    return NativeWeight(weight, native_library, _memory(), dtype, consume=consume)


def pack_gated(
    weight: Tensor | QuantizedWeight, context: ModelContext, activation: str
) -> NativeGatedWeight | None:
    """Pack the stacked weights of gate and up projection, if this machine has a fused kernel with
    the activation; None otherwise. The memory of the originals is freed while packing."""
    native_library = _native_library(context.dtype)
    if native_library is None or not _is_on_cpu(context):
        return None
    return NativeGatedWeight(
        weight, activation, native_library, _memory(), context.dtype, consume=True
    )


def pack_experts(
    gate_up: Sequence[Tensor | QuantizedWeight],
    down: Sequence[Tensor | QuantizedWeight],
    gate: Gate,
    context: ModelContext,
) -> "NativeExperts | TritonExperts | None":
    """Pack the weights of a layer's experts, if the device has kernels for them; None otherwise.
    The memory of the originals is freed while packing. GPUs have dense experts only."""
    if not _is_on_cpu(context) and find_spec("triton") is not None:
        from pagewire_kernels.triton import TritonExperts  # imported only if it is used

        dense_gate_up, dense_down = _stacked(gate_up, context), _stacked(down, context)
        return TritonExperts(
            dense_gate_up, dense_down, gate, batch_invariant=context.batch_invariant
        )
    native_library = _native_library(context.dtype)
    if native_library is None or not _is_on_cpu(context):
        return None
    if not (can_pack_experts(gate_up) and can_pack_experts(down)):
        return None
    return NativeExperts(
        gate_up, down, gate, native_library, _memory(), context.dtype, consume=True
    )


def _stacked(weights: Sequence[Tensor | QuantizedWeight], context: ModelContext) -> Tensor:
    """Dense weights as one tensor on the device: [num_weights, out_features, in_features]."""
    num_outputs, num_inputs = weights[0].shape
    stacked = torch.empty(
        len(weights), num_outputs, num_inputs, dtype=context.dtype, device=context.device
    )
    for target, weight in zip(stacked, weights, strict=True):
        if isinstance(weight, QuantizedWeight):
            context.dequantized["experts on a GPU"] += target.nbytes
            weight = weight.dequantize()
        target.copy_(weight)
    return stacked


def _is_on_cpu(context: ModelContext) -> bool:
    return context.device.type == "cpu" and not context.packs_with_triton


def _native_library(dtype: torch.dtype) -> Library | None:
    return library() if dtype in DTYPES else None


def cpu_arithmetic(dtype: torch.dtype) -> str:
    """The identity of the kernels that compute products and norms of `dtype` on this CPU."""
    if (found := _native_library(dtype)) is not None:
        return found.instruction_set
    return f"torch-{torch.backends.cpu.get_cpu_capability().lower()}"


@cache
def _memory() -> HugeMemory:
    return HugeMemory()


class LinearPart(NamedTuple):
    """The part of a checkpoint's weight in a product of this rank, which may be a stack."""

    source_shape: list[int]
    """Of the checkpoint's weight: [out_features, in_features]."""

    inputs: slice
    """This rank's columns of it."""

    shard: Shard
    """This rank's rows of it."""

    order: Tensor | None
    """The order of these rows in the product; None: the same."""

    outputs: slice
    """Where they are in the product."""

    expert: int | None = None
    """Whose weight it is, if it is an expert's, or a head's."""

    is_transposed: bool = False
    """Whether the checkpoint's weight is [in_features, out_features] to those that adapt it, while
    the shape and all others describe it as [out_features, in_features]."""

    def rows_of(self, matrix: Tensor) -> Tensor:
        """This part of a matrix with a row for each row of the checkpoint's weight."""
        rows = matrix[self.shard.start : self.shard.start + self.shard.size]
        return rows if self.order is None else rows[self.order]


class Additions(Protocol):
    """What is added to the products of a layer, or to the rows of an embedding; see
    `models/adapters.py`."""

    @property
    def is_active(self) -> bool:
        """Whether the present step may have rows to which something is added."""
        ...

    def of_step(self) -> NativeDeltas | None:
        """What the C++ kernels add in the present step; None: nothing."""
        ...

    def add(self, y: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The sum of a product of `x` and what is added in the present step, where the C++ kernels
        do not compute it. x: rows, or the indices of an embedding's; bias: that `y` contains."""
        ...

    def add_of_expert(self, y: Tensor, x: Tensor, expert: int | Tensor, rows: Tensor) -> Tensor:
        """As `add`, for the products of experts, or of heads, in place. expert: of all rows, or of
        each, int64 [n]; rows: of the step, that x has, int64 [n]."""
        ...


class AdaptableLayer(Protocol):
    """A layer that adapters may change."""

    additions: Additions | None
    """What adapters add; None without adapters."""

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """See `Linear.parts`."""
        ...

    def make_deltas(
        self, rows: ActiveRows, max_slots: int, max_rank: int
    ) -> NativeDeltas | SlotDeltas | None:
        """See `Linear.make_deltas`."""
        ...


@runtime_checkable
class ScalableLayer(AdaptableLayer, Protocol):
    """A layer whose sums our kernels can also multiply by a factor for each output."""

    def norms(self, outputs: slice, a: Tensor, b: Tensor) -> Tensor:
        """See `Linear.norms`."""
        ...


def make_slots(
    context: ModelContext,
    outputs: Sequence[slice],
    a_shape: tuple[int, ...],
    max_slots: int,
    max_rank: int,
    num_experts: int = 1,
) -> SlotDeltas | None:
    """Make slots for what adapters add to a layer on a GPU; None elsewhere, and if the layer has no
    parts. The arguments are those of `SlotDeltas`."""
    if _is_on_cpu(context) or not outputs:
        return None
    kernels: ModuleType = reference
    if find_spec("triton") is not None:
        from pagewire_kernels import triton as kernels  # imported only if it is used

    add = kernels.add_embedding_deltas if len(a_shape) == 1 else kernels.add_deltas
    return SlotDeltas(outputs, a_shape, max_slots, max_rank, add, context.empty(0), num_experts)


class HeadsProduct:
    """The products of the heads of rows, each with a weight of its own, packed for the device."""

    def __init__(
        self,
        weights: Tensor,
        context: ModelContext,
        named_parts: Sequence[tuple[str, LinearPart]] = (),
    ) -> None:
        """weights: [num_heads, out_features, in_features]; named_parts: see `parts`."""
        self._named_parts, self._context = named_parts, context
        native_library = _native_library(context.dtype)
        self._packed: NativeHeads | None = None
        if native_library is not None and _is_on_cpu(context):
            self._packed = NativeHeads(weights, native_library, _memory())
        else:
            self._weights = weights.to(context.device).contiguous()
        self.additions: Additions | None = None
        """What adapters add to the products."""

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """As `Linear.parts`; a part's head is its `expert`."""
        yield from self._named_parts

    def make_deltas(
        self, rows: ActiveRows, max_slots: int, max_rank: int
    ) -> NativeDeltas | SlotDeltas | None:
        """As `Linear.make_deltas`."""
        if self._packed is not None:
            return self._packed.make_deltas(rows, max_slots, max_rank)
        num_heads, size, num_inputs = self._weights.shape
        outputs, a_shape = [slice(0, size)], (1, num_inputs)
        return make_slots(self._context, outputs, a_shape, max_slots, max_rank, num_heads)

    def apply(self, x: Tensor, num_spare: int = 0) -> Tensor:
        """See `NativeHeads.apply`."""
        additions = self.additions
        if self._packed is not None:
            deltas = None if additions is None else additions.of_step()
            return self._packed.apply(x, num_spare, deltas)
        num_heads, size, _ = self._weights.shape
        num_rows, of_heads = x.shape[0], x.transpose(0, 1)
        if self._context.needs_fixed_products:
            from pagewire_kernels.triton import linear  # imported only if it is used

            pairs = zip(of_heads, self._weights, strict=True)
            product = torch.stack([linear(rows.contiguous(), weight) for rows, weight in pairs])
        else:
            product = torch.bmm(of_heads, self._weights.mT)
        if additions is not None and additions.is_active:
            heads, rows = (torch.arange(n, device=x.device) for n in (num_heads, num_rows))
            additions.add_of_expert(
                product.view(-1, size),
                of_heads.flatten(0, 1),
                heads.repeat_interleave(num_rows),
                rows.repeat(num_heads),
            )
        y = x.new_empty(num_rows, num_heads, size + num_spare)
        y[:, :, :size] = product.transpose(0, 1)
        return y


class Linear(nn.Module):
    """y = x @ W.T + b. The weight may be a stack of several weights."""

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
        for columns in torch.arange(num_inputs).split(max(1, _NUMBERS_AT_ONCE // num_inputs)):
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
        """Pack the weight for this machine once it is loaded; the original is freed."""
        weight = self.loaded()
        if weight is not None:
            self.lay_out(weight)

    def lay_out(self, weight: Tensor | QuantizedWeight) -> None:
        """Pack what `loaded` returned."""
        context, self.weight = self._context, None
        if isinstance(weight, QuantizedWeight):
            self.packed = pack_codes(weight, context)
        elif _is_on_cpu(context) and can_pack(weight.dtype, context.device):
            self.packed = pack(weight, consume=True)
        else:
            self.weight = weight.to(context.device)
            if context.device.type == "cuda" and not context.batch_invariant:
                self.use_few_rows_kernels()

    def loaded(self) -> Tensor | QuantizedWeight | None:
        """The whole weight, quantized if there are kernels for that; None once it is packed."""
        if self.weight is None:
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
            self._context.dequantized[_obstacle(stacked)] += self.weight.nbytes
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


class VocabEmbedding(nn.Module):
    """Rows of a table by token, where each rank has the rows of some tokens."""

    def __init__(
        self, vocab_size: int, size: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__()
        self.shard = context.communicator.layout.vocab_shard(vocab_size)
        self._size = size
        num_rows = context.communicator.layout.vocab_rows(vocab_size)
        self.weight: Tensor | None = context.empty_weight(num_rows, size)
        self.weight[self.shard.size :] = 0
        self.packed: PackedTable | None = None
        self.kept: QuantizedWeight | None = None
        """The quantized table, until it is packed."""

        self.additions: Additions | None = None
        """What adapters add to its rows."""

        self._name = ""
        self.can_adapt = True
        """Whether adapters may change it."""

        self.is_shared = False
        """Whether the LM head is tied to this table, and packs it for both."""

        self._context = context
        self._kernels = kernels
        self._communicator = context.communicator

    def table_target(self, name: str) -> WeightTarget:
        """Destination of the table called `name`."""
        assert self.weight is not None
        self._name, table = name, self.weight[: self.shard.size]
        rounding = HEAD_ROUNDING if self.is_shared and self._context.quantization else None
        return WeightTarget(name, table, shard=self.shard, keep=self._keep, rounding=rounding)

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """As `Linear.parts`, where a token is an input."""
        columns = slice(self.shard.start, self.shard.start + self.shard.size)
        rows = Shard.full(self._size)
        part = LinearPart([rows.size, self.shard.total], columns, rows, None, slice(0, rows.size))
        yield self._name.removesuffix(".weight"), part

    def make_deltas(
        self, rows: ActiveRows, max_slots: int, max_rank: int
    ) -> NativeDeltas | SlotDeltas | None:
        """As `Linear.make_deltas`."""
        native_library, dtype = _native_library(self._context.dtype), self._context.dtype
        if native_library is None or not _is_on_cpu(self._context):
            outputs, a_shape = [slice(0, self._size)], (max(1, self.shard.size),)
            return make_slots(self._context, outputs, a_shape, max_slots, max_rank)
        sizes = self._size, self.shard.size
        return EmbeddingDeltas(*sizes, rows, max_slots, max_rank, native_library, dtype)

    def norms(self, outputs: slice, a: Tensor, b: Tensor) -> Tensor:
        """As `Linear.norms`: over all tokens, for each number of a row."""
        squares, tokens_of_all = torch.zeros_like(b[:, 0]), torch.arange(self.shard.size)
        for tokens in tokens_of_all.to(b.device).split(max(1, _NUMBERS_AT_ONCE // len(b))):
            rows = self._plain_rows(tokens)[:, outputs].float()
            squares += (rows + (b @ a[:, tokens]).t()).square_().sum(dim=0)
        return squares.sqrt_()

    def _keep(self, part: QuantizedWeight) -> None:
        assert self.weight is not None
        part = part.in_order()
        if self.is_shared:
            self.kept = part.padded(self.weight.shape[0])
        elif can_pack_codes(part, self._context):
            self.share(pack_codes(part, self._context), None)
        else:
            self._context.dequantized[_obstacle(part)] += self.weight.nbytes
            self.weight[: self.shard.size] = part.dequantize()

    def pack(self) -> None:
        """Pack the table for this machine once it is loaded, unless a tied head does."""
        if self.weight is not None and not self.is_shared:
            self.weight = self.weight.to(self._context.device)

    def share(self, packed: PackedWeight | None, weight: Tensor | None) -> None:
        """Use the head's copy of the table if rows can be gathered from it; this one is freed."""
        if isinstance(packed, PackedTable):
            self.packed, self.weight = packed, None
        elif weight is not None:
            self.weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens]; returns [num_tokens, size]."""
        if self.shard.is_full:
            return self._rows(token_ids)
        rows = token_ids - self.shard.start
        is_ours = (rows >= 0) & (rows < self.shard.size)
        found = self._rows(torch.where(is_ours, rows, 0))
        # One rank has the row and the others have zeros, so the sum is exact.
        return self._communicator.sum(found.masked_fill_(~is_ours.unsqueeze(1), 0))

    def _plain_rows(self, indices: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.gather(indices)
        assert self.weight is not None
        return self._kernels.embed(self.weight, indices)

    def _rows(self, indices: Tensor) -> Tensor:
        rows = self._plain_rows(indices)
        if self.additions is None:
            return rows
        deltas = self.additions.of_step()
        if not isinstance(deltas, EmbeddingDeltas):
            return self.additions.add(rows, indices)
        deltas.add(rows, indices)
        return rows


class VocabHead(Linear):
    """Logits from hidden states, where each rank has the rows of some tokens."""

    def __init__(
        self,
        vocab_size: int,
        size: int,
        context: ModelContext,
        tied_to: VocabEmbedding | None,
        *,
        bias: bool = False,
    ) -> None:
        """tied_to: the embedding that shares its table with the head, if this rank has it."""
        layout = context.communicator.layout
        rows = Shard.full(layout.vocab_rows(vocab_size))
        table = None if tied_to is None else tied_to.weight
        super().__init__(Shard.full(size), [rows], bias=bias, context=context, weight=table)
        self.shard = layout.vocab_shard(vocab_size)
        self._tied_to = [] if tied_to is None else [tied_to]  # in a list: not a module of its own
        if tied_to is not None:
            tied_to.is_shared = True
        else:
            assert self.weight is not None
            self.weight[self.shard.size :] = 0
        if self.bias is not None:
            self.bias[self.shard.size :] = 0
        if self._quantization is not None:
            self._quantization = HEAD_ROUNDING
        self._communicator = context.communicator

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """As `Linear.parts`. Its name is the same if it is tied to the embedding, which an adapter
        changes on its own."""
        rows, columns = self.shard, slice(0, self._inputs.size)
        shape = [rows.total, self._inputs.total]
        yield "lm_head", LinearPart(shape, columns, rows, None, slice(0, rows.size))

    def pack(self) -> None:
        """As `Linear.pack`; a tied embedding uses the packed table, too."""
        for embedding in self._tied_to:
            if embedding.kept is not None:
                self._kept[0], embedding.kept = embedding.kept, None
        super().pack()
        for embedding in self._tied_to:
            embedding.share(self.packed, self.weight)

    def table_target(self, name: str) -> WeightTarget:
        """Destination of the weight called `name`."""
        assert self.weight is not None
        num_rows, self._names = self.weight.shape[0], (name,)

        def keep(part: QuantizedWeight) -> None:
            self._kept[0] = part.padded(num_rows)

        table = self.weight[: self.shard.size]
        rounding = self._quantization
        return WeightTarget(name, table, shard=self.shard, keep=keep, rounding=rounding)

    def bias_targets(self, name: str) -> Iterator[WeightTarget]:
        """Destination of the bias called `name`, if there is one."""
        if self.bias is not None:
            yield WeightTarget(name, self.bias[: self.shard.size], shard=self.shard)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, size]; returns float32 [num_rows, vocab_size] on the rank that samples,
        and zeros on those that share its layers."""
        logits = self.multiply(rows, self.bias, torch.float32)
        if self.shard.is_full:
            return logits
        # Only the last ranks' rows are padded, so the padding is at the end.
        return self._communicator.gather_columns(logits, self.shard.total)
