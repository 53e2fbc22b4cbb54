"""The `cpu` attention backend in C++, and the tasks of its kernels.

A task holds addresses of tensors, which must outlive it.
"""

import ctypes
from typing import Unpack

import torch
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.checks import (
    ABILITIES,
    DTYPES,
    check_bias,
    check_cache,
    check_packed,
    kernel_over,
    with_dense_heads,
)
from pagewire_kernels.cpu.native_library import Library
from pagewire_kernels.cpu.program import batch_of, launch, new_rows, recording
from pagewire_kernels.cpu.tasks import AttentionTask, Batch, CacheWriteTask, address, describe_batch
from pagewire_kernels.interface import AttentionOptions, CacheScales, PackedOptions

MAX_ROWS = 256
"""Maximum number of query rows of one KV head in a work item, unless one token has more."""

_ALIGNMENT = 64

_UNBOUNDED = 1 << 30
"""More keys than there are."""

_SERIAL_WORK = 1 << 18
"""Fewer multiply-adds end before other threads have woken up, and use one thread."""

_MIN_GROUP = 4
"""Fewer query heads take hardly less time for their share of a decode, most of which is reading."""

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
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._last: tuple[AttentionMetadata, Batch] | None = None

    def write_kv(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        **scales: Unpack[CacheScales],
    ) -> None:
        """Write each row's key and value to its slot; as `reference.write_kv`."""
        check_cache(key_cache, value_cache, key, scales)
        key, value = with_dense_heads(key), with_dense_heads(value)
        slot_mapping = slot_mapping.contiguous()
        batch = batch_of(key.shape[0], slot_mapping=slot_mapping)
        size, (_, num_kv_heads, head_dim) = key.element_size(), key.shape
        task = CacheWriteTask(
            batch=ctypes.addressof(batch),
            key=key.data_ptr(),
            value=value.data_ptr(),
            key_row_bytes=key.stride(0) * size,
            value_row_bytes=value.stride(0) * size,
            **_cache_fields(key_cache, value_cache),
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            copied_bytes=num_kv_heads * head_dim * size,
        )
        num_threads = threads.count_for(key.shape[0] * task.copied_bytes, _SERIAL_BYTES - 1)
        name = "cache_write"
        if key_cache.dtype != key.dtype:
            name = f"{kernel_over(key_cache, name)}_{DTYPES[key.dtype]}"
        launch(self._library.kernel(name), task, num_threads)

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: AttentionMetadata,
        **options: Unpack[AttentionOptions],
    ) -> Tensor:
        """Causal attention of flattened query rows; as `reference.paged_attention`."""
        check_cache(key_cache, value_cache, query, options)
        num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
        if num_kv_heads == 1:
            num_kv_heads = _parts_of(num_heads, torch.get_num_threads())
            key_cache, value_cache = (
                cache.expand(-1, -1, num_kv_heads, -1) for cache in (key_cache, value_cache)
            )
        sinks, slopes = _floats(options.get("sinks")), _floats(options.get("alibi_slopes"))
        task = AttentionTask(
            **_cache_fields(key_cache, value_cache),
            head_bytes=key_cache.stride(2) * key_cache.element_size(),
            num_kv_heads=num_kv_heads,
            keys_before=(options.get("sliding_window") or _UNBOUNDED) - 1,
            sinks=address(sinks),
            alibi_slopes=address(slopes),
            value_dim=options.get("value_dim") or query.shape[2],
            scale=options["scale"],
            soft_cap=options.get("soft_cap") or 0.0,
        )
        return self._attend(kernel_over(key_cache, "attention"), task, query, metadata)

    def packed_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        metadata: AttentionMetadata,
        **options: Unpack[PackedOptions],
    ) -> Tensor:
        """Attention over all rows of whole texts; as `reference.packed_attention`."""
        if key.stride() != value.stride() or key.stride(2) != 1:
            key, value = key.contiguous(), value.contiguous()
        check_packed(query, key, value, metadata)
        size, bias, window = key.element_size(), options.get("bias"), options.get("window")
        if bias is not None:
            check_bias(bias, query.shape[1], metadata.max_context_len)
        keys_around = _UNBOUNDED if window is None else window
        task = AttentionTask(
            key_cache=key.data_ptr(),
            value_cache=value.data_ptr(),
            token_bytes=key.stride(0) * size,
            head_bytes=key.stride(1) * size,
            num_kv_heads=key.shape[1],
            keys_before=keys_around,
            keys_after=keys_around,
            bias=address(bias),
            bias_width=0 if bias is None else bias.shape[1],
            value_dim=query.shape[2],
            scale=options["scale"],
        )
        return self._attend("attention", task, query, metadata)

    def _attend(
        self, kernel: str, task: AttentionTask, query: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Launch a task that lacks queries, output and scratch."""
        query = query if query.stride(2) == 1 else query.contiguous()
        (num_rows, num_heads, head_dim), size = query.shape, query.element_size()
        output = new_rows(num_rows, num_heads * head_dim, query.dtype).unflatten(1, query.shape[1:])
        task.batch = ctypes.addressof(self._batch_of(metadata, num_rows))
        task.query, task.output = query.data_ptr(), output.data_ptr()
        task.query_token_bytes, task.query_head_bytes = (query.stride(i) * size for i in (0, 1))
        task.output_token_bytes = output.stride(0) * size
        task.group = num_heads // task.num_kv_heads
        task.head_dim = head_dim
        task.tile_tokens = max(1, MAX_ROWS // task.group)
        work = query.numel() * metadata.max_context_len
        is_small = work < _SERIAL_WORK and recording() is None
        num_threads = 1 if is_small else torch.get_num_threads()
        self._give_scratch(task, num_threads)
        launch(self._library.kernel(f"{kernel}_{DTYPES[query.dtype]}"), task, num_threads)
        return output

    def _give_scratch(self, task: AttentionTask, num_threads: int) -> None:
        """Assign scratch memory for up to `num_threads` threads to `task`."""
        self._library.kernel("attention_slot_bytes").call(ctypes.addressof(task))
        num_bytes = num_threads * task.slot_bytes + _ALIGNMENT
        if (program := recording()) is not None:
            memory = program.buffers.take((num_bytes,), torch.uint8)
        else:
            if self._scratch.numel() < num_bytes:
                self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
            memory = self._scratch
        task.num_slots = num_threads
        task.scratch = -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def _batch_of(self, metadata: AttentionMetadata, num_rows: int) -> Batch:
        """The batch of the recorded program, or one that is described once per step."""
        if recording() is not None:
            return batch_of(num_rows, slot_mapping=metadata.slot_mapping)
        if self._last is None or self._last[0] is not metadata:
            batch = Batch()
            describe_batch(batch, num_rows, metadata)
            self._last = metadata, batch
        return self._last[1]


def _parts_of(num_heads: int, num_threads: int) -> int:
    """The number of parts into which query heads that share one KV head are divided, so that
    several threads can compute a decode. Each part counts as a KV head of its own, in the same
    place of the cache; results have the same bits."""
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    large = [n for n in divisors if n == 1 or num_heads // n >= _MIN_GROUP]
    return next((n for n in large if n >= num_threads), large[-1])


def _cache_fields(key_cache: Tensor, value_cache: Tensor) -> dict[str, int]:
    """The fields of a task for the caches, which have one layout."""
    size = key_cache.element_size()
    return {
        "key_cache": key_cache.data_ptr(),
        "value_cache": value_cache.data_ptr(),
        "block_bytes": key_cache.stride(0) * size,
        "token_bytes": key_cache.stride(1) * size,
        "block_size": key_cache.shape[1],
    }


def _floats(numbers: Tensor | None) -> Tensor | None:
    return None if numbers is None else numbers.float().contiguous()
