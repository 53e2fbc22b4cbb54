"""Norms of query and key heads, rotary embedding and the cache write, in one launch.

Bound by memory bandwidth: queries, keys and values are read once and written once. As separate
kernels, norm, rotation and cache write would read and write queries twice and keys three times.
"""

from typing import Any, NamedTuple, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.interface import FLOATS, FP8, HeadNorms, RotaryOptions
from pagewire_kernels.triton.checks import expect, expect_cache, expect_dtype, expect_tensors
from pagewire_kernels.triton.kv_cache import to_cache
from pagewire_kernels.triton.launch import LayoutLaunch, derived, layout_launch, run

_TILE_HEADS = 8


@triton.jit
def _norm_and_rotate(heads, mask, columns, angles, weight, eps, HEAD_DIM, HALF: tl.constexpr):
    """Return the two rotated parts of a tile of heads, and the rest, in float32.

    heads: addresses of the heads' first elements, [n]; columns: of the first half and of the rest;
    angles: cosines and sines, [half]; weight: of the norm, or None.
    """
    (half, rest), (cosines, sines) = columns, angles
    half_mask = mask[:, None] & (half < HALF)[None, :]
    rest_mask = mask[:, None] & (rest < HEAD_DIM)[None, :]
    first = tl.load(heads[:, None] + half[None, :], half_mask, other=0.0).to(tl.float32)
    second = tl.load(heads[:, None] + HALF + half[None, :], half_mask, other=0.0).to(tl.float32)
    others = tl.load(heads[:, None] + rest[None, :], rest_mask, other=0.0).to(tl.float32)
    if weight is not None:
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
def _store_parts(target, mask, columns, parts, HEAD_DIM: tl.constexpr, HALF: tl.constexpr):
    """Store the parts of a tile of heads at `target`, rounded to its dtype."""
    (half, rest), (first, second, others) = columns, parts
    half_mask = mask[:, None] & (half < HALF)[None, :]
    rest_mask = mask[:, None] & (rest < HEAD_DIM)[None, :]
    tl.store(target[:, None] + half[None, :], first, half_mask)
    tl.store(target[:, None] + HALF + half[None, :], second, half_mask)
    tl.store(target[:, None] + rest[None, :], others, rest_mask)


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
    block_stride,
    slot_stride,
    cache_head_stride,
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
    half, rest = tl.arange(0, PADDED_HALF), 2 * HALF + tl.arange(0, PADDED_REST)
    angle = tl.load(positions + token) * table_stride + half
    cosines = tl.load(cos + angle, half < HALF, other=0.0).to(tl.float32)
    sines = tl.load(sin + angle, half < HALF, other=0.0).to(tl.float32)
    columns, angles = (half, rest), (cosines, sines)
    if tile < num_query_tiles:
        head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        mask = head < NUM_HEADS
        heads = query + token * query_token_stride + head * query_head_stride
        query_weight = query_norm if HAS_QUERY_NORM else None
        parts = _norm_and_rotate(heads, mask, columns, angles, query_weight, eps, HEAD_DIM, HALF)
        _store_parts(heads, mask, columns, parts, HEAD_DIM, HALF)
    else:
        slot = tl.load(slot_mapping + token)
        if slot < 0:
            return
        head = (tile - num_query_tiles) * TILE_HEADS + tl.arange(0, TILE_HEADS)
        mask = head < NUM_KV_HEADS
        heads = key + token * key_token_stride + head * key_head_stride
        key_weight = key_norm if HAS_KEY_NORM else None
        first, second, others = _norm_and_rotate(
            heads, mask, columns, angles, key_weight, eps, HEAD_DIM, HALF
        )
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        at = block * block_stride + offset * slot_stride + head * cache_head_stride
        # Rounded to the dtype of the rows first, as by a separate rotation and cache write.
        rounded = (
            to_cache(first.to(key.dtype.element_ty), key_scale, key_cache, IS_FP8),
            to_cache(second.to(key.dtype.element_ty), key_scale, key_cache, IS_FP8),
            to_cache(others.to(key.dtype.element_ty), key_scale, key_cache, IS_FP8),
        )
        _store_parts(key_cache + at, mask, columns, rounded, HEAD_DIM, HALF)

        column = tl.arange(0, PADDED_DIM)
        full_mask = mask[:, None] & (column < HEAD_DIM)[None, :]
        source = value + token * value_token_stride + head * value_head_stride
        values = tl.load(source[:, None] + column[None, :], full_mask)
        values = to_cache(values, value_scale, value_cache, IS_FP8)
        tl.store(value_cache + at[:, None] + column[None, :], values, full_mask)


