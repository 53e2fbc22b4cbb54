"""Blocks moved in C++ are those that the reference moves, to the byte."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.cpu.block_copy import move_blocks
from pagewire_kernels.cpu.native_library import Library
from tests.support.native import native_libraries

LIBRARIES = native_libraries()
NUM_BLOCKS = 7

pytestmark = [
    pytest.mark.skipif(not LIBRARIES, reason="no compiled kernels for this processor"),
    pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.instruction_set),
]


def _cache(block_bytes: int, seed: int, at: int = 0) -> Tensor:
    """Random bytes that begin `at` bytes after an address of any vector register."""
    memory = torch.empty(NUM_BLOCKS * block_bytes + 128, dtype=torch.uint8)
    first = -memory.data_ptr() % 64 + at
    cache = memory[first : first + NUM_BLOCKS * block_bytes].view(NUM_BLOCKS, block_bytes)
    return cache.random_(generator=torch.Generator().manual_seed(seed))


PAIRS = st.lists(
    st.tuples(st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1)),
    unique_by=lambda pair: pair[1],
).map(lambda pairs: torch.tensor(pairs, dtype=torch.int64).view(-1, 2))


@given(
    pairs=PAIRS,
    block_bytes=st.sampled_from([1, 63, 64, 100, 4096, 65_535, 65_536, 65_537, 150_000]),
    at=st.sampled_from([0, 1, 32, 63]),
    is_one_cache=st.booleans(),
    num_threads=st.sampled_from([1, 3]),
)
@settings(max_examples=25)
def test_moved_blocks_are_the_references(
    library: Library, pairs: Tensor, block_bytes: int, at: int, is_one_cache: bool, num_threads: int
) -> None:
    """Of any size, wherever they lie; all sources are read before any target is written."""
    source = _cache(block_bytes, seed=1, at=at // 2)
    target = source if is_one_cache else _cache(block_bytes, seed=2, at=at)
    expected = target.clone()
    reference.swap_blocks(expected if is_one_cache else source, expected, pairs)
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        move_blocks(library, source, target, pairs)
    finally:
        torch.set_num_threads(threads_before)
    assert torch.equal(target, expected)


def test_a_block_takes_all_layers_with_it_whatever_its_type(library: Library) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        source, target = torch.randn(5, 3, 2, 4, 2, 8).to(dtype), torch.zeros(4, 3, 2, 4, 2, 8)
        target = target.to(dtype)
        move_blocks(library, source, target, torch.tensor([[4, 0], [1, 3]]))
        assert torch.equal(target[[0, 3]], source[[4, 1]])
        assert not target[1:3].any()


def test_caches_that_do_not_fit_each_other_are_refused(library: Library) -> None:
    cache, pairs = torch.zeros(4, 8), torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="target: expected blocks of"):
        move_blocks(library, cache, torch.zeros(4, 4), pairs)
    with pytest.raises(ValueError, match="target: expected blocks of"):
        move_blocks(library, cache, cache.half(), pairs)
    with pytest.raises(ValueError, match="contiguous"):
        move_blocks(library, torch.zeros(4, 16)[:, ::2], cache, pairs)
