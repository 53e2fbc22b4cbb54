"""Attention in plain torch: over a paged cache, and over whole texts."""

from itertools import pairwise

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.reference.kv_cache import dequantize_heads

_TILE_TOKENS = 16
"""Tokens of a tile; tiles start at multiples of this within a sequence."""

_STEP_KEYS = 128
"""Keys of a step of the online softmax; steps start at multiples of this within a sequence."""


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
    value_dim: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Causal attention of flattened query rows over their sequences' cached blocks.

    query: [num_tokens, num_heads, head_dim]; key_cache, value_cache: [num_blocks, block_size,
    num_kv_heads, head_dim], any strides; num_heads is a multiple of num_kv_heads, and consecutive
    query heads share a KV head. scale: of the scores. A row at position p attends to positions
    p - sliding_window + 1 to p. soft_cap c turns a score s into c * tanh(s / c). sinks:
    [num_heads], a logit per head that is part of the denominator of the softmax only.
    alibi_slopes: [num_heads]; slope times the distance between query and key is subtracted from
    each score, after the cap (Press et al. 2022). value_dim: the first elements of each head of the
    result that are used, None for all; a backend may leave the others uninitialized. Elements of an
    fp8 cache are multiplied by key_scale or value_scale; heads of an int8 cache have the layout of
    `quantize_heads`. Returns query's shape and dtype; sums in float32.

    All sequences are computed together, in tiles of queries and steps of keys (online softmax,
    Milakov and Gimelshein 2018). All tiles of all batches have products of the same shape, so that
    a row's result is independent of its batch as far as torch's products of equal shapes are.
    """
    num_kv_heads = key_cache.shape[2]
    heads = (num_kv_heads, query.shape[1] // num_kv_heads)
    sequences, positions, rows = _tiles(metadata)
    # The keys that some row of a tile sees, [num_tiles, 1] each; what is outside may be anything.
    end_key = metadata.context_lens[sequences, None]
    first_key = torch.zeros_like(end_key)
    if sliding_window is not None:
        first_row = positions.masked_fill(rows < 0, torch.iinfo(positions.dtype).max)
        first_key = first_row.amin(1, keepdim=True) - sliding_window + 1
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
        unseen = (key_at < first_key) | (key_at >= end_key)
        values.masked_fill_(unseen[:, None, :, None], 0.0)

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


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention of whole texts without a cache: every row attends to all rows of its text.

    query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim], with
    the texts one after the other, from `metadata.query_start`; consecutive query heads share a KV
    head. scale: of the scores. A row at position p attends to positions p - window to p + window
    only. bias: float32 [num_heads, 2 * n - 1], where n is at least the length of the longest text:
    column j - i + n - 1 is added to the score of row i for key j (relative positions). Returns
    [num_tokens, num_heads, head_dim] in query's dtype; sums in float32.

    Texts are computed one by one, so that the bits of a text do not depend on its batch.
    """
    output = query.new_empty(query.shape)
    group = query.shape[1] // key.shape[1]
    for first, end in pairwise(metadata.query_start.tolist()):
        queries, keys, values = (
            rows[first:end].float().transpose(0, 1).contiguous() for rows in (query, key, value)
        )
        keys, values = (heads.repeat_interleave(group, dim=0) for heads in (keys, values))
        at = torch.arange(end - first, device=query.device)
        distance = at - at[:, None]
        scores = queries @ keys.transpose(1, 2) * scale
        if bias is not None:
            scores += bias[:, distance + bias.shape[1] // 2]
        if window is not None:
            scores.masked_fill_(distance.abs() > window, -torch.inf)
        attended = torch.softmax(scores, dim=-1) @ values
        output[first:end] = attended.transpose(0, 1).to(query.dtype)
    return output


def _tiles(metadata: AttentionMetadata) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sequence of each tile, int64 [num_tiles], and positions and rows of its tokens.

    Positions and rows are [num_tiles, _TILE_TOKENS]; the row of a token that is not in the batch is
    -1.
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
    """Gather a step's keys or values from position `first` on, in float32.

    tables: [num_tiles, max_blocks]. Returns [num_tiles, num_kv_heads, _STEP_KEYS, head_dim], with
    arbitrary numbers beyond the blocks of a table.
    """
    block_size = cache.shape[1]
    columns = torch.arange(first // block_size, -(-(first + _STEP_KEYS) // block_size))
    blocks = tables[:, columns.clamp(max=tables.shape[1] - 1).to(tables.device)].clamp(min=0)
    rows = cache.index_select(0, blocks.flatten()).unflatten(0, blocks.shape).flatten(1, 2)
    rows = rows.narrow(1, first % block_size, _STEP_KEYS).transpose(1, 2)
    rows = dequantize_heads(rows) if rows.dtype == torch.int8 else rows.float()
    return rows.contiguous()
