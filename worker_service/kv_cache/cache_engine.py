"""The KV caches on device and host, and the operations that move whole blocks.

A cache is a pool of blocks, uint8 `[num_blocks, block_bytes]`. A block is one contiguous piece of
memory, whatever the cache group that it is used in, so swapping it out, swapping it in and copying
it move one piece each. Layers are strided views of the pool (`models/kv_cache_spec.py`). In int8, a
head's codes are followed by their scale, so that these operations move scales without knowing of
them. The device has one block more than the scheduler knows: the null block, which is zero.

On a GPU the operations run on a stream of their own, and overlap the step's forward pass; the next
plan waits for them. Targets of swap-ins are used from the next plan on (`plan.proto`). The forward
pass waits for swap-outs and copies in two cases only: if the plan has copies, whose targets it may
read and whose sources it may write to; and if the plan assigns a block that it also swaps out to a
sequence, whose row may overwrite it. Blocks that are copied to the host before they are evicted are
not assigned in the same plan, so those copies cost a step no time of its own. On a CPU all is done
at once, by the threads that compute: both share the memory's bandwidth, so running it concurrently
would gain nothing.

How blocks are moved on a GPU was measured on H200s with pinned host memory. With blocks of 64 KB,
one copy per block reaches 10 GB/s, and a kernel that reads and writes the host's memory in place 51
GB/s for any number of scattered blocks; plain copies reach 32 GB/s at 1 MB, 53 at 16 MB and 55 at
256 MB. But while the kernel writes to the host, others wait for memory: of a step that it
overlapped, kernels of 3 us took 200, and the first attention began when it was done. A copy
occupies no multiprocessor. So runs of neighbours that are large enough are copied, which are single
blocks of many models, and everything else is moved by the kernel. On a CPU a kernel of its own
makes all threads copy, bypassing the caches.

On a CPU the system allocates a page when it is first written to, which takes longer than computing
what is written on some virtual machines. So a thread populates the cache from its allocation on.
With prefix caching every block is used once before any is used twice: what the cache takes in the
end, it takes at the start, where a machine with too little memory is noticed.
"""

import atexit
import ctypes
import logging
import math
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.cpu.block_copy import move_blocks
from pagewire_kernels.cpu.native_library import library
from pagewire_kernels.reference import swap_blocks
from worker_service.array_types import Int32Array, Int64Array
from worker_service.errors import InvalidPlan, OutOfMemory
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.pinned_memory import pin_in_place
from worker_service.plan import StepPlan, monotonic_us

logger = logging.getLogger(__name__)

MIN_COPY_BYTES = 2**20
"""Size from which a run of adjacent blocks is copied: slower than by the kernel, but beside the
step."""


Move = Callable[[Tensor, Tensor, Tensor], None]
"""Moves blocks as `pagewire_kernels.reference.swap_blocks` does."""


class BlockMover:
    """Moves blocks without waiting for a device: a kernel moves many scattered ones in one call,
    plain copies move long runs of adjacent blocks with adjacent targets.

    Pairs: int32 [n, 2] of (source, target).
    """

    def __init__(self, move: Move, min_copy_bytes: float = math.inf) -> None:
        """min_copy_bytes: size from which a run is copied."""
        self._move = move
        self._min_copy_bytes = min_copy_bytes

    def swap(self, source: Tensor, target: Tensor, pairs: Int32Array) -> None:
        """Move blocks from one cache to the other; targets are distinct."""
        if not len(pairs):  # as in most steps
            return
        runs = _runs(pairs)
        is_long = runs[:, 1] * source[:1].nbytes >= self._min_copy_bytes
        for start, length in runs[is_long].tolist():
            first, second = pairs[start].tolist()
            run = source[first : first + length]
            target[second : second + length].copy_(run, non_blocking=True)
        self._move_all(source, target, pairs[np.repeat(~is_long, runs[:, 1])])

    def copy(self, cache: Tensor, pairs: Int32Array) -> None:
        """Copy within a cache; all sources are read before any target is written."""
        self._move_all(cache, cache, pairs)

    def _move_all(self, source: Tensor, target: Tensor, pairs: Int32Array) -> None:
        if len(pairs):
            self._move(source, target, torch.from_numpy(pairs.astype(np.int64)))


