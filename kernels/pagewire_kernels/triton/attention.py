"""Paged attention on a GPU: prefill, chunks of it and decode, by one kernel.

What bounds it: decode reads each sequence's keys and values once, `2 * context_len * num_kv_heads *
head_dim * element size` bytes a sequence and layer, and does too little with them to matter, so
memory bandwidth is the floor. Prefill is bound by the two products, `4 * head_dim * num_heads`
operations per pair of query and visible key.

The choices of tile and split below are arguments of the launch; see `Launch`. They were chosen from
registers and shared memory, not from measurements.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.triton.attention_kernels import attend, reduce_splits
from pagewire_kernels.triton.checks import FLOATS, expect, expect_cache, expect_dtype, expect_rows

FIXED_SPLIT_TOKENS = 1024
"""Keys per split where tiles and splits are fixed."""

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 128
"""A smaller split costs more in launching and merging than it gains."""

_PROGRAMS_PER_PROCESSOR = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a call is cut into programs."""

    tile_rows: int
    """Rows of a tile: tokens times query heads of a group, a power of two of at least 16."""

    tile_keys: int
    """Keys looked at at a time."""

    num_warps: int

    num_stages: int = 3
    """How far loads are sent off ahead. A tile's block ids must be there before its keys can be, so
    that three stages have one tile of keys under way beside the one at work, and five have two."""

    num_splits: int = 1
    """Programs that share a tile's context, at most."""

    split_tokens: int = 0
    """Keys per split, a multiple of `tile_keys`; 0: an even share of the context."""


