"""Paged attention on a GPU: prefills, chunks of prefills and decodes, by one kernel.

Decodes are bound by memory bandwidth: they read the keys and values of each sequence once, which
are `2 * context_len * num_kv_heads * head_dim * element size` bytes per sequence and layer.
Prefills are bound by the two matrix products, `4 * head_dim * num_heads` operations per pair of
query and visible key.

The sizes of tiles and splits are arguments of the launch; see `Launch`. They are those that were
measured on the GPU (`attention_tiles.json`), or else are derived from the sizes of registers and
shared memory.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.interface import FLOATS
from pagewire_kernels.triton.attention_kernels import attend, plan_splits, reduce_splits
from pagewire_kernels.triton.checks import (
    dense,
    expect,
    expect_cache,
    expect_dtype,
    expect_rows,
    expect_tensors,
)
from pagewire_kernels.triton.launch import LayoutLaunch, layout_launch, layouts, run

FIXED_SPLIT_TOKENS = 1024
"""Keys per split for batch-invariant attention."""

MAX_SPLITS = 64
MIN_SPLIT_TOKENS = 128
"""Launching and merging a smaller split takes longer than it saves."""

TUNED_HEAD_DIM = 128
TILES_FILE = Path(__file__).with_name("attention_tiles.json")
"""By name of a GPU, for its decodes and prefills, fields of `Launch` and the programs per processor
that `benchmarks.tune_attention` found to be the fastest, for 16-bit heads of `TUNED_HEAD_DIM`
elements. GPUs that are not in it have the sizes that `choose_launch` derives."""

_TILES: dict[str, dict[str, dict[str, int]]] = json.loads(TILES_FILE.read_text(encoding="utf-8"))
_PROGRAMS_PER_PROCESSOR = 4

_MAX_USUAL_HEAD = 256
_ROWS_OF_LARGE_HEADS = 16
"""Rows of a tile of larger heads, those of latent attention: more would not fit into registers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How a call is divided into programs."""

    tile_rows: int
    """Rows of a tile: tokens times query heads per KV head; a power of two, at least 16."""

    tile_keys: int
    """Keys of a tile."""

    num_warps: int

    num_stages: int = 3
    """Stages of Triton's software pipeline. The block ids of a tile must be loaded before its keys,
    so that three stages prefetch one tile of keys, and five stages two."""

    num_splits: int = 1
    """Maximum number of programs that share the context of a tile."""

    num_planned: int = 0
    """For decodes: number of programs per KV head, larger than the number of sequences, which share
    all contexts by length; 0: each sequence has `num_splits` programs."""

    split_tokens: int = 0
    """Keys per split, a multiple of `tile_keys`; 0: an even share of the context."""


class Part(NamedTuple):
    """Consecutive sequences of a batch that one launch computes."""

    query_start: Tensor
    """int32 [batch size + 1], of the whole batch; sequences without rows are skipped."""
    context_lens: Tensor
    """int32 [batch size], of the whole batch."""
    first_seq: int
    num_seqs: int
    num_tokens: int
    is_decode: bool
    """Whether no sequence has more than one row."""


def parts_of(metadata: AttentionMetadata, num_tokens: int) -> Iterator[Part]:
    """Divide a mixed batch into its decodes and the other sequences: a decode among prefills would
    take a tile of 128 rows, and its context would not be split."""
    starts, lengths = metadata.query_start, metadata.context_lens
    num_seqs, num_decodes = len(lengths), metadata.num_decodes
    if metadata.device_num_decodes is not None:
        # Both launches have room for all sequences; those of the other one have no rows.
        count = metadata.device_num_decodes
        is_decode = torch.arange(num_seqs, dtype=torch.int32, device=count.device) < count
        decode_lengths = torch.where(is_decode, lengths, 0)
        yield Part(torch.minimum(starts, count), decode_lengths, 0, num_seqs, num_seqs, True)
        yield Part(torch.maximum(starts, count), lengths, 0, num_seqs, num_tokens, False)
    elif metadata.max_query_len == 1 or not 0 < num_decodes < num_seqs:
        yield _whole(metadata, num_tokens)
    else:
        num_others = num_seqs - num_decodes
        yield Part(starts, lengths, 0, num_decodes, num_decodes, True)
        yield Part(starts, lengths, num_decodes, num_others, num_tokens - num_decodes, False)


def _whole(metadata: AttentionMetadata, num_tokens: int) -> Part:
    starts, lengths = metadata.query_start, metadata.context_lens
    return Part(starts, lengths, 0, len(lengths), num_tokens, metadata.max_query_len == 1)


def choose_launch(
    query: Tensor,
    num_kv_heads: int,
    metadata: AttentionMetadata,
    *,
    part: Part | None = None,
    batch_invariant: bool = False,
) -> Launch:
    """Choose tiles and splits for a part of the batch (None: all of it).

    Contexts are split if there are too few tiles to occupy the device, or if some contexts are
    longer than others. With `batch_invariant`, the sizes of tiles and splits depend only on the
    model, so that the result of a row does not depend on its batch, nor on whether it is computed
    by a prefill or a decode; prefills are slower for it, with tiles of 16 rows. Only whether splits
    have programs of their own still depends on the batch, which does not change any bit.
    """
    num_tokens, num_heads, head_dim = query.shape
    if part is None:
        part = _whole(metadata, num_tokens)
    num_kv_heads = _num_parts(num_heads, num_kv_heads, head_dim)
    group = num_heads // num_kv_heads
    tile_rows, num_warps = _tile(query.dtype, head_dim, group, part.is_decode)
    if head_dim > _MAX_USUAL_HEAD:
        tile_rows, num_warps = _ROWS_OF_LARGE_HEADS, 4
    elif batch_invariant:
        tile_rows, num_warps = max(16, triton.next_power_of_2(group)), 4
    is_float32 = query.dtype == torch.float32
    tile_keys = 64 >> (is_float32 + (head_dim > 128))
    sizes = {
        "tile_rows": tile_rows,
        "tile_keys": tile_keys if head_dim <= _MAX_USUAL_HEAD else 16,
        "num_warps": num_warps,
        "num_stages": num_stages(_shared_memory(query.device), head_dim),
        "programs_per_processor": _PROGRAMS_PER_PROCESSOR,
    }
    if not batch_invariant and head_dim == TUNED_HEAD_DIM and query.dtype != torch.float32:
        sizes |= _tuned(query.device, part.is_decode)
        sizes["tile_rows"] = max(sizes["tile_rows"], triton.next_power_of_2(group))
    programs = sizes.pop("programs_per_processor") * num_processors(query.device)
    num_tiles = part.num_seqs
    if not part.is_decode:
        num_tiles += part.num_tokens // (sizes["tile_rows"] // group)
    room = programs // max(1, num_tiles * num_kv_heads)
    split_tokens, num_splits, num_planned = 0, 1, 0
    if batch_invariant:
        split_tokens = FIXED_SPLIT_TOKENS
        num_splits = triton.cdiv(metadata.max_context_len, split_tokens) if room > 1 else 1
    elif part.is_decode:
        num_planned = part.num_seqs + max(1, programs // num_kv_heads)
    else:
        num_splits = min(room, metadata.max_context_len // MIN_SPLIT_TOKENS, MAX_SPLITS)
    return Launch(
        num_splits=max(1, num_splits),
        num_planned=num_planned,
        split_tokens=split_tokens,
        **sizes,
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
    value_dim: int | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    launch: Launch | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """Causal attention of flattened query rows; as `reference.paged_attention`.

    The caches may be fp8. Rows after those of the last sequence are left uninitialized, so that a
    captured graph can be padded. launch: for the whole batch; None: chosen by `choose_launch`, with
    `batch_invariant`. Raises TypeError or ValueError for tensors of unsupported dtypes, shapes or
    strides.
    """
    query = dense(query)
    num_tokens, num_heads, head_dim = query.shape
    num_parts = _num_parts(num_heads, key_cache.shape[2], head_dim)
    if num_parts > key_cache.shape[2]:
        key_cache, value_cache = (
            cache.expand(-1, -1, num_parts, -1) for cache in (key_cache, value_cache)
        )
    output = query.new_empty(query.shape)
    if num_tokens == 0:
        return output
    has_alibi = alibi_slopes is not None
    sinks = None if sinks is None else _per_head("sinks", sinks, num_heads)
    alibi_slopes = None if alibi_slopes is None else _per_head("slopes", alibi_slopes, num_heads)
    # Most layers of a step have equal layouts and features, so checks and the arguments of launches
    # are computed for the first of them.
    features = _Features(sliding_window, soft_cap is not None, sinks is not None, has_alibi)
    given = layouts(query, key_cache, value_cache), features, launch, batch_invariant
    prepared = metadata.plans.get(given)
    if prepared is None:
        _check(query, key_cache, value_cache, metadata)
        launches = _prepared(query, key_cache, metadata, launch, features, batch_invariant)
        prepared = metadata.plans[given] = [*launches]
    sinks = output if sinks is None else sinks
    alibi_slopes = output if alibi_slopes is None else alibi_slopes
    layer = output, query, key_cache, value_cache, sinks, alibi_slopes
    scale, soft_cap = scale * key_scale, soft_cap or 1.0
    for attend_launch, reduce_launch in prepared:
        run(attend_launch, layer, scale, soft_cap, value_scale)
        if reduce_launch is not None:
            run(reduce_launch, (output, sinks), value_scale)
    return output


class _Features(NamedTuple):
    """On what the launches of a layer depend, other than layouts."""

    sliding_window: int | None
    has_cap: bool
    has_sinks: bool
    has_alibi: bool


def _prepared(
    query: Tensor,
    key_cache: Tensor,
    metadata: AttentionMetadata,
    launch: Launch | None,
    features: _Features,
    batch_invariant: bool,
) -> Iterator[tuple[LayoutLaunch, LayoutLaunch | None]]:
    """Yield what is the same for all layers of a step: the launches of `attend` for the parts of a
    batch, and of `reduce_splits`, if the part is split."""
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    whole = _whole(metadata, num_tokens)
    parts = [whole] if launch is not None else [*parts_of(metadata, num_tokens)]
    for part in parts:
        chosen = launch or choose_launch(
            query, num_kv_heads, metadata, part=part, batch_invariant=batch_invariant
        )
        tile_tokens = chosen.tile_rows // group
        expect(
            tile_tokens >= 1,
            f"launch: expected tile_rows of at least {group}, the query heads per KV head, got"
            f" {chosen.tile_rows}",
        )
        is_planned = part.is_decode and chosen.num_planned > 0
        num_tiles = chosen.num_planned if is_planned else part.num_seqs
        if not part.is_decode:
            num_tiles += part.num_tokens // tile_tokens
        is_split = is_planned or chosen.num_splits > 1
        partial_rows = (chosen.num_splits, part.num_tokens) if is_split else (0,)
        if is_planned:
            partial_rows = (chosen.num_planned,)
        num_rows = part.num_seqs if part.is_decode else part.num_tokens
        window = features.sliding_window
        counts = (part.first_seq, part.num_seqs, part.num_tokens, chosen.num_splits, window or 0)
        shared: dict[str, int | bool] = {
            "HAS_WINDOW": window is not None,
            "HAS_SINKS": features.has_sinks,
            "IS_DECODE": part.is_decode,
            "IS_PLANNED": is_planned,
            "SPLIT_TOKENS": chosen.split_tokens,
            "HEAD_DIM": head_dim,
            "PADDED_DIM": padded_dim,
            "TILE_KEYS": chosen.tile_keys,
            "enable_fp_fusion": chosen.split_tokens == 0,
        }
        # Output and sums of splits, which one layer after another overwrites.
        partials = (
            query.new_empty((*partial_rows, num_heads, size), dtype=torch.float32)
            for size in (padded_dim, 2)
        )
        plan = _plan(part, chosen) if is_planned else part.context_lens  # not read without a plan
        inputs = *partials, part.query_start, part.context_lens
        reduce = None
        if is_split:
            reduce = layout_launch(
                reduce_splits,
                (num_rows, num_heads),
                (*counts, num_heads * head_dim),
                (*inputs, plan),
                num_warps=1,
                **shared,
            )
        strides = *query.stride()[:2], num_heads * head_dim, *key_cache.stride()[:3]
        grid = num_tiles * num_kv_heads, 1 if is_planned else chosen.num_splits
        attend_launch = layout_launch(
            attend,
            grid,
            (*counts, *strides, metadata.block_tables.stride(0)),
            (*inputs, metadata.block_tables, plan),
            HAS_CAP=features.has_cap,
            HAS_ALIBI=features.has_alibi,
            IS_SPLIT=is_split,
            BLOCK_SIZE=block_size,
            NUM_KV_HEADS=num_kv_heads,
            GROUP=group,
            TILE_TOKENS=tile_tokens,
            TILE_ROWS=chosen.tile_rows,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            **shared,
        )
        yield attend_launch, reduce


def _plan(part: Part, launch: Launch) -> Tensor:
    """The splits of a step's decodes."""
    expect(
        launch.num_planned > part.num_seqs,
        f"launch: expected num_planned above {part.num_seqs}, the number of sequences, got"
        f" {launch.num_planned}",
    )
    plan = part.context_lens.new_empty(part.num_seqs + 2)
    plan_splits[(1,)](
        plan,
        part.context_lens,
        part.num_seqs,
        launch.num_planned,
        LEAST=MIN_SPLIT_TOKENS,
        TILE_KEYS=launch.tile_keys,
        enable_fp_fusion=False,
    )
    return plan


