"""Weights in fewer bits: whole numbers, and for each group of inputs a scale and an offset."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

LINEAR_TABLE = tuple(range(-8, 8))
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
        """Some of the inputs. Raises ValueError unless they are whole groups."""
        first, last = start // self.group_size, -(-stop // self.group_size)
        if first * self.group_size != start or last * self.group_size != stop:
            raise ValueError(
                f"inputs {start} to {stop} are not whole groups of {self.group_size}; expected"
                " shares that are multiples of it"
            )
        offsets = None if self.offsets is None else self.offsets[:, first:last]
        return replace(
            self,
            codes=self.codes[:, start:stop],
            scales=self.scales[:, first:last],
            offsets=offsets,
        )
