"""Host memory that is pinned where it is."""

import pytest
import torch

from worker_service.kv_cache.cache_engine import _allocate
from worker_service.models.kv_cache_spec import KVCacheSpec


class Runtime:
    """Stands in for the CUDA runtime: what is registered, by address."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert flags == 1 | 2, "portable and mapped: kernels move blocks in place"
        if self.status == 0:
            self.registered[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA error {status}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Takes the place of CUDA's."""
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", _check)
    return runtime


SPEC = KVCacheSpec.uniform(num_layers=3, num_kv_heads=2, head_dim=8, dtype=torch.float32)


def _pinned_cache() -> torch.Tensor:
    return _allocate(5, SPEC.block_bytes(4), torch.device("cpu"), pinned=True)


def test_a_cache_is_pinned_where_it_is_with_all_its_storage_and_no_more(runtime: Runtime) -> None:
    cache = _pinned_cache()
    storage = cache.untyped_storage()
    # CUDA is asked about the storage's address, not the cache's.
    assert runtime.registered == {storage.data_ptr(): storage.nbytes()}
    assert storage.nbytes() < 5 * SPEC.block_bytes(4) + 2 * 4096


def test_it_stays_pinned_as_long_as_a_view_of_it_lives(runtime: Runtime) -> None:
    cache = _pinned_cache()
    block = cache[3]
    del cache
    assert len(runtime.registered) == 1
    block += 1
    del block
    assert not runtime.registered


def test_memory_that_cannot_be_pinned_is_an_error(runtime: Runtime) -> None:
    runtime.status = 2
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        _pinned_cache()


def test_other_host_caches_are_not_pinned(runtime: Runtime) -> None:
    _allocate(5, SPEC.block_bytes(4), torch.device("cpu"))
    assert not runtime.registered
