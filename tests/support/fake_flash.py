"""The functions of the FlashAttention packages, as far as we call them, by way of the reference.

Their parameters are those of the packages and their meaning is what their documentation says, so
that what our calls pass is proved without them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.batch import AttentionMetadata


def flash_attn_varlen_func(  # version 2
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    assert cu_seqlens_k.dtype == torch.int32
    if block_table is None:
        ends = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return _attend_texts(q, k, v, *ends, softmax_scale, causal, window_size)
    assert cu_seqlens_k[0] == 0
    assert k.shape[1] % 256 == 0
    return _attend(
        q,
        k,
        v,
        query_start=cu_seqlens_q,
        lengths=cu_seqlens_k.diff(),
        tables=block_table,
        longest=(max_seqlen_q, max_seqlen_k),
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def flash_attn_with_kvcache_2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    assert block_table is not None
    assert cache_seqlens is not None
    assert k_cache.shape[1] % 256 == 0
    batch_size, seqlen_q = q.shape[:2]
    rows = _attend(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        query_start=torch.arange(batch_size + 1, dtype=torch.int32) * seqlen_q,
        lengths=cache_seqlens,
        tables=block_table,
        longest=(seqlen_q, int(cache_seqlens.max())),
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return rows.unflatten(0, (batch_size, seqlen_q))


def flash_attn_with_kvcache_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
) -> Tensor:
    assert page_table is not None
    assert cache_seqlens is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    return _attend(
        q,
        k_cache,
        v_cache,
        query_start=cu_seqlens_q,
        lengths=cache_seqlens,
        tables=page_table,
        longest=(max_seqlen_q, int(cache_seqlens.max())),
        scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
    )


def flash_attn_varlen_func_of_vllm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
) -> Tensor:
    assert window_size is not None
    left, right = window_size
    if block_table is None:
        assert cu_seqlens_k is not None
        ends = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        return _attend_texts(q, k, v, *ends, softmax_scale, causal, (left, right))
    assert seqused_k is not None
    assert k.shape[1] % 16 == 0
    assert fa_version == 2 or alibi_slopes is None
    return _attend(
        q,
        k,
        v,
        query_start=cu_seqlens_q,
        lengths=seqused_k,
        tables=block_table,
        longest=(max_seqlen_q, max_seqlen_k),
        scale=softmax_scale,
        causal=causal,
        window_size=(left, right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    causal = window_size[1] == 0
    if block_table is None:
        assert cu_seq_k is not None
        assert enable_gqa or query.shape[1] == key.shape[1]
        ends = (cu_seq_q, cu_seq_k), (max_q, max_k)
        return _attend_texts(query, key, value, *ends, scale, False, window_size)
    assert seqused_k is not None
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert causal
    return _attend(
        query,
        key,
        value,
        query_start=cu_seq_q,
        lengths=seqused_k,
        tables=block_table,
        longest=(max_q, max_k),
        scale=scale,
        causal=causal,
        window_size=window_size,
    )


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    query_start: Tensor,
    lengths: Tensor,
    tables: Tensor,
    longest: tuple[int, int],
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """What all of them compute: causal from the end, a window that counts the keys before."""
    for tensor in (query_start, lengths, tables):
        assert tensor.dtype == torch.int32
    assert query.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == 1
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert alibi_slopes is None or alibi_slopes.dtype == torch.float32
    assert causal
    left, right = window_size
    assert right in (-1, 0)
    assert longest[0] >= int(query_start.diff().max())
    assert longest[1] >= int(lengths.max())
    _read_all(key_cache, tables, lengths)
    _read_all(value_cache, tables, lengths)
    metadata = AttentionMetadata(
        query_start=query_start,
        context_lens=lengths,
        block_tables=tables,
        slot_mapping=torch.full((len(query),), -1),
        max_query_len=longest[0],
        max_context_len=longest[1],
    )
    return reference.paged_attention(
        query,
        key_cache,
        value_cache,
        metadata,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        sliding_window=None if left < 0 else left + 1,
        soft_cap=softcap or None,
        alibi_slopes=alibi_slopes,
    )


def _attend_texts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    """Attention of ragged texts without a cache, with a window to both sides."""
    assert torch.equal(*starts)
    assert longest[0] == longest[1] == int(starts[0].diff().max())
    assert scale is not None
    assert not causal
    left, right = window_size
    assert left == right
    metadata = AttentionMetadata.of_texts(starts[0].diff().tolist(), query.device)
    window = None if left < 0 else left
    return reference.packed_attention(query, key, value, metadata, scale=scale, window=window)


def _read_all(cache: Tensor, tables: Tensor, lengths: Tensor) -> None:
    """Read every key or value of the sequences, as tiles that straddle a window's edge may: finite
    numbers from blocks that exist."""
    block_size = cache.shape[1]
    for table, length in zip(tables.tolist(), lengths.tolist(), strict=True):
        blocks = table[: -(-length // block_size)]
        assert all(0 <= block < len(cache) for block in blocks)
        assert bool(cache[blocks].flatten(0, 1)[:length].isfinite().all())
