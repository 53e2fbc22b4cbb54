"""What adapters may add to the products of a layer."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu.adapters import ActiveRows, NativeDeltas
from pagewire_kernels.slot_deltas import SlotDeltas
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext
from worker_service.models.linear.packing import is_on_cpu

NUMBERS_AT_ONCE = 1 << 22
"""Numbers of an embedding that are squared at once."""


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
    if is_on_cpu(context) or not outputs:
        return None
    kernels: ModuleType = reference
    if find_spec("triton") is not None:
        from pagewire_kernels import triton as kernels  # imported only if it is used

    add = kernels.add_embedding_deltas if len(a_shape) == 1 else kernels.add_deltas
    return SlotDeltas(outputs, a_shape, max_slots, max_rank, add, context.empty(0), num_experts)
