"""Quantized weights: codes of 8 or 4 bits, with a scale and an offset per group of inputs."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SIGNED_TABLE = tuple(range(-8, 8))
"""The values of the codes of a symmetric 4-bit weight."""

UNSIGNED_TABLE = tuple(range(16))
"""The usual values of the codes of a 4-bit weight with offsets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Activations:
    """How a weight's inputs are quantized to 8 bits, -128 to 127, before the product (W8A8).

    The arithmetic is that of the compressed-tensors library, in float32: a code is
    `round(x / scale + zero_point)`, rounded to nearest, ties to even.
    """

    symmetric: bool = True
    """Whether the zero point of a row is 0. If so, a dynamic scale is derived from the row's
    largest absolute value, otherwise from its range."""

    scale: float | None = None
    """The static scale of all rows; None: each row has a dynamic scale and zero point."""

    zero_point: int = 0
    """The static zero point of all rows, -128 to 127."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features]: value(code) * scale + offset, in groups of inputs.

    All checkpoint formats are converted to this without rounding: scales and offsets are those of
    the format's own arithmetic in float32. Formats with two levels of scales (GGUF's K-quants) have
    them as integer multiples of a unit, which several groups share.
    """

    codes: Tensor
    """uint8 [out_features, in_features]"""

    scales: Tensor
    """float32 [out_features, num_groups]; a group has in_features / num_groups inputs"""

    offsets: Tensor | None = None
    """float32 [out_features, num_groups]; None: zeros"""

    units: Tensor | None = None
    """Units of the scales: float32 [out_features, num_units], representable in float16. With units,
    scales and offsets are integers representable in int8. None: all units are 1."""

    offset_units: Tensor | None = None
    """Units of the offsets, like `units`."""

    table: tuple[float, ...] | None = None
    """The values of codes 0 to 15: whole numbers, -128 to 127, or with `is_float` any numbers of
    float32; None: codes are the bytes of int8 or float8_e4m3fn numbers"""

    is_float: bool = False
    """Whether values are floats."""

    order: Tensor | None = None
    """int64 [in_features]: the input of each column; None: columns are in the order of the inputs.
    Columns are sorted by group if a format's groups are not consecutive inputs."""

    activations: Int8Activations | None = None
    """How inputs are quantized before the product; None: they are not."""

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 8 if self.table is None else 4

    @property
    def shape(self) -> list[int]:
        """[out_features, in_features]"""
        return list(self.codes.shape)

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> Tensor:
        """The values of the codes: int8, float8_e4m3fn or, of a table of floats, float32
        [out_features, in_features]."""
        if self.table is None:
            return self.codes.view(torch.float8_e4m3fn if self.is_float else torch.int8)
        dtype = torch.float32 if self.is_float else torch.int8
        table = torch.tensor(self.table, dtype=dtype, device=self.codes.device)
        return table[self.codes.int()]

    def dequantize(self) -> Tensor:
        """Return the dense weight: float32 [out_features, in_features]."""
        whole = self.without_units()
        groups = whole.values().float().unflatten(1, (-1, whole.group_size))
        groups *= whole.scales.unsqueeze(2)
        if whole.offsets is not None:
            groups += whole.offsets.unsqueeze(2)
        dense = groups.flatten(1)
        return dense if self.order is None else dense[:, self.order.argsort()]

    def without_units(self) -> "QuantizedWeight":
        """The same weight, with scales and offsets multiplied by their units."""
        if self.units is None:
            return self
        times = self.scales.shape[1] // self.units.shape[1]
        scales, offsets = self.scales * self.units.repeat_interleave(times, dim=1), self.offsets
        if offsets is not None and self.offset_units is not None:
            offsets = offsets * self.offset_units.repeat_interleave(times, dim=1)
        return replace(self, scales=scales, offsets=offsets, units=None, offset_units=None)

    def in_order(self) -> "QuantizedWeight":
        """The same weight with its columns in the order of the inputs. If they have another order,
        each input becomes a group of its own, which no kernel supports."""
        if self.order is None:
            return self
        places = self.order.argsort()
        single = replace(self.without_units().regrouped(1), order=None)
        return single._changed(lambda tensor: tensor[:, places])

    def rows(self, index: slice | Tensor) -> "QuantizedWeight":
        """The rows of some outputs."""
        return self._changed(lambda tensor: tensor[index])

    def columns(self, start: int, stop: int) -> "QuantizedWeight":
        """The columns of the inputs from `start` to `stop`. Groups become smaller if `start` or
        `stop` is within one, and have one input each if columns are not in the order of inputs."""
        if self.order is not None:
            return self.in_order().columns(start, stop)
        in_features = self.codes.shape[1]
        if self.units is not None and math.gcd(start, stop) % (in_features // self.units.shape[1]):
            return self.without_units().columns(start, stop)

        def cut(tensor: Tensor) -> Tensor:
            inputs = in_features // tensor.shape[1]
            return tensor[:, start // inputs : stop // inputs]

        return self.regrouped(math.gcd(self.group_size, start, stop))._changed(cut)

    def reordered(self, order: Tensor) -> "QuantizedWeight":
        """The columns in another order, without rounding. order: the place here of each column of
        the result. Groups and units become smaller if runs of consecutive columns are."""
        in_features = len(order)
        starts = (order.diff() != 1).nonzero().flatten() + 1
        size = math.gcd(in_features, int(order[0]), *starts.tolist(), *order[starts].tolist())
        weight = self.regrouped(math.gcd(self.group_size, size))
        if self.units is not None:
            unit = in_features // self.units.shape[1]
            times = unit // math.gcd(unit, size)
            units = self.units.repeat_interleave(times, dim=1)
            offset_units = self.offset_units
            if offset_units is not None:
                offset_units = offset_units.repeat_interleave(times, dim=1)
            weight = replace(weight, units=units, offset_units=offset_units)

        def permute(tensor: Tensor) -> Tensor:
            step = in_features // tensor.shape[1]
            return tensor[:, order[::step] // step]

        return weight._changed(permute)

    def regrouped(self, group_size: int) -> "QuantizedWeight":
        """The same weight with smaller groups; group_size: a divisor of the weight's."""
        times = self.group_size // group_size
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, dim=1)
        return replace(self, scales=self.scales.repeat_interleave(times, dim=1), offsets=offsets)

    def padded(self, num_rows: int) -> "QuantizedWeight":
        """The weight with rows of zeros appended, up to `num_rows` rows."""
        if num_rows == self.codes.shape[0]:
            return self
        more = (0, 0, 0, num_rows - self.codes.shape[0])
        return self._changed(lambda tensor: nn.functional.pad(tensor, more))

    def to(self, device: torch.device) -> "QuantizedWeight":
        """The same weight on another device."""
        return self._changed(lambda tensor: tensor.to(device))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> "QuantizedWeight":
        """The weight with `change` applied to all tensors."""
        found = {name: getattr(self, name) for name in _TENSORS}
        changed: dict[str, Any] = {n: None if t is None else change(t) for n, t in found.items()}
        return replace(self, **changed)


def assemble(slices: Iterable[QuantizedWeight], num_rows: int) -> QuantizedWeight:
    """Concatenate slices of rows to a weight of `num_rows` rows.

    Each slice is freed before the next one is made. Slices may differ only in their rows. Memory of
    the result is committed as slices fill it, while they may free memory of their source.
    """
    whole, first = None, 0
    for part in slices:
        rows = slice(first, first + part.codes.shape[0])
        if whole is None:
            if rows.stop == num_rows:
                return part
            whole = part._changed(lambda tensor: tensor.new_empty(num_rows, tensor.shape[1]))
        for name in _TENSORS:
            if (numbers := getattr(whole, name)) is not None:
                _copy(getattr(part, name), numbers[rows])
        first = rows.stop
    assert whole is not None
    return whole


def _copy(source: Tensor, target: Tensor) -> None:
    """Copy numbers on one thread: a slice takes torch's threads longer to start, above all where
    others use the same cores."""
    if source.is_cpu and target.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate the rows of several weights with the same inputs, without rounding.

    `is_float`, tables of floats and `activations` must be equal. If group sizes differ, the smaller
    groups are used; if tables differ, codes become 8-bit integers; if the orders of columns differ,
    each input becomes a group of its own.
    """
    if len(parts) == 1:
        return parts[0]
    if not all(_have_same_order(parts[0], part) for part in parts):
        parts = [part.in_order() for part in parts]
    if len({_layout(part) for part in parts}) > 1:
        parts = [part.without_units() for part in parts]
        group_size = math.gcd(*(part.group_size for part in parts))
        parts = [part.regrouped(group_size) for part in parts]
        if any(part.offsets is not None for part in parts):
            zeros = torch.zeros_like
            parts = [replace(p, offsets=zeros(p.scales)) if p.offsets is None else p for p in parts]
        if len({part.table for part in parts}) > 1:
            parts = [replace(p, codes=p.values().view(torch.uint8), table=None) for p in parts]
    first, rest = parts[0], parts[1:]
    names = [name for name in _TENSORS if getattr(first, name) is not None]
    joined: dict[str, Any] = {
        name: torch.cat([getattr(first, name), *(getattr(part, name) for part in rest)])
        for name in names
    }
    return replace(first, **joined)


def _have_same_order(one: QuantizedWeight, other: QuantizedWeight) -> bool:
    if one.order is None or other.order is None:
        return one.order is other.order
    return one.order.equal(other.order)


_TENSORS = ("codes", "scales", "offsets", "units", "offset_units")


def _layout(weight: QuantizedWeight) -> tuple[object, ...]:
    """Equal for weights whose tensors can be concatenated."""
    tensors = (getattr(weight, name) for name in _TENSORS)
    return weight.table, *(None if tensor is None else tensor.shape[1] for tensor in tensors)


GROUP_INPUTS = 16
"""Kernels require group sizes that are multiples of this."""

GROUP_SIZES = (128, 64, 32)
"""Group sizes of `quantize`: it uses the largest one that divides the inputs, unless an output has
one scale."""

_AT_ONCE = 1 << 18
"""Numbers of a weight that are converted at once, which takes several times their memory."""

_LARGEST_FP8 = torch.finfo(torch.float8_e4m3fn).max


def slices_of_rows(num_rows: int, in_features: int) -> Iterator[slice]:
    """Divide the rows of a weight into slices that take little memory to convert."""
    step = max(1, _AT_ONCE // in_features)
    for first in range(0, num_rows, step):
        yield slice(first, min(first + step, num_rows))


def choose_group_size(in_features: int, quantization: str) -> int:
    """The group size of `quantize`. Raises ValueError if none divides the inputs."""
    size = next((size for size in GROUP_SIZES if in_features % size == 0), None)
    if size is None:
        raise ValueError(
            f"expected a multiple of {GROUP_SIZES[-1]} input features, got {in_features}"
        )
    return in_features if quantization == "w8a8" else size


def quantize(
    weight: Tensor, quantization: str, done_with: Callable[[Tensor], None] | None = None
) -> QuantizedWeight:
    """Quantize a weight to `int8`, `int4`, `fp8` or `w8a8`, rounding to nearest, in groups of
    inputs.

    weight: [out_features, in_features]. `int8` is symmetric, `int4` has an offset, the group's
    smallest number, `fp8` is float8_e4m3fn, and `w8a8` is `int8` with one scale per output and
    inputs that are quantized by `Int8Activations`. Scales and offsets are representable in float16.
    done_with: called with slices of the weight that are no longer needed. Raises ValueError if no
    group size divides the inputs.
    """
    num_rows, in_features = weight.shape
    size = choose_group_size(in_features, quantization)

    def rounded() -> Iterator[QuantizedWeight]:
        for rows in slices_of_rows(num_rows, in_features):
            yield _quantize(weight[rows], size, quantization)
            if done_with is not None:
                done_with(weight[rows])

    return assemble(rounded(), num_rows)


def _quantize(rows: Tensor, group_size: int, quantization: str) -> QuantizedWeight:
    groups = rows.float().unflatten(1, (-1, group_size))
    least, most = groups.amin(dim=2), groups.amax(dim=2)
    if quantization == "fp8":
        scales = _above_zero(torch.maximum(-least, most) / _LARGEST_FP8)
        multiples = (groups / scales.unsqueeze(2)).clamp_(-_LARGEST_FP8, _LARGEST_FP8)
        codes = multiples.flatten(1).to(torch.float8_e4m3fn).view(torch.uint8)
        return QuantizedWeight(codes=codes, scales=scales, is_float=True)
    if quantization in ("int8", "w8a8"):
        scales = _above_zero(torch.maximum(-least, most) / 127)
        codes = (groups / scales.unsqueeze(2)).round_().clamp_(-127, 127)
        return QuantizedWeight(
            codes=codes.flatten(1).to(torch.int8).view(torch.uint8),
            scales=scales,
            activations=Int8Activations() if quantization == "w8a8" else None,
        )
    offsets = least.half().float()
    scales = _above_zero((most - offsets) / 15)
    codes = ((groups - offsets.unsqueeze(2)) / scales.unsqueeze(2)).round_().clamp_(0, 15)
    return QuantizedWeight(
        codes=codes.flatten(1).to(torch.uint8), scales=scales, offsets=offsets, table=UNSIGNED_TABLE
    )


def _above_zero(scales: Tensor) -> Tensor:
    """Round scales to float16: subnormal ones up, since few bits of theirs are left, and the
    largest code would not reach the largest number; zeros (a group of equal numbers) become the
    smallest number above zero."""
    facts = torch.finfo(torch.float16)
    smallest = facts.smallest_normal * facts.eps
    subnormal = (scales / smallest).ceil().clamp(min=1) * smallest
    return torch.where(scales < facts.smallest_normal, subnormal, scales.half().float())
