"""The products of heads, each with a weight of its own."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pagewire_kernels.cpu.adapters import ActiveRows, NativeDeltas
from pagewire_kernels.cpu.heads import NativeHeads
from pagewire_kernels.slot_deltas import SlotDeltas
from worker_service.models.interface import ModelContext
from worker_service.models.linear.additions import Additions, LinearPart, make_slots
from worker_service.models.linear.packing import cpu_library, huge_memory


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
        native_library = cpu_library(context)
        self._packed: NativeHeads | None = None
        if native_library is not None:
            self._packed = NativeHeads(weights, native_library, huge_memory())
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
