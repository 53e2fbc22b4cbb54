"""The caches' memory."""

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from tests.support.plans import moving_plan
from worker_service.cache_engine import CacheEngine
from worker_service.errors import InvalidPlan
from worker_service.models.interface import KVCacheSpec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_block_is_one_aligned_contiguous_piece_of_zeros(dtype: torch.dtype) -> None:
    spec = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype)
    engine = CacheEngine(
        spec, block_size=4, num_gpu_blocks=5, num_cpu_blocks=2, device=torch.device("cpu")
    )
    for cache, num_blocks in ((engine.device_cache, 5), (engine.host_cache, 2)):
        assert cache.shape == (num_blocks, 3, 2, 4, 2, 8)
        assert cache.dtype == dtype
        assert cache[1].is_contiguous()
        assert cache[1].nbytes == spec.block_bytes(4)
        assert cache.data_ptr() % 64 == 0
        assert not cache.any()


def test_sizes_are_compared_exactly() -> None:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    engine = CacheEngine(
        spec, block_size=1, num_gpu_blocks=5, num_cpu_blocks=0, device=torch.device("cpu")
    )
    assert engine.fits(5, 0)
    assert not engine.fits(5, 1)
    assert not engine.fits(4, 0)


@given(st.data())
def test_swaps_move_whole_blocks_wherever_their_neighbours_go(data: st.DataObject) -> None:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    cpu = torch.device("cpu")
    engine = CacheEngine(spec, block_size=2, num_gpu_blocks=12, num_cpu_blocks=9, device=cpu)
    engine.device_cache[:] = torch.arange(12.0).view(12, 1, 1, 1, 1, 1)
    engine.host_cache[:] = 100 + torch.arange(9.0).view(9, 1, 1, 1, 1, 1)
    device, host = [float(i) for i in range(12)], [100.0 + i for i in range(9)]

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
    engine.execute(moving_plan(swap_out=out, swap_in=back))
    before = list(device)
    for source, target in out:
        host[target] = before[source]
    for source, target in back:
        device[target] = host[source]
    assert engine.device_cache[:, 0, 0, 0, 0, 0].tolist() == device
    assert engine.host_cache[:, 0, 1, 1, 0, 0].tolist() == host


def test_a_plan_is_checked_before_anything_is_moved() -> None:
    spec = KVCacheSpec(num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)
    cpu = torch.device("cpu")
    engine = CacheEngine(spec, block_size=1, num_gpu_blocks=2, num_cpu_blocks=2, device=cpu)
    engine.device_cache[:] = 1.0
    with pytest.raises(InvalidPlan):
        engine.execute(moving_plan(swap_out=[(0, 0)], copy=[(0, 2)]))
    assert not np.any(engine.host_cache.numpy())