class _Tensors(NamedTuple):
    """The tensors of `reference.rotate_and_write_kv`."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_cache: Tensor
    value_cache: Tensor
    slot_mapping: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None


def rotate_and_write_kv(*tensors: Tensor, **options: Unpack[RotaryOptions]) -> None:
    """Apply norms and RoPE to `query` in place; write normed and RoPE'd keys, and values, to the
    cache; as `reference.rotate_and_write_kv`."""
    query_norm, key_norm = options.get("query_norm"), options.get("key_norm")
    launch = derived(_launch, *tensors, query_norm, key_norm)
    if launch is not None:
        query, key = tensors[:2]
        norms = query if query_norm is None else query_norm, key if key_norm is None else key_norm
        scales = options.get("key_scale", 1.0), options.get("value_scale", 1.0)
        run(launch, (*tensors, *norms), options.get("eps", 1e-6), *scales)


def rotate(
    query: Tensor,
    key: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    **norms: Unpack[HeadNorms],
) -> None:
    """Apply norms and RoPE to `query` and `key` in place; as `reference.rotate`. The kernel rotates
    heads of queries in place, so both are such, beside no keys and values."""
    eps = norms.get("eps", 1e-6)
    for heads, norm in ((query, norms.get("query_norm")), (key, norms.get("key_norm"))):
        none = heads[:, :0]
        cache = none[:1].unsqueeze(0)
        columns = positions, positions, cos, sin
        rotate_and_write_kv(heads, none, none, cache, cache, *columns, query_norm=norm, eps=eps)


def _launch(*tensors: Any) -> LayoutLaunch | None:
    t = _Tensors(*tensors)
    expect_dtype("query", t.query, *FLOATS)
    expect_cache(t.key_cache, t.value_cache, t.query.dtype)
    block_size, num_kv_heads, head_dim = t.key_cache.shape[1:]
    (num_tokens, num_heads), half, dtype = t.query.shape[:2], t.cos.shape[1], (t.query.dtype,)
    expect_tensors(
        ("query", t.query, dtype, (None, None, head_dim)),
        ("key", t.key, dtype, (num_tokens, num_kv_heads, head_dim)),
        ("value", t.value, dtype, (num_tokens, num_kv_heads, head_dim)),
        ("slot_mapping", t.slot_mapping, (torch.int64,), (num_tokens,)),
        ("positions", t.positions, (torch.int64,), (num_tokens,)),
        ("cos", t.cos, FLOATS, (None, None)),
        ("sin", t.sin, FLOATS, t.cos.shape),
        ("query_norm", t.query_norm, FLOATS, (head_dim,)),
        ("key_norm", t.key_norm, FLOATS, (head_dim,)),
    )
    expect(t.cos.stride() == t.sin.stride(), "cos, sin: expected equal strides")
    expect(
        2 * half <= head_dim,
        f"cos: expected at most {head_dim // 2} columns for heads of {head_dim}, got {half}",
    )
    num_tiles = triton.cdiv(num_heads, _TILE_HEADS) + triton.cdiv(num_kv_heads, _TILE_HEADS)
    if num_tokens == 0 or num_tiles == 0:
        return None
    strides = (stride for rows in t[:3] for stride in rows.stride()[:2])
    return layout_launch(
        _rotate_and_write,
        (num_tokens, num_tiles),
        (*strides, t.cos.stride(0), *t.key_cache.stride()[:3]),
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=half,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        PADDED_HALF=triton.next_power_of_2(half),
        PADDED_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        HAS_QUERY_NORM=t.query_norm is not None,
        HAS_KEY_NORM=t.key_norm is not None,
        IS_FP8=t.key_cache.dtype == FP8,
        TILE_HEADS=_TILE_HEADS,
        num_warps=2,  # 8 elements per thread of half a head of 128: loads of 16 bytes
        enable_fp_fusion=False,
    )
