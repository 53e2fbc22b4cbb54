"""Packing while loading, so that a model is never in memory twice.

A linear layer is packed the moment its weight is complete, and its original freed. So at the peak
there is the packed model and one layer more, not the model in both forms.
"""

from collections import Counter, defaultdict

from torch import Tensor

from worker_service.models.linear import Linear
from worker_service.models.native import NativeModel, WeightSlot


class EagerPacking:
    """Counts what each weight still lacks; called with every slot that has been filled."""

    def __init__(self, model: NativeModel) -> None:
        self._num_missing = Counter(_memory_of(slot.target) for slot in model.weight_slots())
        self._linears: dict[int, list[Linear]] = defaultdict(list)
        """By the memory of their weights, which a tied head shares with the embedding."""
        for module in model.modules():
            if isinstance(module, Linear) and module.weight is not None:
                self._linears[_memory_of(module.weight)].append(module)

    def __call__(self, slot: WeightSlot) -> None:
        """Pack the layers whose weight is complete with this slot."""
        memory = _memory_of(slot.target)
        self._num_missing[memory] -= 1
        if self._num_missing[memory] == 0:
            for linear in self._linears.pop(memory, ()):
                linear.pack()


def _memory_of(tensor: Tensor) -> int:
    """The same for all views of one piece of memory."""
    return tensor.untyped_storage().data_ptr()