def choose_launch(
    query: Tensor, num_kv_heads: int, metadata: AttentionMetadata, *, batch_invariant: bool = False
) -> Launch:
    """Tiles for the batch, and splits where there are too few tiles to fill the device.

    With `batch_invariant`, tiles and the size of splits depend on the model alone, so that a row's
    result does not depend on its batch, nor on whether it is computed by prefill or by decode;
    prefill pays for it with tiles of 16 rows. Only whether splits are computed by programs of their
    own still depends on the batch, which leaves the bits alone.
    """
    num_tokens, num_heads, head_dim = query.shape
    group = num_heads // num_kv_heads
    tile_rows, num_warps = _tile(query.dtype, head_dim, group, metadata.max_query_len)
    if batch_invariant:
        tile_rows, num_warps = max(16, triton.next_power_of_2(group)), 4
    tile_keys = 32 if query.dtype == torch.float32 or head_dim > 128 else 64
    tile_tokens = tile_rows // group
    num_programs = (num_tokens // tile_tokens + len(metadata.context_lens)) * num_kv_heads
    if metadata.max_query_len == 1:
        num_programs = len(metadata.context_lens) * num_kv_heads
    room = _PROGRAMS_PER_PROCESSOR * _num_processors(query.device) // max(1, num_programs)
    if batch_invariant:
        split_tokens = FIXED_SPLIT_TOKENS
        num_splits = triton.cdiv(metadata.max_context_len, split_tokens) if room > 1 else 1
    else:
        split_tokens = 0
        num_splits = min(room, metadata.max_context_len // MIN_SPLIT_TOKENS, MAX_SPLITS)
    return Launch(
        tile_rows=tile_rows,
        tile_keys=tile_keys,
        num_warps=num_warps,
        num_stages=_num_stages(query.device),
        num_splits=max(1, num_splits),
        split_tokens=split_tokens,
    )


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
    launch: Launch | None = None,
) -> Tensor:
    """Causal attention of flattened query rows; as `reference.paged_attention`.

    The caches may be fp8. Rows after the last sequence's are left as they come from the allocator,
    so that a captured graph can be padded. Raises TypeError or ValueError for tensors that the
    kernel would misread.
    """
    _check(query, key_cache, value_cache, metadata)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    launch = launch or choose_launch(query, num_kv_heads, metadata)
    tile_tokens = launch.tile_rows // group
    expect(tile_tokens >= 1, f"launch: a tile of {launch.tile_rows} rows cannot hold {group} heads")
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    output = query.new_empty((num_tokens, num_heads, head_dim))
    if num_tokens == 0:
        return output
    is_split = launch.num_splits > 1
    partial_shape = (launch.num_splits if is_split else 0, num_tokens, num_heads)
    partial_output = query.new_empty((*partial_shape, padded_dim), dtype=torch.float32)
    partial_sums = query.new_empty((*partial_shape, 2), dtype=torch.float32)
    sinks = None if sinks is None else _per_head("sinks", sinks, num_heads)
    alibi_slopes = None if alibi_slopes is None else _per_head("slopes", alibi_slopes, num_heads)
    num_seqs = len(metadata.context_lens)
    is_decode = metadata.max_query_len == 1
    shared = {
        "HAS_WINDOW": sliding_window is not None,
        "HAS_SINKS": sinks is not None,
        "IS_DECODE": is_decode,
        "SPLIT_TOKENS": launch.split_tokens,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_dim,
        "TILE_KEYS": launch.tile_keys,
        "enable_fp_fusion": launch.split_tokens == 0,
    }
    num_tiles = num_seqs if is_decode else num_tokens // tile_tokens + num_seqs
    attend[(num_tiles * num_kv_heads, launch.num_splits)](
        output,
        partial_output,
        partial_sums,
        query,
        key_cache,
        value_cache,
        metadata.query_start,
        metadata.context_lens,
        metadata.block_tables,
        output if sinks is None else sinks,
        output if alibi_slopes is None else alibi_slopes,
        num_seqs,
        num_tokens,
        launch.num_splits,
        scale * key_scale,
        soft_cap or 1.0,
        sliding_window or 0,
        value_scale,
        query.stride(0),
        query.stride(1),
        output.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        metadata.block_tables.stride(0),
        HAS_CAP=soft_cap is not None,
        HAS_ALIBI=alibi_slopes is not None,
        IS_SPLIT=is_split,
        BLOCK_SIZE=key_cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        TILE_TOKENS=tile_tokens,
        TILE_ROWS=launch.tile_rows,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **shared,
    )
    if is_split:
        reduce_splits[(num_seqs if is_decode else num_tokens, num_heads)](
            output,
            partial_output,
            partial_sums,
            metadata.query_start,
            metadata.context_lens,
            output if sinks is None else sinks,
            num_seqs,
            num_tokens,
            launch.num_splits,
            sliding_window or 0,
            value_scale,
            output.stride(0),
            num_warps=1,
            **shared,
        )
    return output


def _tile(dtype: torch.dtype, head_dim: int, group: int, max_query_len: int) -> tuple[int, int]:
    """Rows of a tile and warps: two kinds of tile only, since each kind is a kernel to compile.

    A decode's holds one token's heads, a prefill's as many rows as registers hold.
    """
    smallest = max(16, triton.next_power_of_2(group))
    if max_query_len == 1:
        return smallest, 4
    largest = 128 if head_dim <= 128 else 64
    if dtype == torch.float32:
        largest = 32
    tile_rows = max(smallest, largest)
    return tile_rows, 8 if tile_rows >= 128 else 4


@cache
def _num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter's; few, so that tests see both kinds of launch
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _num_stages(device: torch.device) -> int:
    """As far ahead as shared memory allows: with five stages a prefill's tile takes 129 KiB."""
    if device.type != "cuda":
        return 5
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return 5 if properties["max_shared_mem"] >= 160 * 1024 else 3


def _per_head(name: str, values: Tensor, num_heads: int) -> Tensor:
    expect_rows(name, values, num_heads)
    return values.float()


def _check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
) -> None:
    expect_dtype("query", query, *FLOATS)
    expect_cache(key_cache, value_cache, query.dtype)
    num_kv_heads, head_dim = key_cache.shape[2:]
    expect_rows("query", query, None, None, head_dim)
    expect(
        query.shape[1] % num_kv_heads == 0,
        f"query: {query.shape[1]} heads are no multiple of the cache's {num_kv_heads}",
    )
    num_seqs = len(metadata.context_lens)
    for name, tensor in (
        ("query_start", metadata.query_start),
        ("context_lens", metadata.context_lens),
        ("block_tables", metadata.block_tables),
    ):
        expect_dtype(name, tensor, torch.int32)
        expect(tensor.stride(-1) == 1, f"{name}: expected a dense last axis")
    expect_rows("query_start", metadata.query_start, num_seqs + 1)
    expect_rows("block_tables", metadata.block_tables, num_seqs, None)
