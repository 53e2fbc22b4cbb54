"""Norms of query and key heads, rotary embedding and the cache write, in one launch.

Bound by memory bandwidth: queries, keys and values are read once and written once. As separate
kernels, norm, rotation and cache write would read and write queries twice and keys three times.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.triton.checks import (
    FLOATS,
    FP8,
    expect,
    expect_cache,
    expect_dtype,
    expect_rows,
)
from pagewire_kernels.triton.kv_cache import to_cache
from pagewire_kernels.triton.launch import LayoutLaunch, derived, layout_launch, run

_TILE_HEADS = 8


@triton.jit
def _norm_and_rotate(
    heads,
    cosines,
    sines,
    weight,
    eps,
    mask,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
):
    """Return the two rotated parts of a tile of heads, and the rest, in float32.

    heads: addresses of the heads' first elements, [n]; cosines, sines: [PADDED_HALF].
    """
    half = tl.arange(0, PADDED_HALF)
    rest = 2 * HALF + tl.arange(0, PADDED_REST)
    half_mask = mask[:, None] & (half < HALF)[None, :]
    rest_mask = mask[:, None] & (rest < HEAD_DIM)[None, :]
    first = tl.load(heads[:, None] + half[None, :], half_mask, other=0.0).to(tl.float32)
    second = tl.load(heads[:, None] + HALF + half[None, :], half_mask, other=0.0).to(tl.float32)
    others = tl.load(heads[:, None] + rest[None, :], rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(others * others, axis=1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first *= factor * tl.load(weight + half, half < HALF, other=0.0).to(tl.float32)[None, :]
        second *= (
            factor * tl.load(weight + HALF + half, half < HALF, other=0.0).to(tl.float32)[None, :]
        )
        others *= (
            factor * tl.load(weight + rest, rest < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        )
    rotated = first * cosines[None, :] - second * sines[None, :]
    return rotated, second * cosines[None, :] + first * sines[None, :], others


@triton.jit
def _rotate_and_write(
    query,
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    positions,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    key_scale,
    value_scale,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    table_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    PADDED_REST: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    TILE_HEADS: tl.constexpr,
):
    """Program (token, tile of heads): first the tiles of query heads, then those of KV heads."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_query_tiles: tl.constexpr = (NUM_HEADS + TILE_HEADS - 1) // TILE_HEADS
    half = tl.arange(0, PADDED_HALF)
    rest = 2 * HALF + tl.arange(0, PADDED_REST)
    angle = tl.load(positions + token) * table_stride + half
    cosines = tl.load(cos + angle, half < HALF, other=0.0).to(tl.float32)
    sines = tl.load(sin + angle, half < HALF, other=0.0).to(tl.float32)
    if tile < num_query_tiles:
        head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        mask = head < NUM_HEADS
        heads = query + token * query_token_stride + head * query_head_stride
        first, second, others = _norm_and_rotate(
            heads,
            cosines,
            sines,
            query_norm,
            eps,
            mask,
            HAS_QUERY_NORM,
            HEAD_DIM,
            HALF,
            PADDED_HALF,
            PADDED_REST,
        )
        half_mask = mask[:, None] & (half < HALF)[None, :]
        rest_mask = mask[:, None] & (rest < HEAD_DIM)[None, :]
        # tl.store rounds to the dtype of the pointer.
        tl.store(heads[:, None] + half[None, :], first, half_mask)
        tl.store(heads[:, None] + HALF + half[None, :], second, half_mask)
        tl.store(heads[:, None] + rest[None, :], others, rest_mask)
    else:
        slot = tl.load(slot_mapping + token)
        if slot < 0:
            return
        head = (tile - num_query_tiles) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        mask = head < NUM_KV_HEADS
        first, second, others = _norm_and_rotate(
            key + token * key_token_stride + head * key_head_stride,
            cosines,
            sines,
            key_norm,
            eps,
            mask,
            HAS_KEY_NORM,
            HEAD_DIM,
            HALF,
            PADDED_HALF,
            PADDED_REST,
        )
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        half_mask = mask[:, None] & (half < HALF)[None, :]
        rest_mask = mask[:, None] & (rest < HEAD_DIM)[None, :]
        # Rounded to the dtype of the rows first, as by a separate rotation and cache write.
        at = block * key_block_stride + offset * key_slot_stride + head * key_cache_head_stride
        target = key_cache + at
        tl.store(
            target[:, None] + half[None, :],
            to_cache(first.to(key.dtype.element_ty), key_scale, key_cache, IS_FP8),
            half_mask,
        )
        tl.store(
            target[:, None] + HALF + half[None, :],
            to_cache(second.to(key.dtype.element_ty), key_scale, key_cache, IS_FP8),
            half_mask,
        )
        tl.store(
            target[:, None] + rest[None, :],
            to_cache(others.to(key.dtype.element_ty), key_scale, key_cache, IS_FP8),
            rest_mask,
        )

        column = tl.arange(0, PADDED_DIM)
        full_mask = mask[:, None] & (column < HEAD_DIM)[None, :]
        source = value + token * value_token_stride + head * value_head_stride
        values = tl.load(source[:, None] + column[None, :], full_mask)
        values = to_cache(values, value_scale, value_cache, IS_FP8)
        at = (
            block * value_block_stride + offset * value_slot_stride + head * value_cache_head_stride
        )
        tl.store(value_cache + at[:, None] + column[None, :], values, full_mask)


