"""Embeddings and LM heads, whose rows are tokens."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from pagewire_kernels.cpu.adapters import ActiveRows, EmbeddingDeltas, NativeDeltas
from pagewire_kernels.quantized_weight import QuantizedWeight
from pagewire_kernels.reference.backend import LayerKernels
from pagewire_kernels.slot_deltas import SlotDeltas
from worker_service.distributed.layout import Shard
from worker_service.models.interface import ModelContext, WeightTarget
from worker_service.models.linear.additions import (
    NUMBERS_AT_ONCE,
    Additions,
    LinearPart,
    make_slots,
)
from worker_service.models.linear.linear import Linear
from worker_service.models.linear.packing import (
    PackedTable,
    PackedWeight,
    can_pack_codes,
    cpu_library,
    obstacle,
    pack_codes,
)

HEAD_ROUNDING = "int8"
"""The format of LM heads, and of embeddings tied to them, if other layers are quantized."""


class VocabEmbedding(nn.Module):
    """Rows of a table by token, where each rank has the rows of some tokens."""

    def __init__(
        self, vocab_size: int, size: int, context: ModelContext, kernels: LayerKernels
    ) -> None:
        super().__init__()
        self.shard = context.communicator.layout.vocab_shard(vocab_size)
        self._size = size
        num_rows = context.communicator.layout.vocab_rows(vocab_size)
        self.weight: Tensor | None = context.empty_weight(num_rows, size)
        self.weight[self.shard.size :] = 0
        self.packed: PackedTable | None = None
        self.kept: QuantizedWeight | None = None
        """The quantized table, until it is packed."""

        self.additions: Additions | None = None
        """What adapters add to its rows."""

        self._name = ""
        self.can_adapt = True
        """Whether adapters may change it."""

        self.is_shared = False
        """Whether the LM head is tied to this table, and packs it for both."""

        self._context = context
        self._kernels = kernels
        self._communicator = context.communicator

    def table_target(self, name: str) -> WeightTarget:
        """Destination of the table called `name`."""
        assert self.weight is not None
        self._name, table = name, self.weight[: self.shard.size]
        rounding = HEAD_ROUNDING if self.is_shared and self._context.quantization else None
        return WeightTarget(name, table, shard=self.shard, keep=self._keep, rounding=rounding)

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """As `Linear.parts`, where a token is an input."""
        columns = slice(self.shard.start, self.shard.start + self.shard.size)
        rows = Shard.full(self._size)
        part = LinearPart([rows.size, self.shard.total], columns, rows, None, slice(0, rows.size))
        yield self._name.removesuffix(".weight"), part

    def make_deltas(
        self, rows: ActiveRows, max_slots: int, max_rank: int
    ) -> NativeDeltas | SlotDeltas | None:
        """As `Linear.make_deltas`."""
        native_library, dtype = cpu_library(self._context), self._context.dtype
        if native_library is None:
            outputs, a_shape = [slice(0, self._size)], (max(1, self.shard.size),)
            return make_slots(self._context, outputs, a_shape, max_slots, max_rank)
        sizes = self._size, self.shard.size
        return EmbeddingDeltas(*sizes, rows, max_slots, max_rank, native_library, dtype)

    def norms(self, outputs: slice, a: Tensor, b: Tensor) -> Tensor:
        """As `Linear.norms`: over all tokens, for each number of a row."""
        squares, tokens_of_all = torch.zeros_like(b[:, 0]), torch.arange(self.shard.size)
        for tokens in tokens_of_all.to(b.device).split(max(1, NUMBERS_AT_ONCE // len(b))):
            rows = self._plain_rows(tokens)[:, outputs].float()
            squares += (rows + (b @ a[:, tokens]).t()).square_().sum(dim=0)
        return squares.sqrt_()

    def _keep(self, part: QuantizedWeight) -> None:
        assert self.weight is not None
        part = part.in_order()
        if self.is_shared:
            self.kept = part.padded(self.weight.shape[0])
        elif can_pack_codes(part, self._context):
            self.share(pack_codes(part, self._context), None)
        else:
            self._context.dequantized[obstacle(part)] += self.weight.nbytes
            self.weight[: self.shard.size] = part.dequantize()

    def pack(self) -> None:
        """Pack the table for this machine once it is loaded, unless a tied head does."""
        if self.weight is not None and not self.is_shared:
            self.weight = self.weight.to(self._context.device)

    def share(self, packed: PackedWeight | None, weight: Tensor | None) -> None:
        """Use the head's copy of the table if rows can be gathered from it; this one is freed."""
        if isinstance(packed, PackedTable):
            self.packed, self.weight = packed, None
        elif weight is not None:
            self.weight = weight

    def forward(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens]; returns [num_tokens, size]."""
        if self.shard.is_full:
            return self._rows(token_ids)
        rows = token_ids - self.shard.start
        is_ours = (rows >= 0) & (rows < self.shard.size)
        found = self._rows(torch.where(is_ours, rows, 0))
        # One rank has the row and the others have zeros, so the sum is exact.
        return self._communicator.sum(found.masked_fill_(~is_ours.unsqueeze(1), 0))

    def _plain_rows(self, indices: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed.gather(indices)
        assert self.weight is not None
        return self._kernels.embed(self.weight, indices)

    def _rows(self, indices: Tensor) -> Tensor:
        rows = self._plain_rows(indices)
        if self.additions is None:
            return rows
        deltas = self.additions.of_step()
        if not isinstance(deltas, EmbeddingDeltas):
            return self.additions.add(rows, indices)
        deltas.add(rows, indices)
        return rows


class VocabHead(Linear):
    """Logits from hidden states, where each rank has the rows of some tokens."""

    def __init__(
        self,
        vocab_size: int,
        size: int,
        context: ModelContext,
        tied_to: VocabEmbedding | None,
        *,
        bias: bool = False,
    ) -> None:
        """tied_to: the embedding that shares its table with the head, if this rank has it."""
        layout = context.communicator.layout
        rows = Shard.full(layout.vocab_rows(vocab_size))
        table = None if tied_to is None else tied_to.weight
        super().__init__(Shard.full(size), [rows], bias=bias, context=context, weight=table)
        self.shard = layout.vocab_shard(vocab_size)
        self._tied_to = [] if tied_to is None else [tied_to]  # in a list: not a module of its own
        if tied_to is not None:
            tied_to.is_shared = True
        else:
            assert self.weight is not None
            self.weight[self.shard.size :] = 0
        if self.bias is not None:
            self.bias[self.shard.size :] = 0
        if self._quantization is not None:
            self._quantization = HEAD_ROUNDING
        self._communicator = context.communicator

    def parts(self) -> Iterator[tuple[str, LinearPart]]:
        """As `Linear.parts`. Its name is the same if it is tied to the embedding, which an adapter
        changes on its own."""
        rows, columns = self.shard, slice(0, self._inputs.size)
        shape = [rows.total, self._inputs.total]
        yield "lm_head", LinearPart(shape, columns, rows, None, slice(0, rows.size))

    def pack(self) -> None:
        """As `Linear.pack`; a tied embedding uses the packed table, too."""
        for embedding in self._tied_to:
            if embedding.kept is not None:
                self._kept[0], embedding.kept = embedding.kept, None
        super().pack()
        for embedding in self._tied_to:
            embedding.share(self.packed, self.weight)

    def table_target(self, name: str) -> WeightTarget:
        """Destination of the weight called `name`."""
        assert self.weight is not None
        num_rows, self._names = self.weight.shape[0], (name,)

        def keep(part: QuantizedWeight) -> None:
            self._kept[0] = part.padded(num_rows)

        table = self.weight[: self.shard.size]
        rounding = self._quantization
        return WeightTarget(name, table, shard=self.shard, keep=keep, rounding=rounding)

    def bias_targets(self, name: str) -> Iterator[WeightTarget]:
        """Destination of the bias called `name`, if there is one."""
        if self.bias is not None:
            yield WeightTarget(name, self.bias[: self.shard.size], shard=self.shard)

    def forward(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, size]; returns float32 [num_rows, vocab_size] on the rank that samples,
        and zeros on those that share its layers."""
        logits = self.multiply(rows, self.bias, torch.float32)
        if self.shard.is_full:
            return logits
        # Only the last ranks' rows are padded, so the padding is at the end.
        return self._communicator.gather_columns(logits, self.shard.total)