def mover_for(device: torch.device) -> BlockMover:
    """The fastest mover on `device`."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from pagewire_kernels.triton import move_blocks as move  # imports triton

        return BlockMover(move, MIN_COPY_BYTES)
    found = library() if device.type == "cpu" else None
    # Without a kernel for a GPU, copies of any length can overlap with what it computes.
    return BlockMover(swap_blocks, 1) if found is None else BlockMover(partial(move_blocks, found))


def _runs(pairs: Int32Array) -> Int64Array:
    """(start, length) of each run of pairs with adjacent sources and adjacent targets."""
    is_first = np.ones(len(pairs), np.bool_)
    is_first[1:] = (np.diff(pairs, axis=0) != 1).any(axis=1)
    starts = np.flatnonzero(is_first)
    return np.stack([starts, np.diff(starts, append=len(pairs))], axis=1)


_ALIGNMENT = mmap.PAGESIZE

_MADV_POPULATE_WRITE = 23
"""Linux 5.14: allocates pages as writing to them would, and leaves their content as it is."""

_CHECKED_AT_ONCE = 2 * 2**20
"""Bytes before which the available memory is looked up."""

_POPULATED_AT_ONCE = 2**18
"""Threads that map memory wait for the present call."""

_PAUSE = 9
"""After a call that shared its CPU, the times that it took before the next one."""

SPARE_BYTES = 256 * 2**20
"""Memory that populating leaves to others."""


class _Population(threading.Thread):
    """Allocates the pages of a cache in the order in which blocks are first handed out, whenever a
    CPU has nothing else to do.

    Its priority is that of other threads. With a low one it would hold the interpreter's lock, or
    that of the process's memory, while others have the CPU: beside as many busy processes as CPUs
    a thread that maps memory then waited for 0.7 s, beside 16 for more than 40. So it takes turns:
    a call that took longer than its processor time has kept something else from the CPU, and is
    followed by a pause. The same waits were 25 and 96 ms, and a cache is populated as fast on a
    machine that is idle.
    """

    def __init__(self, cache: Tensor, available: Callable[[], int]) -> None:
        super().__init__(name="kv-cache", daemon=True)
        self._cache: Tensor | None = cache
        self._available = available
        self.stopped = threading.Event()

    def start(self) -> None:
        # A thread that frees a tensor while the interpreter ends aborts the process. Services leave
        # the interpreter's end out, others do not.
        atexit.register(self.stop)
        super().start()

    def stop(self) -> None:
        """Stop, and wait for that."""
        self.stopped.set()
        self.join()

    def run(self) -> None:
        try:
            self._populate()
        finally:
            self._cache = None
            atexit.unregister(self.stop)

    def _populate(self) -> None:
        assert self._cache is not None
        first, num_bytes = self._cache.data_ptr(), self._cache.nbytes
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for start in range(0, num_bytes, _POPULATED_AT_ONCE):
            if start % _CHECKED_AT_ONCE == 0 and not self._may_take(start, num_bytes):
                break
            began, computed = time.monotonic(), time.thread_time()
            address = ctypes.c_void_p(first + start)
            size = ctypes.c_size_t(min(_POPULATED_AT_ONCE, num_bytes - start))
            if madvise(address, size, _MADV_POPULATE_WRITE):
                error = os.strerror(ctypes.get_errno())
                logger.debug("kv cache is not populated start=%d error=%s", start, error)
                break
            took = time.monotonic() - began
            if self.stopped.wait(pause_s(took, time.thread_time() - computed)):
                break

    def _may_take(self, start: int, num_bytes: int) -> bool:
        """Whether others have enough memory if more of the cache is populated."""
        available = self._available()
        if available >= min(_CHECKED_AT_ONCE, num_bytes - start) + SPARE_BYTES:
            return True
        logger.warning(
            "not enough memory to populate the kv cache populated_bytes=%d num_bytes=%d"
            " available_bytes=%d; choose a smaller kv_cache_memory",
            start,
            num_bytes,
            available,
        )
        return False


def pause_s(took_s: float, computed_s: float) -> float:
    """Seconds to wait after work in the background that took as long, and as much time of a CPU;
    at most a second, as a process may have been suspended meanwhile."""
    return min(1.0, _PAUSE * took_s) if took_s > 1.5 * computed_s else 0.0


class OperationStream(Protocol):
    """Where cache operations run beside a device's other work, the compute stream.

    As a context it queues operations, after the work queued on the compute stream so far.
    """

    def wait_for_last(self) -> None:
        """Make later work on the compute stream wait for the last plan's operations."""
        ...

    def __enter__(self) -> None: ...

    def release_compute(self) -> None:
        """Make later work on the compute stream wait for the operations queued so far."""
        ...

    def __exit__(self, *error: object) -> None: ...

    def finish(self) -> None:
        """Wait for all queued operations."""
        ...

    def timer(self) -> Callable[[], int]:
        """A function that returns the device time of the last plan's operations or, until they
        are done, the time since they were queued. Microseconds."""
        ...


