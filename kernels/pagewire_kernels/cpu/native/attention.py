"""Tasks of attention, described by tensors. A task holds addresses: its tensors must outlive it."""

import ctypes

import torch
from torch import Tensor

from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import recording
from pagewire_kernels.cpu.tasks import AttentionTask, Batch, CacheWriteTask

MAX_ROWS = 128
"""Query rows of one KV head in a work item, unless the head has more for a single token."""

_ALIGNMENT = 64


class Scratch:
    """Scratch memory of one task at a time, grown to the largest so far."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def give(self, library: Library, task: AttentionTask, num_threads: int) -> None:
        """Give `task` scratch memory for up to `num_threads` threads."""
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
    """The task of `reference.paged_attention`, without scratch memory.

    `query` has a dense last axis, `output` dense rows, `sinks` and `alibi_slopes` are float32.
    """
    size = query.element_size()
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
        block_bytes=key_cache.stride(0) * size,
        token_bytes=key_cache.stride(1) * size,
        head_bytes=key_cache.stride(2) * size,
        block_size=key_cache.shape[1],
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=query.shape[2],
        tile_tokens=max(1, MAX_ROWS // group),
        window=sliding_window or 0,
        sinks=_address(sinks),
        alibi_slopes=_address(alibi_slopes),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def describe_cache_write(
    batch: Batch, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor
) -> CacheWriteTask:
    """The task of `reference.write_kv`; a row's heads lie one after the other."""
    size = key.element_size()
    return CacheWriteTask(
        batch=ctypes.addressof(batch),
        key=key.data_ptr(),
        value=value.data_ptr(),
        key_row_bytes=key.stride(0) * size,
        value_row_bytes=value.stride(0) * size,
        key_cache=key_cache.data_ptr(),
        value_cache=value_cache.data_ptr(),
        block_bytes=key_cache.stride(0) * size,
        token_bytes=key_cache.stride(1) * size,
        block_size=key_cache.shape[1],
        copied_bytes=key.shape[1] * key.shape[2] * size,
    )
