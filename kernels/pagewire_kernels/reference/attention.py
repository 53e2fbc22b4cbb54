"""Paged attention in plain torch."""

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.reference.kv_cache import gather_sequence


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
    alibi_slopes: Tensor | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Causal attention of flattened query rows over their sequences' cached blocks.

    query: [num_tokens, num_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size,
    num_kv_heads, head_dim], any strides; num_heads a multiple of num_kv_heads, consecutive query
    heads sharing one KV head. A row at position p attends to positions p - sliding_window + 1 to p.
    soft_cap c turns a score s into c * tanh(s / c). sinks: [num_heads], a logit per head that takes
    part in the softmax's denominator alone. alibi_slopes: [num_heads], taken times the distance
    between query and key from each score, after the cap (Press et al. 2022). What the cache holds
    stands for its value times key_scale or value_scale (fp8 caches). Returns query's shape and
    dtype; sums in float32.
    """
    output = torch.empty_like(query)
    query_start = metadata.query_start.tolist()
    context_lens = metadata.context_lens.tolist()
    for i, context_len in enumerate(context_lens):
        rows = slice(query_start[i], query_start[i + 1])
        table = metadata.block_tables[i]
        output[rows] = _attend(
            query[rows].float(),
            gather_sequence(key_cache, table, context_len) * key_scale,
            gather_sequence(value_cache, table, context_len) * value_scale,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        ).to(query.dtype)
    return output


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
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
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.float()[:, None, None] * (query_at - key_at)
    hidden = key_at > query_at
    if sliding_window is not None:
        hidden |= key_at <= query_at - sliding_window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(num_heads, num_rows, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :context_len]
    return torch.einsum("hqk,khd->qhd", weights, values)