class CacheEngine:
    """Both caches of one worker."""

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        device: torch.device,
        num_draft_blocks: int = 0,
        mover: BlockMover | None = None,
        stream: OperationStream | None = None,
    ) -> None:
        """block_size: tokens per block of the cache group with most; num_draft_blocks: for states
        after drafts (`DraftStates`), beside those that the scheduler knows; mover, stream: None
        takes the fastest for the device; on a CPU there is no stream."""
        self._mover = mover_for(device) if mover is None else mover
        block_bytes = spec.block_bytes(block_size)
        num_blocks = num_gpu_blocks + num_draft_blocks
        self._pool = pool = _allocate(num_blocks + 1, block_bytes, device)
        self.draft_blocks = np.arange(num_gpu_blocks, num_blocks, dtype=np.int32)
        """[num_draft_blocks]: the numbers of the blocks for states after drafts."""
        self.caches = spec.views(pool, block_size)
        """Keys and values by layer of the model, the null block at the end."""
        self.draft_caches = spec.draft_views(pool, block_size)
        """The same of a draft model or head."""
        self.device_cache = pool[:num_gpu_blocks]
        on_gpu = device.type == "cuda"
        self._stream = _SideStream(device) if stream is None and on_gpu else stream
        self.host_cache = _allocate(
            num_cpu_blocks,
            block_bytes,
            torch.device("cpu"),
            pinned=on_gpu and num_cpu_blocks > 0,
        )
        self._population: _Population | None = None

    def populate(self, available: Callable[[], int]) -> threading.Thread | None:
        """Allocate the pages of a CPU's cache in the background, until `close`. Returns the thread;
        None on a GPU, whose memory is allocated already, and on systems other than Linux.

        available: bytes of memory that the process can still allocate.
        """
        if self._stream is None and sys.platform == "linux":
            self._population = _Population(self.device_cache, available)
            weakref.finalize(self, self._population.stopped.set)
            self._population.start()
        return self._population

    def close(self) -> None:
        """Stop everything that runs on the caches' memory, which may be in use again once it is
        freed."""
        self.finish()
        if self._population is not None:
            self._population.stop()

    def fits(self, num_gpu_blocks: int, num_cpu_blocks: int, num_draft_blocks: int = 0) -> bool:
        """Whether the caches have exactly these sizes."""
        sizes = len(self.device_cache), len(self.host_cache), len(self.draft_blocks)
        return sizes == (num_gpu_blocks, num_cpu_blocks, num_draft_blocks)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's cache, those of drafts included."""
        return self._pool.nbytes

    def copy(self, pairs: Int32Array) -> None:
        """Copy blocks of the device's cache, those of drafts included. pairs: [n, 2] of source and
        target. On a CPU, where it is done at once."""
        assert self._stream is None, "a stream would have to wait for the forward pass"
        self._mover.copy(self._pool, pairs)

    def execute(self, plan: StepPlan) -> None:
        """Swap out, swap in and copy, as if in this order; no operation writes before it has read
        all its sources.

        Raises InvalidPlan for a block that neither cache has, and for one that is written twice.
        """
        device, host = self.device_cache, self.host_cache
        _check(plan.swap_out, device, host, "swap_out")
        _check(plan.swap_in, host, device, "swap_in")
        _check(plan.copy, device, device, "copy")
        if len(plan.copy) and len(plan.swap_in):  # few steps have both
            for block in np.intersect1d(plan.copy, plan.swap_in[:, 1]).tolist():
                raise InvalidPlan("copy", f"device block {block} is a target of swap_in, too")
        if self._stream is None:
            self._swap_out(plan)
            self._swap_in(plan)
        else:
            self._stream.wait_for_last()
            if len(plan.swap_out) or len(plan.swap_in) or len(plan.copy):
                with self._stream:
                    self._swap_out(plan)
                    if _precede_forward(plan):
                        self._stream.release_compute()
                    self._swap_in(plan)

    def finish(self) -> None:
        """Wait until all operations are done."""
        if self._stream is not None:
            self._stream.finish()

    def timer(self) -> Callable[[], int]:
        """A function that returns, on any thread, the microseconds that the operations of the
        present last plan have taken the device so far."""
        return _no_time if self._stream is None else self._stream.timer()

    def _swap_out(self, plan: StepPlan) -> None:
        """Swap-outs and copies. No swap-in's target is a copy's source or target, so copies need
        not wait for swap-ins."""
        self._mover.swap(self.device_cache, self.host_cache, plan.swap_out)
        self._mover.copy(self.device_cache, plan.copy)

    def _swap_in(self, plan: StepPlan) -> None:
        self._mover.swap(self.host_cache, self.device_cache, plan.swap_in)