def _tile(dtype: torch.dtype, head_dim: int, group: int, is_decode: bool) -> tuple[int, int]:
    """Rows of a tile, and warps. There are only two sizes, since each is compiled separately.

    A tile of a decode has the heads of one token, a tile of a prefill as many rows as fit into
    registers.
    """
    smallest = max(16, triton.next_power_of_2(group))
    if is_decode:
        return smallest, 4
    largest = 128 if head_dim <= 128 else 64
    if dtype == torch.float32:
        largest = 32
    tile_rows = max(smallest, largest)
    return tile_rows, 8 if tile_rows >= 128 else 4


@cache
def _tuned(device: torch.device, is_decode: bool) -> dict[str, int]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return _TILES.get(name, {}).get("decode" if is_decode else "prefill", {})


@cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return 4  # for the interpreter: few, so that tests cover launches with and without splits
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _shared_memory(device: torch.device) -> int:
    """Maximum shared memory of a program, in bytes."""
    if device.type != "cuda":
        return 2**18
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return int(properties["max_shared_mem"])


def _num_parts(num_heads: int, num_kv_heads: int, head_dim: int) -> int:
    """The number of KV heads, or if large query heads share one, that of equal parts of them that
    fit into a tile, of which each counts as a KV head in the same place of the cache."""
    if num_kv_heads > 1 or head_dim <= _MAX_USUAL_HEAD:
        return num_kv_heads
    least = -(-num_heads // _ROWS_OF_LARGE_HEADS)
    return next(n for n in range(least, num_heads + 1) if num_heads % n == 0)


def num_stages(shared_memory: int, head_dim: int) -> int:
    """As many stages as shared memory allows: with five, a tile of a prefill takes 129 KiB. With
    two, one of heads of more than 1,024 elements takes 193 KiB."""
    if head_dim > _MAX_USUAL_HEAD:
        needed = 160 if head_dim <= 1024 else 200
        return 2 if shared_memory >= needed * 1024 else 1
    return 5 if shared_memory >= 160 * 1024 else 3


def _per_head(name: str, values: Tensor, num_heads: int) -> Tensor:
    expect_rows(name, values, num_heads)
    return values.float()


def _check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
) -> None:
    expect_dtype("query", query, *FLOATS)
    expect_cache(key_cache, value_cache, query.dtype)
    num_kv_heads, head_dim = key_cache.shape[2:]
    num_seqs, int32 = len(metadata.context_lens), (torch.int32,)
    expect_tensors(
        ("query", query, FLOATS, (None, None, head_dim)),
        ("query_start", metadata.query_start, int32, (num_seqs + 1,)),
        ("context_lens", metadata.context_lens, int32, (num_seqs,)),
        ("block_tables", metadata.block_tables, int32, (num_seqs, None)),
    )
    expect(
        query.shape[1] % num_kv_heads == 0,
        f"query: expected a multiple of {num_kv_heads} heads, as in the cache, got"
        f" {query.shape[1]}",
    )
