"""Layers that the ranks of a stage share.

A column-parallel linear layer is an ordinary one with fewer outputs: each rank has the rows of its
weight that belong to its heads or inner columns. What follows it takes those as inputs, and is
row-parallel. With one rank each of these layers computes exactly what its ordinary twin does.
"""

import torch
from torch import Tensor, nn

from pagewire_kernels.cpu.native import NativeWeight
from pagewire_kernels.layer_kernels import LayerKernels
from worker_service.distributed.layout import Share
from worker_service.models.linear import Linear, TiedLinear
from worker_service.models.packed_weight import PackedWeight
from worker_service.models.placement import Placement


class RowParallelLinear(Linear):
    """y = x W^T + b, where each rank has some columns of x and of W; every rank gets y."""

    def __init__(self, inputs: Share, out_features: int, *, bias: bool, place: Placement) -> None:
        super().__init__(inputs.size, out_features, bias=bias, **place.as_kwargs())
        self._is_shared = not inputs.is_whole
        self._ranks = place.ranks

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, in_features of this rank]; returns [num_rows, out_features]."""
        if not self._is_shared:
            return super().forward(rows)
        total = self._ranks.sum(self.multiply(rows, None))
        return total if self.bias is None else total + self.bias


class VocabEmbedding(nn.Module):
    """Rows of a table by token, where each rank has the rows of some tokens."""

    def __init__(self, vocab_size: int, size: int, place: Placement, kernels: LayerKernels) -> None:
        super().__init__()
        self.share = place.ranks.layout.vocab_share(vocab_size)
        num_rows = place.ranks.layout.vocab_rows(vocab_size)
        self.weight: Tensor | None = torch.empty(num_rows, size, **place.as_kwargs())
        self.weight[self.share.size :] = 0
        self.packed: NativeWeight | None = None
        self._kernels = kernels
        self._ranks = place.ranks

    def share_packed(self, packed: PackedWeight) -> None:
        """Take rows from the head's packed copy of the table, if they can be; ours is freed."""
        if isinstance(packed, NativeWeight):
            self.packed, self.weight = packed, None

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens]; returns [num_tokens, size]."""
        if self.share.is_whole:
            return self._rows(token_ids)
        rows = token_ids - self.share.start
        is_ours = (rows >= 0) & (rows < self.share.size)
        found = self._rows(torch.where(is_ours, rows, 0))
        # One rank has a row's numbers and the others zeros, so the sum is exact.
        return self._ranks.sum(found.masked_fill_(~is_ours.unsqueeze(1), 0))

    def _rows(self, indices: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.gather(indices)
        assert self.weight is not None
        return self._kernels.embed(self.weight, indices)


class VocabHead(nn.Module):
    """Logits from hidden states, where each rank has the rows of some tokens."""

    def __init__(
        self, vocab_size: int, size: int, place: Placement, tied_to: VocabEmbedding | None
    ) -> None:
        """tied_to: the embedding whose table is the head's weight too, if this rank has it."""
        super().__init__()
        self.share = place.ranks.layout.vocab_share(vocab_size)
        num_rows = place.ranks.layout.vocab_rows(vocab_size)
        if tied_to is None:
            self.linear = Linear(size, num_rows, bias=False, **place.as_kwargs())
            assert self.linear.weight is not None
            self.linear.weight[self.share.size :] = 0
        else:
            assert tied_to.weight is not None
            self.linear = TiedLinear(tied_to.weight, tied_to.share_packed)
        self._ranks = place.ranks

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, size]; returns float32 [num_rows, vocab_size] on every rank."""
        logits = self.linear.multiply(hidden, None, torch.float32)
        if self.share.is_whole:
            return logits
        # Only the last ranks' rows are padded, so the padding is at the end.
        return self._ranks.gather_columns(logits)[:, : self.share.total].contiguous()
