"""What LoRA adapters add to the rows of products, looked up by the slot of each row's adapter.

The slots of a layer are tensors of fixed addresses and shapes, so that a CUDA graph can read them,
whatever adapters are in them when it is replayed. How they are multiplied is defined by
`reference.add_deltas` and `reference.add_embedding_deltas`.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from pagewire_kernels.cpu.adapters import DeltaPart

RANK_UNIT = 16
"""Ranks are padded to a multiple of this with zeros: the least that the tiles of a GPU take."""

NO_SLOT = -1
"""The slot of a row without an adapter."""


class DeltaTable(NamedTuple):
    """The slots of a layer, whose outputs have one or several parts, such as queries and keys."""

    a: Tensor
    """[num_slots, num_parts, max_rank, in_features], in the dtype of the layer's rows; of an
    embedding: [num_slots, num_tokens, max_rank]."""

    b: Tensor
    """[num_slots, num_outputs, max_rank], in the same dtype."""

    scales: Tensor
    """float32 [num_slots, num_parts]."""

    ranks: Tensor
    """int32 [num_slots]: ranks beyond this are zeros; 0: the adapter does not change the layer."""

    outputs: tuple[tuple[int, int], ...]
    """The first output of each part, and the one after its last."""


class AddDeltas(Protocol):
    """`reference.add_deltas`, `reference.add_embedding_deltas`, or a kernel that they define."""

    def __call__(self, y: Tensor, x: Tensor, slots: Tensor, table: DeltaTable) -> None:
        """Add what adapters add to the rows `y` of a product of `x`, or of an embedding."""
        ...


class PackedSlot(NamedTuple):
    """The content of a slot, on the host; pinned if the slots are on a GPU."""

    weights: Tensor
    scales: Tensor
    rank: int


class SlotDeltas:
    """What the adapters in slots add to one layer."""

    def __init__(
        self,
        outputs: Sequence[slice],
        a_shape: tuple[int, ...],
        max_slots: int,
        max_rank: int,
        add: AddDeltas,
        like: Tensor,
    ) -> None:
        """outputs: of the layer's parts; a_shape: of `DeltaTable.a` without slots, and without
        ranks, which are padded here; max_rank: of an adapter; like: has the dtype of the layer's
        rows and the device of the slots."""
        rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
        num_outputs = max(part.stop for part in outputs)
        self._is_embedding = len(a_shape) == 1
        a_shape = (*a_shape, rank) if self._is_embedding else (a_shape[0], rank, a_shape[1])
        self._shapes = a_shape, (num_outputs, rank)
        self._add, self._pinned = add, like.is_cuda
        num_numbers = sum(map(_product, self._shapes))
        # One tensor, so that a slot is filled by one copy.
        self._weights = like.new_zeros(max_slots, num_numbers)
        device, num_parts = like.device, len(outputs)
        self._table = DeltaTable(
            *self._views(self._weights),
            scales=torch.zeros(max_slots, num_parts, dtype=torch.float32, device=device),
            ranks=torch.zeros(max_slots, dtype=torch.int32, device=device),
            outputs=tuple((part.start, part.stop) for part in outputs),
        )

    @property
    def device(self) -> torch.device:
        """The device of the slots."""
        return self._weights.device

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        return self._weights.nbytes + self._table.scales.nbytes + self._table.ranks.nbytes

    def pack(self, parts: Sequence[DeltaPart]) -> PackedSlot:
        """Pack what an adapter adds to the layer; it may be put into slots any number of times. May
        be called on any thread."""
        table = self._table
        weights = torch.zeros(1, self._weights.shape[1], dtype=self._weights.dtype)
        scales = torch.zeros(table.scales.shape[1])
        [a], [b] = self._views(weights)
        firsts = [first for first, _ in table.outputs]
        for part in parts:
            place, rank = firsts.index(part.first_output), part.a.shape[0]
            if self._is_embedding:
                a[:, :rank] = part.a.t()
            else:
                a[place, :rank] = part.a
            b[part.first_output : part.first_output + len(part.b), :rank] = part.b
            scales[place] = part.scale
        max_rank = max(part.a.shape[0] for part in parts)
        if self._pinned:
            weights, scales = weights.pin_memory(), scales.pin_memory()
        return PackedSlot(weights[0], scales, max_rank)

    def fill(self, slot: int, packed: PackedSlot) -> None:
        """Put an adapter that changes the layer into a slot, after what was queued on the device
        before, without waiting for it."""
        self._weights[slot].copy_(packed.weights, non_blocking=True)
        self._table.scales[slot].copy_(packed.scales, non_blocking=True)
        self._table.ranks[slot].fill_(packed.rank)

    def clear(self, slot: int) -> None:
        """Let the adapter of a slot change nothing."""
        self._table.ranks[slot].fill_(0)

    def add(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add to the rows of a product, [num_rows, *]. x: what was multiplied, or the tokens of an
        embedding; slots: int32 [num_rows], of each row's adapter, or NO_SLOT."""
        self._add(y, x, slots, self._table)

    def _views(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`DeltaTable.a` and `DeltaTable.b` of slots with these numbers, [num_slots, *]."""
        of_a, of_b = self._shapes
        a, b = weights.split([_product(of_a), _product(of_b)], dim=1)
        return a.unflatten(1, of_a), b.unflatten(1, of_b)


def _product(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
