"""Weights in fewer bits: whole numbers, and for each group of inputs a scale and an offset."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

SIGNED_TABLE = tuple(range(-8, 8))
"""What the codes of a symmetric 4-bit weight mean."""

UNSIGNED_TABLE = tuple(range(16))
"""What the codes of a 4-bit weight with offsets usually mean."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight [out_features, in_features]: value(code) * scale + offset, in groups of inputs.

    Every format of checkpoints becomes this when it is read, without rounding: the scales and the
    offsets are those of the format's own arithmetic in float32.
    """

    codes: Tensor
    """uint8 [out_features, in_features]"""

    scales: Tensor
    """float32 [out_features, num_groups]; a group has `in_features / num_groups` inputs"""

    offsets: Tensor | None = None
    """float32 [out_features, num_groups]; None: zeros"""

    table: tuple[int, ...] | None = None
    """The values, -128 to 127, of codes 0 to 15; None: codes are the bytes of int8 numbers"""

    @property
    def bits(self) -> int:
        """Of a code: 4 or 8."""
        return 8 if self.table is None else 4

    @property
    def shape(self) -> list[int]:
        """[out_features, in_features]"""
        return list(self.codes.shape)

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> Tensor:
        """What the codes mean: int8 [out_features, in_features]."""
        if self.table is None:
            return self.codes.view(torch.int8)
        return torch.tensor(self.table, dtype=torch.int8)[self.codes.int()]

    def dequantize(self) -> Tensor:
        """float32 [out_features, in_features]"""
        groups = self.values().float().unflatten(1, (-1, self.group_size))
        groups *= self.scales.unsqueeze(2)
        if self.offsets is not None:
            groups += self.offsets.unsqueeze(2)
        return groups.flatten(1)

    def rows(self, index: slice | Tensor) -> "QuantizedWeight":
        """Some of the outputs."""
        offsets = None if self.offsets is None else self.offsets[index]
        return replace(self, codes=self.codes[index], scales=self.scales[index], offsets=offsets)

    def columns(self, start: int, stop: int) -> "QuantizedWeight":
        """Some of the inputs; their groups are smaller if `start` or `stop` is within one."""
        whole = self.regrouped(math.gcd(self.group_size, start, stop))
        groups = slice(start // whole.group_size, stop // whole.group_size)
        offsets = None if whole.offsets is None else whole.offsets[:, groups]
        codes, scales = whole.codes[:, start:stop], whole.scales[:, groups]
        return replace(whole, codes=codes, scales=scales, offsets=offsets)

    def regrouped(self, group_size: int) -> "QuantizedWeight":
        """The same with smaller groups; group_size: divides the weight's."""
        times = self.group_size // group_size
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, dim=1)
        return replace(self, scales=self.scales.repeat_interleave(times, dim=1), offsets=offsets)

    def padded(self, num_rows: int) -> "QuantizedWeight":
        """With outputs of zeros after its own, `num_rows` in all."""
        more = (0, 0, 0, num_rows - self.codes.shape[0])
        offsets = None if self.offsets is None else nn.functional.pad(self.offsets, more)
        return replace(
            self,
            codes=nn.functional.pad(self.codes, more),
            scales=nn.functional.pad(self.scales, more),
            offsets=offsets,
        )


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """The outputs of several weights with the same inputs, one after the other.

    Without rounding: of different groups, the smaller ones are taken, and codes become numbers of
    8 bits where the parts' codes mean different values.
    """
    table = parts[0].table
    if any(part.table != table for part in parts):
        table = None
    group_size = math.gcd(*(part.group_size for part in parts))
    parts = [part.regrouped(group_size) for part in parts]
    codes = [part.values().view(torch.uint8) if table is None else part.codes for part in parts]
    offsets = None
    if any(part.offsets is not None for part in parts):
        offsets = torch.cat(
            [torch.zeros_like(p.scales) if p.offsets is None else p.offsets for p in parts]
        )
    scales = torch.cat([part.scales for part in parts])
    return QuantizedWeight(codes=torch.cat(codes), scales=scales, offsets=offsets, table=table)


GROUP_SIZES = (128, 64, 32)
"""Of weights that are rounded here, the largest that divides the inputs."""


def quantize(weight: Tensor, quantization: str) -> QuantizedWeight:
    """A weight rounded to the nearest of `int8` or `int4` numbers, in groups of its inputs.

    weight: [out_features, in_features]. Numbers of 8 bits are multiples of the scale; those of 4
    bits begin at the group's least number. Scales and offsets are float16 numbers. Raises
    ValueError if no group divides the inputs.
    """
    in_features = weight.shape[1]
    size = next((size for size in GROUP_SIZES if in_features % size == 0), None)
    if size is None:
        raise ValueError(
            f"expected layers with a multiple of {GROUP_SIZES[-1]} inputs, got {in_features}"
        )
    groups = weight.float().unflatten(1, (-1, size))
    least, most = groups.amin(dim=2), groups.amax(dim=2)
    if quantization == "int8":
        scales = _above_zero(torch.maximum(-least, most) / 127)
        codes = (groups / scales.unsqueeze(2)).round_().clamp_(-127, 127)
        return QuantizedWeight(
            codes=codes.flatten(1).to(torch.int8).view(torch.uint8), scales=scales
        )
    offsets = least.half().float()
    scales = _above_zero((most - offsets) / 15)
    codes = ((groups - offsets.unsqueeze(2)) / scales.unsqueeze(2)).round_().clamp_(0, 15)
    return QuantizedWeight(
        codes=codes.flatten(1).to(torch.uint8), scales=scales, offsets=offsets, table=UNSIGNED_TABLE
    )


def _above_zero(scales: Tensor) -> Tensor:
    """Rounded to float16; of a group of equal numbers, the least positive one."""
    least = torch.finfo(torch.float16).smallest_normal
    return scales.clamp(min=least).half().float()
