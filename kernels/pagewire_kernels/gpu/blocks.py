"""Copies whole KV blocks, many in one launch.

The cache is block-major, so a block, all layers, keys and values, is one contiguous piece of memory
and is moved as such, whatever its type. Bound by memory bandwidth within a device, and by the bus
between a device and pinned host memory, which a kernel reads and writes in place.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewire_kernels.batch import move_all
from pagewire_kernels.triton.checks import expect, expect_dtype, expect_rows

_TILE_WORDS = 4096

_BUS_PROGRAMS = 64
"""Programs that move blocks to or from the host: far more than fill the bus (each has 32 KB under
way), and few enough to leave most multiprocessors to concurrent kernels."""

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

    source, target: contiguous [num_blocks, ...], equal in type and beyond the first axis, on a
    device or in pinned host memory; pairs: int64 [n, 2]. Where a block is both a source and a
    target of one call, all sources are first read into a buffer on the device. The overlap check
    is free for `pairs` in host memory and synchronises with the device otherwise.
    """
    expect_dtype("pairs", pairs, torch.int64)
    expect_rows("pairs", pairs, None, 2)
    expect_dtype("target", target, source.dtype)
    expect(
        source.shape[1:] == target.shape[1:],
        f"blocks differ: source {list(source.shape)}, target {list(target.shape)}",
    )
    for name, cache in (("source", source), ("target", target)):
        expect(cache.is_contiguous(), f"{name}: expected whole blocks, contiguous")
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
