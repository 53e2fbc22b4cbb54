"""Writing new keys and values into their slots, and reading a sequence's back in order.

Both move each byte once and are bound by memory bandwidth: `2 * num_kv_heads * head_dim` elements a
token are read and as many written. Slots and block tables as in PagedAttention (Kwon et al. 2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.triton.checks import (
    FLOATS,
    FP8,
    FP8_MAX,
    expect_cache,
    expect_dtype,
    expect_rows,
)

FP8_LIMIT = tl.constexpr(FP8_MAX)


@triton.jit
def to_cache(values, scale, cache, IS_FP8: tl.constexpr):
    """Values as the cache stores them: in fp8 divided by the scale, clamped to what is finite.

    Divided as torch divides: fp8 is so coarse that many quotients lie halfway between two of its
    numbers, where a last bit would decide.
    """
    if IS_FP8:
        values = values.to(tl.float32)
        values = tl.div_rn(values, scale + tl.zeros_like(values))
        values = tl.minimum(tl.maximum(values, -FP8_LIMIT), FP8_LIMIT)
    return values.to(cache.dtype.element_ty)


@triton.jit
def _write(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (token, part of its elements)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < NUM_HEADS * HEAD_DIM
    head, column = element // HEAD_DIM, element % HEAD_DIM
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    keys = tl.load(key + token * key_token_stride + head * key_head_stride + column, mask)
    values = tl.load(value + token * value_token_stride + head * value_head_stride + column, mask)
    key_at = block * key_block_stride + offset * key_slot_stride + head * key_cache_head_stride
    value_at = (
        block * value_block_stride + offset * value_slot_stride + head * value_cache_head_stride
    )
    tl.store(key_cache + key_at + column, to_cache(keys, key_scale, key_cache, IS_FP8), mask)
    tl.store(
        value_cache + value_at + column, to_cache(values, value_scale, value_cache, IS_FP8), mask
    )


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Store each row's key and value in its slot; as `reference.write_kv`."""
    expect_dtype("key", key, *FLOATS)
    expect_dtype("value", value, key.dtype)
    expect_dtype("slot_mapping", slot_mapping, torch.int64)
    expect_cache(key_cache, value_cache, key.dtype)
    block_size, num_heads, head_dim = key_cache.shape[1:]
    expect_rows("slot_mapping", slot_mapping, None)
    num_tokens = len(slot_mapping)
    expect_rows("key", key, num_tokens, num_heads, head_dim)
    expect_rows("value", value, num_tokens, num_heads, head_dim)
    if num_tokens == 0:
        return
    tile = min(1024, triton.next_power_of_2(num_heads * head_dim))
    _write[(num_tokens, triton.cdiv(num_heads * head_dim, tile))](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale,
        value_scale,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        IS_FP8=key_cache.dtype == FP8,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )
