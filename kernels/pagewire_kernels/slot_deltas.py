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
    """The slots of a layer, whose outputs have one or several parts, such as queries and keys. If
    it has experts, or heads with weights of their own, each adapter has as many slots, in order."""

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

    factors: Tensor | None
    """float32 [num_slots, num_outputs], that sums without the bias are multiplied by, too, as DoRA
    does; None for experts."""


class AddDeltas(Protocol):
    """`reference.add_deltas`, `reference.add_embedding_deltas`, or a kernel that they define."""

    def __call__(
        self,
        y: Tensor,
        x: Tensor,
        slots: Tensor,
        table: DeltaTable,
        bias: Tensor | None = None,
    ) -> None:
        """Add what adapters add to the rows `y` of a product of `x`, or of an embedding. bias:
        [num_outputs], that `y` contains, in its dtype."""
        ...


class AddOfExperts(Protocol):
    """Adds to the rows `y` of products of `x` with the weights of experts what adapters add."""

    def __call__(self, y: Tensor, x: Tensor, expert: Tensor, rows: Tensor) -> Tensor:
        """expert, rows: int64 [n], the expert and the row of the step of each row of x. Returns
        y."""
        ...


class PackedSlot(NamedTuple):
    """What an adapter has in its slots, on the host; pinned if the slots are on a GPU."""

    weights: Tensor
    scales: Tensor
    ranks: Tensor
    factors: Tensor | None
    """None: no sums are multiplied."""


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
        num_experts: int = 1,
    ) -> None:
        """outputs: of the layer's parts; a_shape: of `DeltaTable.a` without slots, and without
        ranks, which are padded here; max_rank: of an adapter; like: has the dtype of the layer's
        rows and the device of the slots; num_experts: that have weights of this shape."""
        rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
        num_outputs = max(part.stop for part in outputs)
        self._is_embedding = len(a_shape) == 1
        a_shape = (*a_shape, rank) if self._is_embedding else (a_shape[0], rank, a_shape[1])
        self._shapes = a_shape, (num_outputs, rank)
        self._add, self._pinned = add, like.is_cuda
        num_numbers = sum(map(_product, self._shapes))
        self._num_experts, num_slots = num_experts, max_slots * num_experts
        # One tensor, so that what an adapter adds is filled by one copy.
        self._weights = like.new_zeros(num_slots, num_numbers)
        device, num_parts = like.device, len(outputs)
        factors = None if num_experts > 1 else torch.ones(num_slots, num_outputs, device=device)
        self._table = DeltaTable(
            *self._views(self._weights),
            scales=torch.zeros(num_slots, num_parts, dtype=torch.float32, device=device),
            ranks=torch.zeros(num_slots, dtype=torch.int32, device=device),
            outputs=tuple((part.start, part.stop) for part in outputs),
            factors=factors,
        )

    @property
    def device(self) -> torch.device:
        """The device of the slots."""
        return self._weights.device

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        table = self._table
        tensors = (self._weights, table.scales, table.ranks, table.factors)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def pack(self, parts: Sequence[DeltaPart]) -> PackedSlot:
        """Pack what an adapter adds to the layer; it may be put into slots any number of times. May
        be called on any thread. Raises ValueError if two parts add to the same outputs."""
        table, num_experts = self._table, self._num_experts
        weights = torch.zeros(num_experts, self._weights.shape[1], dtype=self._weights.dtype)
        scales = torch.zeros(num_experts, table.scales.shape[1])
        ranks = torch.zeros(num_experts, dtype=torch.int32)
        factors = None
        if any(part.factors is not None for part in parts):
            factors = torch.ones(num_experts, self._shapes[1][0])
        a, b = self._views(weights)
        for part in parts:
            expert, rank, end = part.expert, part.a.shape[0], part.first_output + len(part.b)
            for place, (first, stop) in enumerate(table.outputs):
                outputs = slice(max(first, part.first_output), min(stop, end))
                if outputs.start >= outputs.stop:
                    continue
                if scales[expert, place] != 0:
                    raise ValueError(f"expected one change of the outputs {outputs}, got two")
                of_part = a[expert].mT if self._is_embedding else a[expert, place]
                of_part[:rank] = part.a
                added = part.b[outputs.start - part.first_output : outputs.stop - part.first_output]
                b[expert, outputs, :rank] = added
                scales[expert, place] = part.scale
            ranks[expert] = max(rank, int(ranks[expert]))
            if factors is not None and part.factors is not None:
                factors[expert, part.first_output : end] = part.factors
        weights, scales, ranks = map(self._on_host, (weights, scales, ranks))
        return PackedSlot(
            weights, scales, ranks, None if factors is None else self._on_host(factors)
        )

    def _on_host(self, numbers: Tensor) -> Tensor:
        return numbers.pin_memory() if self._pinned else numbers

    def fill(self, slot: int, packed: PackedSlot) -> None:
        """Put an adapter that changes the layer into a slot, after what was queued on the device
        before, without waiting for it."""
        slots, table = self._slots_of(slot), self._table
        targets = (self._weights, table.scales, table.ranks, table.factors)
        for target, numbers in zip(targets, packed, strict=True):
            if numbers is not None:
                assert target is not None, "experts have no factors"
                target[slots].copy_(numbers, non_blocking=True)
            elif target is not None:
                target[slots].fill_(1)

    def clear(self, slot: int) -> None:
        """Let the adapter of a slot change nothing."""
        self._table.ranks[self._slots_of(slot)].fill_(0)

    def _slots_of(self, slot: int) -> slice:
        """Those in the table."""
        return slice(slot * self._num_experts, (slot + 1) * self._num_experts)

    def add(
        self,
        y: Tensor,
        x: Tensor,
        slots: Tensor,
        expert: int | Tensor | None = None,
        *,
        bias: Tensor | None = None,
    ) -> None:
        """Add to the rows of a product, [num_rows, *]. x: what was multiplied, or the tokens of an
        embedding; slots: int32 [num_rows], of each row's adapter, or NO_SLOT; expert: whose weight
        the product has, also by row, int64 [num_rows]; bias: that the product contains."""
        if expert is not None:
            of_expert = slots * self._num_experts + expert
            slots = torch.where(slots < 0, slots, of_expert).to(torch.int32)
        self._add(y, x, slots, self._table, bias)

    def _views(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`DeltaTable.a` and `DeltaTable.b` of slots with these numbers, [num_slots, *]."""
        of_a, of_b = self._shapes
        a, b = weights.split([_product(of_a), _product(of_b)], dim=1)
        return a.unflatten(1, of_a), b.unflatten(1, of_b)


def _product(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()
