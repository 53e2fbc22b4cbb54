"""What LoRA adapters add to the rows of products, by the slot of each row's adapter."""

import torch
from torch import Tensor

from pagewire_kernels.slot_deltas import DeltaTable


def add_deltas(
    y: Tensor, x: Tensor, slots: Tensor, table: DeltaTable, bias: Tensor | None = None
) -> None:
    """Add x @ a.T @ b.T * scale to the rows of a product whose slot has an adapter, in place, and
    multiply the sums by its factors, if it has any.

    y: [num_rows, at least num_outputs]; x: [num_rows, in_features]; slots: int32 [num_rows],
    negative for rows without an adapter, which keep their bits; bias: [at least num_outputs], that
    `y` contains, which is not multiplied. Summed in float32, and rounded to the dtype of `y` once.
    Hu et al. 2021, "LoRA: low-rank adaptation of large language models"; Liu et al. 2024, "DoRA:
    weight-decomposed low-rank adaptation".
    """
    for slot, of_slot in enumerate(table.a):
        for a, scale, outputs in zip(of_slot, table.scales[slot], table.outputs, strict=True):
            inner = torch.nn.functional.linear(x.float(), a.float()) * scale
            _add(y, inner, slots, table, slot, outputs, bias)


def add_embedding_deltas(
    y: Tensor, token_ids: Tensor, slots: Tensor, table: DeltaTable, bias: Tensor | None = None
) -> None:
    """As `add_deltas`, where x has a one at the row's token and zeros elsewhere.

    y: [num_rows, size]; token_ids: int64 [num_rows].
    """
    for slot, a in enumerate(table.a):
        inner = a[token_ids].float() * table.scales[slot]
        _add(y, inner, slots, table, slot, table.outputs[0], bias)


def _add(
    y: Tensor,
    inner: Tensor,
    slots: Tensor,
    table: DeltaTable,
    slot: int,
    outputs: tuple[int, int],
    bias: Tensor | None,
) -> None:
    """Add inner @ b.T to some outputs of a slot's rows. Works in a CUDA graph: which rows these are
    is not known on the host."""
    b, of_part = table.b[slot, slice(*outputs)].float(), y[:, slice(*outputs)]
    added = of_part.float() + torch.nn.functional.linear(inner, b)
    if table.factors is not None:
        factors = table.factors[slot, slice(*outputs)]
        fixed = 0.0 if bias is None else bias[slice(*outputs)].float()
        added = torch.where(factors == 1, added, (added - fixed) * factors + fixed)
    added = added.to(y.dtype)
    is_changed = (slots == slot) & (table.ranks[slot] > 0)
    of_part.copy_(torch.where(is_changed[:, None], added, of_part))
