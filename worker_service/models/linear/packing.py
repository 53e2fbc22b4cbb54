"""Packing weights, quantized or not, for the device.

A quantized weight stays packed if the device has kernels for it, and is dequantized otherwise.
Memory for its dense form is allocated on the host but never written to, so that it is not
committed.

Weights are packed once, after loading, by the C++ kernels, whose products have the same bits for a
row whatever the other rows are. Where these kernels were not built, torch's own `linear` is used,
which is slower and does not guarantee that.
"""

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from pagewire_kernels.cpu import linear as native
from pagewire_kernels.cpu.checks import DTYPES
from pagewire_kernels.cpu.experts import NativeExperts, can_pack_experts
from pagewire_kernels.cpu.linear import HugeMemory, NativeGatedWeight, NativeWeight, discard
from pagewire_kernels.cpu.native_library import Library, library
from pagewire_kernels.quantized_weight import GROUP_INPUTS, QuantizedWeight, quantize
from pagewire_kernels.reference import Gate
from worker_service.errors import InvalidOption, UnsupportedModel
from worker_service.models.interface import ModelContext

if TYPE_CHECKING:  # Triton is imported only if it is used
    from pagewire_kernels.triton import TritonExperts


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
    return device.type == "cpu" and library_of(dtype) is not None


def can_pack_codes(weight: QuantizedWeight, context: ModelContext) -> bool:
    """Whether the device has products with this quantized weight."""
    if context.packs_with_triton:
        from pagewire_kernels import triton  # imported only if it is used

        return triton.can_pack_codes(weight)
    return can_pack(context.dtype, context.device) and native.can_pack_codes(weight)


def obstacle(weight: QuantizedWeight) -> str:
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
    native_library = library_of(dtype)
    assert native_library is not None, "can_pack"
    return NativeWeight(weight, native_library, huge_memory(), dtype, consume=consume)


def pack_gated(
    weight: Tensor | QuantizedWeight, context: ModelContext, activation: str
) -> NativeGatedWeight | None:
    """Pack the stacked weights of gate and up projection, if this machine has a fused kernel with
    the activation; None otherwise. The memory of the originals is freed while packing."""
    native_library = cpu_library(context)
    if native_library is None:
        return None
    return NativeGatedWeight(
        weight, activation, native_library, huge_memory(), context.dtype, consume=True
    )


def pack_experts(
    gate_up: Sequence[Tensor | QuantizedWeight],
    down: Sequence[Tensor | QuantizedWeight],
    gate: Gate,
    context: ModelContext,
) -> "NativeExperts | TritonExperts | None":
    """Pack the weights of a layer's experts, if the device has kernels for them; None otherwise.
    The memory of the originals is freed while packing. GPUs have dense experts only."""
    if not is_on_cpu(context) and find_spec("triton") is not None:
        from pagewire_kernels.triton import TritonExperts  # imported only if it is used

        dense_gate_up, dense_down = _stacked(gate_up, context), _stacked(down, context)
        return TritonExperts(
            dense_gate_up, dense_down, gate, batch_invariant=context.batch_invariant
        )
    native_library = cpu_library(context)
    if native_library is None or not (can_pack_experts(gate_up) and can_pack_experts(down)):
        return None
    return NativeExperts(
        gate_up, down, gate, native_library, huge_memory(), context.dtype, consume=True
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


def is_on_cpu(context: ModelContext) -> bool:
    return context.device.type == "cpu" and not context.packs_with_triton


def library_of(dtype: torch.dtype) -> Library | None:
    return library() if dtype in DTYPES else None


def cpu_library(context: ModelContext) -> Library | None:
    """The C++ kernels, if there are any for the products of a model; None elsewhere."""
    return library_of(context.dtype) if is_on_cpu(context) else None


def cpu_arithmetic(dtype: torch.dtype) -> str:
    """The identity of the kernels that compute products and norms of `dtype` on this CPU."""
    if (found := library_of(dtype)) is not None:
        return found.instruction_set
    return f"torch-{torch.backends.cpu.get_cpu_capability().lower()}"


@cache
def huge_memory() -> HugeMemory:
    return HugeMemory()