def rotate_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Apply norms and RoPE to `query` in place; write normed and RoPE'd keys, and values, to the
    cache; as `reference.rotate_and_write_kv`."""
    rows = query, key, value, key_cache, value_cache, slot_mapping, positions, cos, sin
    launch = derived(_launch, *rows, query_norm, key_norm)
    if launch is not None:
        norms = query if query_norm is None else query_norm, key if key_norm is None else key_norm
        run(launch, (*rows, *norms), eps, key_scale, value_scale)


def _launch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
) -> LayoutLaunch | None:
    rows = query, key, value, key_cache, value_cache, slot_mapping
    _check(*rows, positions, cos, sin, query_norm, key_norm)
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    (num_tokens, num_heads), half = query.shape[:2], cos.shape[1]
    if num_tokens == 0:
        return None
    num_tiles = triton.cdiv(num_heads, _TILE_HEADS) + triton.cdiv(num_kv_heads, _TILE_HEADS)
    return layout_launch(
        _rotate_and_write,
        (num_tokens, num_tiles),
        (
            *query.stride()[:2],
            *key.stride()[:2],
            *value.stride()[:2],
            cos.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
        ),
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        PADDED_HALF=triton.next_power_of_2(half),
        PADDED_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        HAS_QUERY_NORM=query_norm is not None,
        HAS_KEY_NORM=key_norm is not None,
        IS_FP8=key_cache.dtype == FP8,
        TILE_HEADS=_TILE_HEADS,
        num_warps=2,  # 8 elements per thread of half a head of 128: loads of 16 bytes
        enable_fp_fusion=False,
    )


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
) -> None:
    expect_dtype("query", query, *FLOATS)
    expect_cache(key_cache, value_cache, query.dtype)
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_tokens = query.shape[0]
    expect_rows("query", query, None, None, head_dim)
    for name, rows in (("key", key), ("value", value)):
        expect_dtype(name, rows, query.dtype)
        expect_rows(name, rows, num_tokens, num_kv_heads, head_dim)
    for name, column in (("slot_mapping", slot_mapping), ("positions", positions)):
        expect_dtype(name, column, torch.int64)
        expect_rows(name, column, num_tokens)
    for name, table in (("cos", cos), ("sin", sin)):
        expect_dtype(name, table, *FLOATS)
        expect_rows(name, table, *cos.shape)
    expect(cos.stride() == sin.stride(), "cos, sin: expected equal strides")
    half = cos.shape[1]
    expect(
        2 * half <= head_dim,
        f"cos: expected at most {head_dim // 2} columns for heads of {head_dim}, got {half}",
    )
    for name, weight in (("query_norm", query_norm), ("key_norm", key_norm)):
        if weight is not None:
            expect_dtype(name, weight, *FLOATS)
            expect_rows(name, weight, head_dim)
