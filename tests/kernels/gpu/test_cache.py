"""Writing to a cache, gathering from it and moving its blocks, against the reference."""

import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.triton import move_blocks, write_kv
from tests.support.gpu_kernels import DEVICE, DTYPES, INTERPRETED, MARKS

pytestmark = MARKS

FP8 = torch.float8_e4m3fn
CACHE_DTYPES = [(dtype, cache) for dtype in DTYPES for cache in (dtype, FP8)]


def _cache(dtype: torch.dtype) -> torch.Tensor:
    """Blocks of 4 tokens, 3 layers, 2 heads of 20: a row is no multiple of a tile."""
    return torch.zeros(6, 3, 2, 4, 2, 20).to(dtype)


@pytest.mark.parametrize(("dtype", "cache_dtype"), CACHE_DTYPES, ids=str)
def test_rows_reach_their_slots_and_no_others(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    rows = torch.randn(7, 6, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    if cache_dtype == FP8:  # what it holds exactly: the interpreter's fp8 does not round
        rows = (rows * 8).to(FP8).to(dtype)
        rows[0] *= 1e3  # more than it can hold
    key, value = rows[:, :2], rows[:, 3:5]  # views, as of one product's output
    slots = torch.tensor([5, -1, 0, 23, 11, -3, 10])
    expected, cache = _cache(cache_dtype), _cache(cache_dtype).to(DEVICE)
    scales = {"key_scale": 0.5, "value_scale": 2.0}
    reference.write_kv(key, value, expected[:, 1, 0], expected[:, 1, 1], slots, **scales)
    write_kv(
        key.to(DEVICE),
        value.to(DEVICE),
        cache[:, 1, 0],
        cache[:, 1, 1],
        slots.to(DEVICE),
        **scales,
    )
    assert torch.equal(cache.cpu().float(), expected.float())
    assert bool(expected.float().isfinite().all())


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's fp8 does not round")
def test_fp8_is_rounded_as_in_the_reference_though_quotients_lie_halfway() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = 2.0 ** torch.randint(-4, 3, (24, 4, 20), generator=draw)  # over 0.02: 50 times as much
    rows[:, ::2] = torch.randn(24, 2, 20, generator=draw)
    key, value = rows.bfloat16().split(2, dim=1)
    slots, scales = torch.arange(24), {"key_scale": 0.02, "value_scale": 0.01}
    expected, cache = _cache(FP8), _cache(FP8).to(DEVICE)
    reference.write_kv(key, value, expected[:, 1, 0], expected[:, 1, 1], slots, **scales)
    on_device = [tensor.to(DEVICE) for tensor in (key, value)]
    write_kv(*on_device, cache[:, 1, 0], cache[:, 1, 1], slots.to(DEVICE), **scales)
    assert torch.equal(cache.cpu().float(), expected.float())


def test_what_is_no_number_stays_so_in_fp8() -> None:
    rows = torch.ones(2, 4, 20)
    rows[0, 0, 1] = torch.inf
    # Of its bits the interpreter keeps the upper ones, and rounds them by the next.
    rows.view(torch.int32)[1, [0, 2], 3] = 0x7FF7FFFF
    key, value = rows.split(2, dim=1)
    expected, cache, slots = _cache(FP8), _cache(FP8).to(DEVICE), torch.tensor([3, 9])
    reference.write_kv(key, value, expected[:, 1, 0], expected[:, 1, 1], slots)
    on_device = [tensor.to(DEVICE) for tensor in (key, value)]
    write_kv(*on_device, cache[:, 1, 0], cache[:, 1, 1], slots.to(DEVICE))
    found = cache.cpu().float()
    assert int(found.isnan().sum()) == 2
    assert torch.equal(found.isnan(), expected.float().isnan())
    assert torch.equal(found.nan_to_num(), expected.float().nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
@pytest.mark.parametrize("size", [3, 20, 2500])
def test_moved_blocks_are_the_same_to_the_byte(dtype: torch.dtype, size: int) -> None:
    source = torch.randn(5, 2, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    target = torch.zeros(4, 2, size).to(dtype)
    pairs = torch.tensor([[4, 0], [1, 3], [4, 2]])
    moved = target.to(DEVICE)
    move_blocks(source.to(DEVICE), moved, pairs)
    expected = target.float()
    expected[pairs[:, 1]] = source.float()[pairs[:, 0]]
    assert torch.equal(moved.cpu().float(), expected)


def test_a_copy_within_a_cache_reads_all_sources_before_it_writes() -> None:
    cache = torch.arange(12.0).view(4, 3).to(DEVICE)
    move_blocks(cache, cache, torch.tensor([[0, 1], [1, 0], [1, 3]]))
    assert cache[:, 0].tolist() == [3.0, 0.0, 6.0, 3.0]


def test_blocks_come_back_from_host_memory() -> None:
    device = torch.randn(4, 2, 300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    host = torch.zeros(6, 2, 300)
    host = host.pin_memory() if DEVICE.type == "cuda" else host
    before = device.cpu().clone()
    move_blocks(device, host, torch.tensor([[1, 5], [2, 0]]))
    device.zero_()
    move_blocks(host, device, torch.tensor([[5, 3], [0, 1]]))
    assert torch.equal(device[[3, 1]].cpu(), before[[1, 2]])


def test_caches_that_do_not_fit_each_other_are_refused() -> None:
    cache = torch.zeros(4, 6, device=DEVICE)
    pairs = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match=r"target: expected blocks of shape \[6\], .*, got \[3\]"):
        move_blocks(cache, torch.zeros(4, 3, device=DEVICE), pairs)
    with pytest.raises(ValueError, match="source: expected a contiguous tensor of whole blocks"):
        move_blocks(cache[:, :3], torch.zeros(4, 3, device=DEVICE), pairs)
    with pytest.raises(TypeError, match="pairs: expected int64"):
        move_blocks(cache, cache, pairs.int())
