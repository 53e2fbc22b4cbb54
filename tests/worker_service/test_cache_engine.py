"""The caches' memory."""

import pytest
import torch

from worker_service.cache_engine import CacheEngine
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
