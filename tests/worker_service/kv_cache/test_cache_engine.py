"""The caches' memory."""

import ctypes
import mmap
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from pagewire_kernels.cpu.block_copy import move_blocks
from pagewire_kernels.cpu.linear import discard
from pagewire_kernels.reference import swap_blocks, write_kv
from pagewire_kernels.reference.kv_cache import dequantize_heads
from tests.support.native import native_libraries
from tests.support.plans import new_sequence, step_plan
from worker_service.array_types import Int32Array
from worker_service.errors import InvalidPlan, OutOfMemory
from worker_service.kv_cache.cache_engine import (
    SPARE_BYTES,
    BlockMover,
    CacheEngine,
    pause_s,
)
from worker_service.models.kv_cache_spec import KVCacheSpec
from worker_service.plan import StepPlan


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8], ids=str
)
def test_a_block_is_one_aligned_contiguous_piece_of_zeros(dtype: torch.dtype) -> None:
    spec = KVCacheSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype)
    engine = CacheEngine(
        spec, block_size=4, num_gpu_blocks=5, num_cpu_blocks=2, device=torch.device("cpu")
    )
    for cache, num_blocks in ((engine.device_cache, 5), (engine.host_cache, 2)):
        assert cache.shape == (num_blocks, spec.block_bytes(4))
        assert cache.is_contiguous()
        assert cache.data_ptr() % 64 == 0
        assert not cache.any()
    for keys, values in engine.caches:
        assert keys.dtype == values.dtype == dtype
        assert len(keys) == len(values) == 5 + 1  # the null block


def test_swaps_and_copies_move_scales_with_their_codes() -> None:
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.int8)
    cpu = torch.device("cpu")
    engine = CacheEngine(spec, block_size=4, num_gpu_blocks=4, num_cpu_blocks=1, device=cpu)
    rows = torch.randn(4, 2, 8)
    write_kv(rows, rows * 50, *engine.caches[0], torch.arange(4))
    written = engine.device_cache[0].clone()
    engine.execute(step_plan(swap_out=[(0, 0)], copy=[(0, 2)]))
    engine.device_cache[:2] = 0
    engine.execute(step_plan(swap_in=[(0, 3)]))
    for block in (2, 3):
        assert torch.equal(engine.device_cache[block], written)
        values = dequantize_heads(engine.caches[0][1][block])
        torch.testing.assert_close(values, rows * 50, atol=1.0, rtol=0.0)


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux populates memory")
CHUNK, NUM_BYTES = 2 * 2**20, 40 * 2**20


def large_engine() -> CacheEngine:
    """Caches of `NUM_BYTES` whose pages are not allocated, even if they come from the heap."""
    spec = KVCacheSpec.uniform(num_layers=2, num_kv_heads=4, head_dim=1024, dtype=torch.float32)
    cpu = torch.device("cpu")
    engine = CacheEngine(spec, block_size=16, num_gpu_blocks=40, num_cpu_blocks=40, device=cpu)
    discard(engine.device_cache)
    discard(engine.host_cache)
    return engine


def test_a_cache_that_the_system_refuses_names_the_flags() -> None:
    spec = KVCacheSpec.uniform(num_layers=2, num_kv_heads=4, head_dim=1024, dtype=torch.float32)
    with pytest.raises(OutOfMemory, match="kv_cache_memory or swap_space: the system does not"):
        CacheEngine(
            spec,
            block_size=16,
            num_gpu_blocks=1 << 40,
            num_cpu_blocks=0,
            device=torch.device("cpu"),
        )


