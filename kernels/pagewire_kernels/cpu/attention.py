"""The `cpu` attention backend in C++, and the tasks of its kernels.

A task holds addresses of tensors, which must outlive it.
"""

import ctypes

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.cpu.checks import (
    ABILITIES,
    check_cache,
    kernel_over,
    refuse_scales,
    with_dense_heads,
)
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import batch_of, launch, new_rows, recording
from pagewire_kernels.cpu.tasks import AttentionTask, Batch, CacheWriteTask, address, describe_batch

MAX_ROWS = 256
"""Maximum number of query rows of one KV head in a work item, unless one token has more."""

_ALIGNMENT = 64


class Scratch:
    """Scratch memory for one task at a time, which grows to the largest size so far."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def give(self, library: Library, task: AttentionTask, num_threads: int) -> None:
        """Assign scratch memory for up to `num_threads` threads to `task`."""
        library.kernel("attention_slot_bytes").call(ctypes.addressof(task))
        memory = self._memory_of(num_threads * task.slot_bytes + _ALIGNMENT)
        task.num_slots = num_threads
        task.scratch = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def _memory_of(self, num_bytes: int) -> Tensor:
        program = recording()
        if program is not None:
            return program.buffers.take((num_bytes,), torch.uint8)
        if self._memory.numel() < num_bytes:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory


def describe_attention(
    batch: Batch,
    query: Tensor,
    output: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
) -> AttentionTask:
    """Describe the arguments of `reference.paged_attention` as a task without scratch memory.

    query: with a dense last axis; output: with dense rows; sinks, alibi_slopes: float32.
    """
    size, stored = query.element_size(), key_cache.element_size()
    num_kv_heads = key_cache.shape[2]
    group = query.shape[1] // num_kv_heads
    return AttentionTask(
        batch=ctypes.addressof(batch),
        query=query.data_ptr(),
        query_token_bytes=query.stride(0) * size,
        query_head_bytes=query.stride(1) * size,
        output=output.data_ptr(),
        output_token_bytes=output.stride(0) * size,
        key_cache=key_cache.data_ptr(),
        value_cache=value_cache.data_ptr(),
        block_bytes=key_cache.stride(0) * stored,
        token_bytes=key_cache.stride(1) * stored,
        head_bytes=key_cache.stride(2) * stored,
        block_size=key_cache.shape[1],
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=query.shape[2],
        tile_tokens=max(1, MAX_ROWS // group),
        window=sliding_window or 0,
        sinks=address(sinks),
        alibi_slopes=address(alibi_slopes),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )


def describe_cache_write(
    batch: Batch, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor
) -> CacheWriteTask:
    """Describe the arguments of `reference.write_kv` as a task; heads of a row are contiguous."""
    size, stored = key.element_size(), key_cache.element_size()
    return CacheWriteTask(
        batch=ctypes.addressof(batch),
        key=key.data_ptr(),
        value=value.data_ptr(),
        key_row_bytes=key.stride(0) * size,
        value_row_bytes=value.stride(0) * size,
        key_cache=key_cache.data_ptr(),
        value_cache=value_cache.data_ptr(),
        block_bytes=key_cache.stride(0) * stored,
        token_bytes=key_cache.stride(1) * stored,
        block_size=key_cache.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[2],
        copied_bytes=key.shape[1] * key.shape[2] * size,
    )


_SERIAL_WORK = 1 << 18
"""Fewer multiply-adds end before other threads have woken up, and use one thread."""

_SERIAL_BYTES = 1 << 15
"""Copies of fewer bytes use one thread, too."""


class NativeBackend:
    """Attention by kernels in C++; results are bitwise independent of the batch.

    An object keeps scratch memory between calls, so only one thread may use it at a time.
    """

    name = "cpu"
    abilities = ABILITIES

    def __init__(self, library: Library) -> None:
        self._library = library
        self._scratch = Scratch()
        self._last: tuple[AttentionMetadata, Batch] | None = None

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
        """Write each row's key and value to its slot; as `reference.write_kv`."""
        refuse_scales(key_scale, value_scale)
        check_cache(key_cache, value_cache, key)
        key, value = with_dense_heads(key), with_dense_heads(value)
        slot_mapping = slot_mapping.contiguous()
        batch = batch_of(key.shape[0], slot_mapping=slot_mapping)
        task = describe_cache_write(batch, key, value, key_cache, value_cache)
        is_small = key.shape[0] * task.copied_bytes < _SERIAL_BYTES
        num_threads = 1 if is_small else torch.get_num_threads()
        name = "cache_write"
        if key_cache.dtype != key.dtype:
            name = f"{kernel_over(key_cache, name)}_{_NAMES[key.dtype]}"
        launch(self._library.kernel(name), task, num_threads)

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
        query = query if query.stride(2) == 1 else query.contiguous()
        num_rows, num_heads, head_dim = query.shape
        output = new_rows(num_rows, num_heads * head_dim, query.dtype).unflatten(1, query.shape[1:])
        sinks = None if sinks is None else sinks.float().contiguous()
        alibi_slopes = None if alibi_slopes is None else alibi_slopes.float().contiguous()
        task = describe_attention(
            self._batch_of(metadata, num_rows),
            query,
            output,
            key_cache,
            value_cache,
            scale=scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
        )
        work = query.numel() * metadata.max_context_len
        is_small = work < _SERIAL_WORK and recording() is None
        num_threads = 1 if is_small else torch.get_num_threads()
        self._scratch.give(self._library, task, num_threads)
        name = f"{kernel_over(key_cache, 'attention')}_{_NAMES[query.dtype]}"
        launch(self._library.kernel(name), task, num_threads)
        return output

    def _batch_of(self, metadata: AttentionMetadata, num_rows: int) -> Batch:
        """The batch of the recorded program, or one that is described once per step."""
        if recording() is not None:
            return batch_of(num_rows, slot_mapping=metadata.slot_mapping)
        if self._last is None or self._last[0] is not metadata:
            batch = Batch()
            describe_batch(batch, metadata)
            self._last = metadata, batch
        return self._last[1]


_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
