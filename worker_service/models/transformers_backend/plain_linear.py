"""Linear layers that torch computes, as on GPUs, with what adapters add to them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pagewire_kernels.cpu.adapters import ActiveRows
from pagewire_kernels.slot_deltas import SlotDeltas
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext
from worker_service.models.linear.additions import Additions, LinearPart, make_slots

_NUMBERS_AT_ONCE = 1 << 24
"""Numbers of a weight that are squared at once."""


class PlainLinear:
    """What adapters may change of an `nn.Linear`, which stays the module of its model: its output
    is changed as it returns. Implements `linear.ScalableLayer`."""

    def __init__(self, linear: nn.Linear, name: str, context: ModelContext) -> None:
        """name: of the module in the model."""
        self.additions: Additions | None = None
        self._linear, self._name, self._context = linear, name, context
        linear.register_forward_hook(self._changed)

    def _changed(self, linear: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        """The output with what adapters add; None: as it is."""
        if self.additions is None or not self.additions.is_active:
            return None
        rows = inputs[0].reshape(-1, self._linear.in_features)
        product = output.reshape(-1, self._linear.out_features)
        return self.additions.add(product, rows, self._linear.bias).view_as(output)

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """As `linear.Linear.parts`."""
        yield self._name, whole_part(self._linear)

    def make_deltas(self, rows: ActiveRows, max_slots: int, max_rank: int) -> SlotDeltas | None:
        """As `linear.Linear.make_deltas`."""
        outputs, a_shape = [slice(0, self._linear.out_features)], (1, self._linear.in_features)
        return make_slots(self._context, outputs, a_shape, max_slots, max_rank)

    def norms(self, outputs: slice, a: Tensor, b: Tensor) -> Tensor:
        """As `linear.Linear.norms`."""
        weight = self._linear.weight[outputs]
        at_once = max(1, _NUMBERS_AT_ONCE // weight.shape[1])
        pairs = zip(weight.split(at_once), b.split(at_once), strict=True)
        return torch.cat([(rows.float() + of_rows @ a).norm(dim=1) for rows, of_rows in pairs])


def whole_part(linear: Any) -> LinearPart:
    """The whole weight of a linear layer that no rank shares and no other is stacked with."""
    outputs, inputs = Shard.full(linear.out_features), slice(0, linear.in_features)
    shape = [linear.out_features, linear.in_features]
    return LinearPart(shape, inputs, outputs, None, slice(0, linear.out_features))