class _SideStream:
    """The `OperationStream` of a GPU: a CUDA stream, and the events that order it with the compute
    stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._context = torch.cuda.stream(self._stream)
        self._start = self._end = torch.cuda.Event(enable_timing=True)
        self._compute = torch.cuda.current_stream(device)
        self._queued_us = 0
        self._is_used = False
        """Whether the last plan had operations."""

    def wait_for_last(self) -> None:
        if self._is_used:
            torch.cuda.current_stream(self._device).wait_event(self._end)
        self._is_used = False

    def __enter__(self) -> None:
        self._compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(self._compute)
        self._is_used = True
        self._queued_us = monotonic_us()
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._start.record(self._stream)
        self._context.__enter__()

    def release_compute(self) -> None:
        self._compute.wait_event(self._stream.record_event())

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)
        self._end.record(self._stream)

    def finish(self) -> None:
        self._stream.synchronize()

    def timer(self) -> Callable[[], int]:
        if not self._is_used:
            return _no_time
        start, end, queued_us = self._start, self._end, self._queued_us

        def elapsed_us() -> int:
            if not end.query():
                return monotonic_us() - queued_us
            return round(start.elapsed_time(end) * 1000)

        return elapsed_us


def _precede_forward(plan: StepPlan) -> bool:
    """Whether the forward pass may write to the sources of the plan's swap-outs and copies, or read
    their targets: it writes to a block that is swapped out only if the plan assigns it."""
    if len(plan.copy) or not len(plan.swap_out):
        return len(plan.copy) > 0
    assigned = [table.block_ids for new in plan.new_sequences for table in new.tables]
    assigned.append(plan.block_updates[:, 3])
    return bool(np.isin(plan.swap_out[:, 0], np.concatenate(assigned)).any())


def _no_time() -> int:
    return 0


def _allocate(
    num_blocks: int,
    block_bytes: int,
    device: torch.device,
    *,
    pinned: bool = False,
) -> Tensor:
    """A zeroed cache. Pages of host memory are allocated when they are first written to, or all at
    once if they are pinned for GPUs."""
    if device.type != "cpu":
        return torch.zeros(num_blocks, block_bytes, dtype=torch.uint8, device=device)
    num_bytes = num_blocks * block_bytes
    try:
        pages = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    except MemoryError as error:
        raise OutOfMemory(
            f"kv_cache_memory or swap_space: the system does not give this process {num_bytes}"
            " bytes more (ulimit -v, or the limit of committed memory); choose less"
        ) from error
    if pinned:
        pin_in_place(pages)
    memory = torch.from_numpy(pages)
    start = -memory.data_ptr() % _ALIGNMENT
    return memory[start : start + num_bytes].view(num_blocks, block_bytes)


def _check(pairs: Int32Array, source: Tensor, target: Tensor, field: str) -> None:
    if len(pairs) == 0:
        return
    low, high = pairs.min(axis=0), pairs.max(axis=0)
    if low.min() < 0 or high[0] >= len(source) or high[1] >= len(target):
        limits = f"blocks below {len(source)} as source and below {len(target)} as target"
        raise InvalidPlan(field, f"expected {limits}")
    targets, counts = np.unique(pairs[:, 1], return_counts=True)
    if len(targets) < len(pairs):
        raise InvalidPlan(field, f"target block {targets[counts.argmax()]} is named twice")
