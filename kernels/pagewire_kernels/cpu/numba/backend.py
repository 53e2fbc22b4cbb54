"""The `cpu` attention backend in numba: lays out a kernel's arguments and runs it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.checks import ABILITIES, check_cache, refuse_scales, with_dense_heads
from pagewire_kernels.cpu.numba import attention, cache_write
from pagewire_kernels.cpu.numba.attention import MAX_ROWS, VECTOR_BYTES
from pagewire_kernels.cpu.numba.compile import attention_kernel, write_kv_kernel
from pagewire_kernels.cpu.numba.simd import LANES

_SERIAL_WORK = 1 << 17
"""Fewer multiply-adds than this finish before other threads have woken up."""

_TILES_PER_THREAD = 4
"""With fewer tiles for each thread, a work item is one KV head instead of all."""


class _Memory:
    """An array that a kernel reads, and its address."""

    def __init__(self, size: int, dtype: type) -> None:
        self.array: np.ndarray = np.zeros(size, dtype)
        self.address = int(self.array.ctypes.data)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How a batch is cut into tiles of query tokens; the same for all layers of a step."""

    metadata: AttentionMetadata
    tile_tokens: int
    tile_start: np.ndarray
    num_tiles: int
    num_seqs: int
    work: int
    """Pairs of query token and key, at most."""


