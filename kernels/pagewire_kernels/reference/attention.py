"""Paged attention in plain torch."""

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.reference.kv_cache import dequantize_heads

_TILE_TOKENS = 16
"""Tokens of a sequence that are computed together, counted from the sequence's first."""

_STEP_KEYS = 128
"""Keys whose scores are computed together, counted from the sequence's first."""


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
    stands for its value times key_scale or value_scale (fp8 caches); a head of an int8 cache is as
    `quantize_heads` returns it. Returns query's shape and dtype; sums in float32.

    All sequences are computed at once, in tiles of queries and steps of keys (online softmax,
    Milakov and Gimelshein 2018). Every tile of every batch is a product of the same shape, so that
    a row's result does not depend on its batch where torch multiplies equal shapes equally.
    """
    num_kv_heads = key_cache.shape[2]
    heads = (num_kv_heads, query.shape[1] // num_kv_heads)
    sequences, positions, rows = _tiles(metadata)
    context_lens = metadata.context_lens[sequences, None]
    tables = metadata.block_tables[sequences].long()
    tile_queries = query[rows.clamp(0, len(query) - 1)].float()
    # [num_tiles, num_kv_heads, tokens, heads of a KV head, head_dim]
    queries = tile_queries.unflatten(2, heads).permute(0, 2, 1, 3, 4)
    query_at = positions[:, None, :, None, None]

    maximum = queries.new_full((*queries.shape[:-1], 1), torch.finfo(torch.float32).min)
    totals, outputs = torch.zeros_like(maximum), torch.zeros_like(queries)
    if sinks is not None:
        maximum[:] = sinks.float().view(num_kv_heads, 1, -1, 1)
        totals += 1
    queries = queries.flatten(2, 3).contiguous() * (scale * key_scale)
    for first in range(0, metadata.max_context_len, _STEP_KEYS):
        key_at = torch.arange(first, first + _STEP_KEYS, device=query.device)
        keys = _gather(key_cache, tables, first)
        values = _gather(value_cache, tables, first)
        values.masked_fill_((key_at >= context_lens)[:, None, :, None], 0.0)

        scores = (queries @ keys.transpose(2, 3)).view(*outputs.shape[:-1], _STEP_KEYS)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        if alibi_slopes is not None:
            slopes = alibi_slopes.float().view(num_kv_heads, 1, -1, 1)
            scores = scores - slopes * (query_at - key_at)
        hidden = key_at > query_at
        if sliding_window is not None:
            hidden |= key_at <= query_at - sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)

        before, maximum = maximum, torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = torch.exp(scores - maximum)
        factor = torch.exp(before - maximum)
        totals = totals * factor + weights.sum(-1, keepdim=True)
        outputs = outputs * factor + (weights.flatten(2, 3) @ values).view_as(outputs)
    outputs = (outputs * (value_scale / totals)).permute(0, 2, 1, 3, 4).flatten(2, 3)
    is_row = rows >= 0
    result = torch.empty_like(query)
    result[rows[is_row]] = outputs[is_row].to(query.dtype)
    return result


def _tiles(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Each tile's sequence, int64 [num_tiles], and its tokens' positions and rows of the batch.

    These are [num_tiles, _TILE_TOKENS]; rows are -1 for tokens that are not in the batch.
    """
    ends = metadata.context_lens.long()
    starts = ends - metadata.query_start.diff()
    first_tiles = starts // _TILE_TOKENS
    counts = (ends - 1) // _TILE_TOKENS - first_tiles + 1
    device = ends.device
    sequences = torch.arange(len(ends), device=device).repeat_interleave(counts)
    before = counts.cumsum(0) - counts  # tiles of earlier sequences
    tiles = torch.arange(len(sequences), device=device) + (first_tiles - before)[sequences]
    positions = tiles[:, None] * _TILE_TOKENS + torch.arange(_TILE_TOKENS, device=device)
    starts, ends = starts[sequences, None], ends[sequences, None]
    rows = positions - starts + metadata.query_start[sequences, None]
    rows = rows.masked_fill((positions < starts) | (positions >= ends), -1)
    return sequences, positions, rows


def _gather(cache: Tensor, tables: Tensor, first: int) -> Tensor:
    """A step's keys or values from position `first` on: float32, and any numbers beyond a table.

    tables: [num_tiles, max_blocks]; returns [num_tiles, num_kv_heads, _STEP_KEYS, head_dim].
    """
    block_size = cache.shape[1]
    columns = torch.arange(first // block_size, -(-(first + _STEP_KEYS) // block_size))
    blocks = tables[:, columns.clamp(max=tables.shape[1] - 1).to(tables.device)].clamp(min=0)
    rows = cache.index_select(0, blocks.flatten()).unflatten(0, blocks.shape).flatten(1, 2)
    rows = rows.narrow(1, first % block_size, _STEP_KEYS).transpose(1, 2)
    rows = dequantize_heads(rows) if rows.dtype == torch.int8 else rows.float()
    return rows.contiguous()
