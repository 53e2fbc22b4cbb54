"""Writes of new keys and values to a paged KV cache, and copies of many blocks in one launch.

A write is bound by memory bandwidth: per token, it reads and writes `2 * num_kv_heads * head_dim`
elements. Slots and block tables are those of PagedAttention (Kwon et al. 2023).

The cache is block-major, so a block, all layers, keys and values, is one contiguous piece of memory
and is copied as such, whatever its dtype. Copies are bound by memory bandwidth within a device, and
by the bus between a device and pinned host memory, which a kernel accesses in place.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.batch import move_all
from pagewire_kernels.interface import FLOATS, FP8
from pagewire_kernels.triton.checks import (
    FP8_MAX,
    dense,
    expect,
    expect_cache,
    expect_dtype,
    expect_tensors,
)

FP8_LIMIT = tl.constexpr(FP8_MAX)


@triton.jit
def to_cache(values, scale, cache, IS_FP8: tl.constexpr):
    """Convert values to the dtype of the cache; for fp8, divide by the scale and clamp first.

    The division rounds as torch's does: fp8 is so coarse that many quotients lie halfway between
    two of its numbers, where the last bit of the quotient decides.
    """
    if IS_FP8:
        values = values.to(tl.float32)
        values = tl.div_rn(values, scale + tl.zeros_like(values))
        keeps_nan: tl.constexpr = tl.PropagateNan.ALL
        values = tl.clamp(values, -FP8_LIMIT, FP8_LIMIT, propagate_nan=keeps_nan)
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
    block_stride,
    slot_stride,
    cache_head_stride,
    BLOCK_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_FP8: tl.constexpr,
    TILE: tl.constexpr,
):
    """Program (token, tile of its elements)."""
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
    at = block * block_stride + offset * slot_stride + head * cache_head_stride + column
    tl.store(key_cache + at, to_cache(keys, key_scale, key_cache, IS_FP8), mask)
    tl.store(value_cache + at, to_cache(values, value_scale, value_cache, IS_FP8), mask)


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
    """Write each row's key and value to its slot; as `reference.write_kv`."""
    key, value = dense(key), dense(value)
    expect_dtype("key", key, *FLOATS)
    expect_cache(key_cache, value_cache, key.dtype)
    block_size, num_heads, head_dim = key_cache.shape[1:]
    num_tokens = len(slot_mapping)
    expect_tensors(
        ("slot_mapping", slot_mapping, (torch.int64,), (None,)),
        ("key", key, (key.dtype,), (num_tokens, num_heads, head_dim)),
        ("value", value, (key.dtype,), (num_tokens, num_heads, head_dim)),
    )
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
        BLOCK_SIZE=block_size,
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        IS_FP8=key_cache.dtype == FP8,
        TILE=tile,
        num_warps=4,
        enable_fp_fusion=False,
    )


_TILE_WORDS = 4096

_BUS_PROGRAMS = 64
"""Programs that copy blocks from or to the host: more than enough to saturate the bus (each has
32 KB in flight), and few enough to leave most multiprocessors to concurrent kernels."""

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit(do_not_specialize=["num_pairs"])
def _move(
    source, target, pairs, num_pairs, block_words, NUM_TILES: tl.constexpr, TILE: tl.constexpr
):
    """Grid-stride loop over (pair, tile)."""
    for item in range(tl.program_id(0), num_pairs * NUM_TILES, tl.num_programs(0)):
        pair = item // NUM_TILES
        source_block = tl.load(pairs + pair * 2)
        target_block = tl.load(pairs + pair * 2 + 1)
        word = item % NUM_TILES * TILE + tl.arange(0, TILE)
        mask = word < block_words
        words = tl.load(source + source_block * block_words + word, mask)
        tl.store(target + target_block * block_words + word, words, mask)


def move_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks on the current stream; as `reference.swap_blocks`.

    source, target: contiguous [num_blocks, ...], of equal dtypes and of equal shapes beyond the
    first axis, on a device or in pinned host memory; pairs: int64 [n, 2]. If a block is both a
    source and a target, all sources are first read into a buffer on the device. This is checked
    without synchronization if `pairs` is in host memory. Raises TypeError or ValueError for
    unsupported tensors.
    """
    expect_tensors(("pairs", pairs, (torch.int64,), (None, 2)))
    expect_dtype("target", target, source.dtype)
    expect(
        source.shape[1:] == target.shape[1:],
        f"target: expected blocks of shape {list(source.shape[1:])}, as in source, got"
        f" {list(target.shape[1:])}",
    )
    for name, cache in (("source", source), ("target", target)):
        expect(cache.is_contiguous(), f"{name}: expected a contiguous tensor of whole blocks")
        is_seen = cache.is_cuda or cache.is_pinned() or not torch.cuda.is_available()
        expect(is_seen, f"{name}: expected device or pinned host memory")
    if len(pairs) == 0:
        return
    device = source.device if source.is_cuda else target.device
    move_all(partial(_launch, device=device), source, target, pairs, device)


def _launch(source: Tensor, target: Tensor, pairs: Tensor, device: torch.device) -> None:
    on_device = source.device == target.device
    word = _widest_word(source)
    source, target = _as_words(source, word), _as_words(target, word)
    block_words = source.shape[1]
    num_tiles = triton.cdiv(block_words, _TILE_WORDS)
    num_programs = len(pairs) * num_tiles
    if device.type == "cuda" and not pairs.is_cuda:
        pairs = pairs.pin_memory()  # a copy from other memory may wait for the stream
    _move[(num_programs if on_device else min(num_programs, _BUS_PROGRAMS),)](
        source,
        target,
        pairs.to(device, non_blocking=True).contiguous(),
        len(pairs),
        block_words,
        NUM_TILES=num_tiles,
        TILE=_TILE_WORDS,
        num_warps=8,
        enable_fp_fusion=False,
    )


def _widest_word(cache: Tensor) -> torch.dtype:
    """The widest integer that divides a block."""
    block_bytes = cache[:1].nbytes
    return next(word for word in _WORDS if block_bytes % word.itemsize == 0)


def _as_words(cache: Tensor, word: torch.dtype) -> Tensor:
    return cache.view(torch.uint8).flatten(1).view(word)