def resident_bytes(cache: torch.Tensor) -> int:
    """Bytes of a cache that the system has allocated."""
    pages = (ctypes.c_ubyte * -(-cache.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(cache.nbytes)
    assert libc.mincore(ctypes.c_void_p(cache.data_ptr()), size, pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


@LINUX
def test_a_cache_is_populated_and_keeps_what_is_written_meanwhile() -> None:
    written, engine = threading.Event(), large_engine()
    assert resident_bytes(engine.device_cache) < NUM_BYTES / 4

    def available() -> int:
        written.wait()
        return 2**40

    thread = engine.populate(available)
    assert thread is not None
    engine.device_cache[4] = 7
    written.set()
    thread.join()
    assert resident_bytes(engine.device_cache) == NUM_BYTES
    assert resident_bytes(engine.host_cache) < NUM_BYTES / 4
    assert (engine.device_cache[4] == 7).all()
    assert engine.device_cache.count_nonzero() == engine.device_cache[4].numel()


@LINUX
def test_populating_leaves_memory_to_others_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    engine, left = large_engine(), iter([SPARE_BYTES + CHUNK, SPARE_BYTES + CHUNK - 1])
    thread = engine.populate(lambda: next(left))
    assert thread is not None
    thread.join()
    assert CHUNK <= resident_bytes(engine.device_cache) < NUM_BYTES / 4
    assert f"populated_bytes={CHUNK} num_bytes={NUM_BYTES}" in caplog.text


@LINUX
def test_populating_ends_with_the_cache() -> None:
    asked, released, num_asked = threading.Event(), threading.Event(), 0

    def available() -> int:
        nonlocal num_asked
        num_asked += 1
        asked.set()
        released.wait()
        return 2**40

    engine = large_engine()
    thread = engine.populate(available)
    assert thread is not None
    asked.wait()
    del engine
    released.set()
    thread.join()
    assert num_asked == 1


def test_what_keeps_others_from_a_cpu_pauses() -> None:
    assert pause_s(0.001, 0.0009) == 0
    assert pause_s(0.002, 0.001) == 9 * 0.002
    assert pause_s(60, 0) == 1


@LINUX
def test_nothing_populates_a_closed_cache() -> None:
    engine = large_engine()
    thread = engine.populate(lambda: 2**40)
    assert thread is not None
    engine.close()
    assert not thread.is_alive()


ENDS_WHILE_POPULATING = """
import atexit, time
from tests.worker_service.kv_cache.test_cache_engine import large_engine

def available():
    time.sleep(0.2)
    return 2**40

engine = large_engine()
atexit.register(lambda: print("alive:", thread.is_alive()))
thread = engine.populate(available)
"""


@LINUX
def test_a_process_waits_for_the_populating_thread_before_it_ends() -> None:
    """What frees a tensor while the interpreter ends aborts it."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_POPULATING], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "alive: False\n"), ended.stderr


def test_sizes_are_compared_exactly() -> None:
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    engine = CacheEngine(
        spec, block_size=1, num_gpu_blocks=5, num_cpu_blocks=0, device=torch.device("cpu")
    )
    assert engine.fits(5, 0)
    assert not engine.fits(5, 1)
    assert not engine.fits(4, 0)


MOVERS: dict[str, BlockMover] = {
    "copies": BlockMover(swap_blocks, 1),
    "kernel": BlockMover(swap_blocks),
    "kernel and copies of three blocks or more": BlockMover(swap_blocks, 3 * 128),
    **{
        native.instruction_set: BlockMover(partial(move_blocks, native))
        for native in native_libraries()
    },
}


@pytest.mark.parametrize("mover", MOVERS.values(), ids=MOVERS)
@given(st.data())
def test_swaps_move_whole_blocks_wherever_their_neighbours_go(
    mover: BlockMover, data: st.DataObject
) -> None:
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    cpu = torch.device("cpu")
    engine = CacheEngine(
        spec, block_size=2, num_gpu_blocks=12, num_cpu_blocks=9, device=cpu, mover=mover
    )
    engine.device_cache[:] = torch.arange(12, dtype=torch.uint8)[:, None]
    engine.host_cache[:] = 100 + torch.arange(9, dtype=torch.uint8)[:, None]
    device, host = list(range(12)), [100 + i for i in range(9)]

    def pairs(num_sources: int, num_targets: int) -> list[tuple[int, int]]:
        targets = data.draw(st.lists(st.integers(0, num_targets - 1), unique=True))
        if data.draw(st.booleans()):
            targets.sort()
        first = data.draw(st.integers(0, num_sources - 1))
        chosen = st.one_of(st.just(None), st.integers(0, num_sources - 1))
        sources = [data.draw(chosen) for _ in targets]
        run = [(first + i) % num_sources for i in range(len(targets))]
        return [(r if s is None else s, t) for s, r, t in zip(sources, run, targets, strict=True)]

    out, back = pairs(12, 9), pairs(9, 12)
    swapped_in = {target for _, target in back}
    copies = [pair for pair in pairs(12, 12) if swapped_in.isdisjoint(pair)]
    engine.execute(step_plan(swap_out=out, swap_in=back, copy=copies))
    for source, target in out:
        host[target] = device[source]
    before = list(device)
    for source, target in copies:
        device[target] = before[source]
    for source, target in back:
        device[target] = host[source]
    assert engine.device_cache[:, 0].tolist() == device
    assert engine.host_cache[:, -1].tolist() == host


def test_long_runs_are_copied_and_the_rest_is_one_launch() -> None:
    launched = []

    def move(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
        launched.append(pairs.tolist())
        swap_blocks(source, target, pairs)

    source, target = torch.arange(20.0).view(10, 2), torch.zeros(10, 2)
    pairs = np.array([[9, 0], [1, 4], [2, 5], [3, 6], [7, 1], [8, 2]], np.int32)
    BlockMover(move, 3 * 8).swap(source, target, pairs)
    assert launched == [[[9, 0], [7, 1], [8, 2]]]
    assert target[:, 0].tolist() == [18.0, 14.0, 16.0, 0.0, 2.0, 4.0, 6.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("operations", "problem"),
    [
        ({"copy": [(0, 2)]}, "copy: expected blocks below 2"),
        ({"copy": [(0, 1), (1, 1)]}, "copy: target block 1 is named twice"),
        ({"swap_out": [(0, 0), (1, 0)]}, "swap_out: target block 0 is named twice"),
        ({"swap_in": [(0, 1), (1, 1)]}, "swap_in: target block 1 is named twice"),
        (
            {"swap_in": [(0, 1)], "copy": [(1, 0)]},
            "copy: device block 1 is a target of swap_in, too",
        ),
    ],
)
def test_a_plan_is_checked_before_anything_is_moved(
    operations: dict[str, Any], problem: str
) -> None:
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    cpu = torch.device("cpu")
    engine = CacheEngine(spec, block_size=1, num_gpu_blocks=2, num_cpu_blocks=2, device=cpu)
    engine.device_cache[:] = 1
    with pytest.raises(InvalidPlan, match=f"^{problem}"):
        engine.execute(step_plan(**({"swap_out": [(0, 0)]} | operations)))
    assert not np.any(engine.host_cache.numpy())


class RecordedStream(BlockMover):
    """A mover and the stream that it moves blocks on, which record what they are asked to do."""

    def __init__(self) -> None:
        super().__init__(swap_blocks)
        self.calls: list[str] = []

    def swap(self, source: Tensor, target: Tensor, pairs: Int32Array) -> None:
        if len(pairs):
            self.calls.append("out" if len(source) > len(target) else "in")

    def copy(self, cache: Tensor, pairs: Int32Array) -> None:
        if len(pairs):
            self.calls.append("copy")

    def wait_for_last(self) -> None:
        self.calls.append("wait for last")

    def __enter__(self) -> None: ...

    def release_compute(self) -> None:
        self.calls.append("wait")

    def __exit__(self, *error: object) -> None: ...

    def finish(self) -> None: ...

    def timer(self) -> Callable[[], int]:
        return lambda: 0


OUT, IN = [(0, 0), (3, 1)], [(2, 4)]


@pytest.mark.parametrize(
    ("plan", "calls"),
    [
        (step_plan(), []),
        (step_plan(block_updates=[(1, 0, 0, 3)]), []),
        (step_plan(swap_out=OUT), ["out"]),
        (step_plan(swap_out=OUT, swap_in=IN), ["out", "in"]),
        (step_plan(swap_in=IN), ["in"]),
        (step_plan(swap_in=IN, block_updates=[(1, 0, 0, 3)]), ["in"]),
        (step_plan(copy=[(1, 2)]), ["copy", "wait"]),
        (
            step_plan(swap_out=OUT, swap_in=IN, copy=[(1, 2)], block_updates=[(1, 0, 0, 2)]),
            ["out", "copy", "wait", "in"],
        ),
        (step_plan(swap_out=OUT, block_updates=[(3, 0, 0, 1), (0, 0, 3, 2)]), ["out"]),
        (step_plan(swap_out=OUT, block_updates=[(3, 0, 0, 1), (1, 0, 9, 3)]), ["out", "wait"]),
        (
            step_plan(swap_out=OUT, new_sequences=[new_sequence([1]), new_sequence([2, 4])]),
            ["out"],
        ),
        (
            step_plan(swap_out=OUT, swap_in=IN, new_sequences=[new_sequence([1, 3])]),
            ["out", "wait", "in"],
        ),
    ],
)
def test_a_step_waits_only_for_operations_on_blocks_that_it_may_use(
    plan: StepPlan, calls: list[str]
) -> None:
    spec = KVCacheSpec.uniform(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    stream = RecordedStream()
    engine = CacheEngine(
        spec,
        block_size=1,
        num_gpu_blocks=5,
        num_cpu_blocks=3,
        device=torch.device("cpu"),
        mover=stream,
        stream=stream,
    )
    engine.execute(plan)
    assert stream.calls == ["wait for last", *calls]
