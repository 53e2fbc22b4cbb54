"""Paged attention and cache operations in plain torch: what the fast paths must agree with."""

import torch
from torch import Tensor

from pagewire_kernels.metadata import AttentionMetadata


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of flattened query rows over their sequences' cached blocks.

    query: [num_tokens, num_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size,
    num_kv_heads, head_dim], any strides; num_heads a multiple of num_kv_heads, consecutive query
    heads sharing one KV head. A row at position p attends to positions p - sliding_window + 1 to p.
    soft_cap c turns a score s into c * tanh(s / c). sinks: [num_heads], a logit per head that takes
    part in the softmax's denominator alone. Returns query's shape and dtype; sums in float32.
    """
    output = torch.empty_like(query)
    query_start = metadata.query_start.tolist()
    context_lens = metadata.context_lens.tolist()
    for i, context_len in enumerate(context_lens):
        rows = slice(query_start[i], query_start[i + 1])
        table = metadata.block_tables[i]
        output[rows] = _attend(
            query[rows].float(),
            _gather(key_cache, table, context_len),
            _gather(value_cache, table, context_len),
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
        ).to(query.dtype)
    return output


def _gather(cache: Tensor, block_table: Tensor, context_len: int) -> Tensor:
    """One sequence's keys or values in order: float32 [context_len, num_kv_heads, head_dim]."""
    block_size = cache.shape[1]
    num_blocks = -(-context_len // block_size)
    blocks = cache[block_table[:num_blocks].long()]
    return blocks.flatten(0, 1)[:context_len].float()


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of one sequence's last rows over its keys, all float32."""
    num_rows, num_heads, _ = query.shape
    context_len = keys.shape[0]
    group = num_heads // keys.shape[1]
    keys = keys.repeat_interleave(group, dim=1)
    values = values.repeat_interleave(group, dim=1)

    scores = torch.einsum("qhd,khd->hqk", query, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    query_at = torch.arange(context_len - num_rows, context_len, device=query.device)[:, None]
    key_at = torch.arange(context_len, device=query.device)[None, :]
    hidden = key_at > query_at
    if sliding_window is not None:
        hidden |= key_at <= query_at - sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(num_heads, num_rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :context_len]
    return torch.einsum("hqk,khd->qhd", weights, values)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store each row's key and value in its slot; rows with a negative slot are left out.

    key, value: [num_tokens, num_kv_heads, head_dim]; slot_mapping: int64 [num_tokens].
    """
    kept = (slot_mapping >= 0).nonzero().squeeze(1)
    slots = slot_mapping[kept]
    block_size = key_cache.shape[1]
    block = torch.div(slots, block_size, rounding_mode="floor")
    offset = slots - block * block_size
    key_cache[block, offset] = key[kept]
    value_cache[block, offset] = value[kept]


def swap_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks from one cache to another, on another device or not, or within one cache.

    source, target: [num_blocks, ...], equal beyond the first axis; pairs: int64 [n, 2] of (source
    block, target block), no target twice. All sources are read before any target is written.
    """
    moved = source.index_select(0, pairs[:, 0].to(source.device)).to(target.device)
    target.index_copy_(0, pairs[:, 1].to(target.device), moved)