class NumbaBackend:
    """Attention by numba's kernels; a row's result is bitwise independent of its batch.

    Heads of fewer than sixteen elements go through the reference, without that promise. An object
    keeps its arguments' memory from call to call, so it serves one thread at a time.
    """

    name = "cpu"
    abilities = ABILITIES

    def __init__(self) -> None:
        self._tiling: _Tiling | None = None
        self._write_task = _Memory(cache_write.NUM_FIELDS, np.int64)
        self._task = _Memory(attention.NUM_FIELDS, np.int64)
        self._counters = _Memory(2, np.int64)
        self._floats = _Memory(attention.NUM_FLOATS, np.float32)
        self._floats.array[:LANES] = np.arange(LANES)
        self._scratch = _Memory(0, np.uint8)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile, or load from disk, what a cache of `dtype` needs."""
        attention_kernel(dtype)
        write_kv_kernel()

    def write_kv(
        self,
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
        refuse_scales(key_scale, value_scale)
        check_cache(key_cache, value_cache, key)
        key, value = with_dense_heads(key), with_dense_heads(value)
        slot_mapping = slot_mapping.contiguous()
        num_rows, num_heads, head_dim = key.shape
        size = key.element_size()
        task = self._write_task.array
        task[cache_write.KEY], task[cache_write.VALUE] = key.data_ptr(), value.data_ptr()
        task[cache_write.KEY_ROW_BYTES] = key.stride(0) * size
        task[cache_write.VALUE_ROW_BYTES] = value.stride(0) * size
        task[cache_write.KEY_CACHE], task[cache_write.VALUE_CACHE] = (
            key_cache.data_ptr(),
            value_cache.data_ptr(),
        )
        task[cache_write.BLOCK_BYTES] = key_cache.stride(0) * size
        task[cache_write.TOKEN_BYTES] = key_cache.stride(1) * size
        task[cache_write.BLOCK_SIZE] = key_cache.shape[1]
        task[cache_write.SLOT_MAPPING] = slot_mapping.data_ptr()
        task[cache_write.NUM_ROWS] = num_rows
        task[cache_write.COPIED_BYTES] = num_heads * head_dim * size
        task[cache_write.NUM_ITEMS] = num_items = -(-num_rows // cache_write.ROWS_PER_ITEM)
        task[cache_write.NEXT_ITEM] = self._counters.address
        self._counters.array[:] = 0
        num_threads = max(1, min(torch.get_num_threads(), num_items))
        threads.run(write_kv_kernel(), self._write_task.address, num_threads)

    def paged_attention(
        self,
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
        """Causal attention of flattened query rows; as `reference.paged_attention`."""
        refuse_scales(key_scale, value_scale)
        check_cache(key_cache, value_cache, query)
        if query.shape[2] < LANES:
            return reference.paged_attention(
                query,
                key_cache,
                value_cache,
                metadata,
                scale=scale,
                sliding_window=sliding_window,
                soft_cap=soft_cap,
                sinks=sinks,
                alibi_slopes=alibi_slopes,
            )
        if query.stride(2) != 1:
            query = query.contiguous()
        output = torch.empty(query.shape, dtype=query.dtype)
        if sinks is not None:
            sinks = sinks.float().contiguous()
        if alibi_slopes is not None:
            alibi_slopes = alibi_slopes.float().contiguous()
        task = self._task.array
        _describe_tensors(task, query, output, key_cache, value_cache)
        group = query.shape[1] // key_cache.shape[2]
        tiling = self._tiling_of(metadata, max(1, MAX_ROWS // group))
        _describe_batch(task, tiling)
        task[attention.GROUP] = group
        task[attention.WINDOW] = sliding_window or 0
        task[attention.SINKS] = sinks.data_ptr() if sinks is not None else 0
        task[attention.SLOPES] = alibi_slopes.data_ptr() if alibi_slopes is not None else 0
        task[attention.FLOATS] = self._floats.address
        task[attention.NEXT_ITEM] = self._counters.address
        task[attention.NEXT_THREAD] = self._counters.address + 8
        self._floats.array[LANES:] = scale, soft_cap or 0.0
        self._counters.array[:] = 0
        num_threads = self._share_work(tiling, key_cache.shape[2], group, query.shape[2])
        threads.run(attention_kernel(query.dtype), self._task.address, num_threads)
        return output

    def _tiling_of(self, metadata: AttentionMetadata, tile_tokens: int) -> _Tiling:
        last = self._tiling
        if last is None or last.metadata is not metadata or last.tile_tokens != tile_tokens:
            last = self._tiling = _cut(metadata, tile_tokens)
        return last

    def _share_work(self, tiling: _Tiling, num_kv_heads: int, group: int, head_dim: int) -> int:
        """Cut the batch into work items and get the threads' memory; returns how many threads."""
        num_threads = torch.get_num_threads()
        if tiling.work * num_kv_heads * group * head_dim < _SERIAL_WORK:
            num_threads = 1
        item_heads = num_kv_heads if tiling.num_tiles >= _TILES_PER_THREAD * num_threads else 1
        num_items = tiling.num_tiles * num_kv_heads // item_heads
        num_threads = max(1, min(num_threads, num_items))

        rows = max(tiling.tile_tokens, item_heads) * group
        per_thread = attention.scratch_bytes(head_dim, rows)
        needed = per_thread * num_threads + VECTOR_BYTES
        if self._scratch.array.nbytes < needed:
            self._scratch = _Memory(needed, np.uint8)
        task = self._task.array
        task[attention.ITEM_HEADS], task[attention.NUM_ITEMS] = item_heads, num_items
        # A vector that straddles two cache lines takes twice as long to load.
        task[attention.SCRATCH] = -(-self._scratch.address // VECTOR_BYTES) * VECTOR_BYTES
        task[attention.SCRATCH_BYTES] = per_thread
        return num_threads


def _cut(metadata: AttentionMetadata, tile_tokens: int) -> _Tiling:
    query_lens = np.diff(metadata.query_start.numpy())
    tile_start = np.zeros(len(query_lens) + 1, np.int32)
    np.cumsum(-(-query_lens // tile_tokens), out=tile_start[1:])
    work = int(np.dot(query_lens.astype(np.int64), metadata.context_lens.numpy()))
    return _Tiling(metadata, tile_tokens, tile_start, int(tile_start[-1]), len(query_lens), work)


def _describe_tensors(
    task: np.ndarray, query: Tensor, output: Tensor, key_cache: Tensor, value_cache: Tensor
) -> None:
    size = query.element_size()
    task[attention.QUERY], task[attention.OUTPUT] = query.data_ptr(), output.data_ptr()
    task[attention.QUERY_TOKEN_BYTES] = query.stride(0) * size
    task[attention.QUERY_HEAD_BYTES] = query.stride(1) * size
    task[attention.KEY_CACHE] = key_cache.data_ptr()
    task[attention.VALUE_CACHE] = value_cache.data_ptr()
    task[attention.BLOCK_BYTES] = key_cache.stride(0) * size
    task[attention.TOKEN_BYTES] = key_cache.stride(1) * size
    task[attention.HEAD_BYTES] = key_cache.stride(2) * size
    task[attention.ELEMENT_BYTES] = size
    task[attention.BLOCK_SIZE] = key_cache.shape[1]
    task[attention.NUM_KV_HEADS] = key_cache.shape[2]
    task[attention.HEAD_DIM] = query.shape[2]


def _describe_batch(task: np.ndarray, tiling: _Tiling) -> None:
    metadata = tiling.metadata
    for tensor in (metadata.query_start, metadata.context_lens, metadata.block_tables):
        assert tensor.dtype == torch.int32, "metadata is int32"
        assert tensor.is_contiguous(), "metadata is contiguous"
    task[attention.QUERY_START] = metadata.query_start.data_ptr()
    task[attention.CONTEXT_LENS] = metadata.context_lens.data_ptr()
    task[attention.BLOCK_TABLES] = metadata.block_tables.data_ptr()
    task[attention.TABLE_WIDTH] = metadata.block_tables.shape[1]
    task[attention.NUM_SEQS] = tiling.num_seqs
    task[attention.TILE_START] = tiling.tile_start.ctypes.data
    task[attention.TILE_TOKENS] = tiling.tile_tokens
