"""Cache groups of models, tokens per block, and where layers lie in a block."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from pagewire_kernels.batch import StateUnits
from pagewire_kernels.interface import stored_head_size
from worker_service.cache_groups import CacheGroup, CacheLifetime
from worker_service.models.kv_cache_spec import (
    BLOCK_ALIGNMENT,
    MAX_BLOCK_TOKENS,
    KVCacheSpec,
    LayerKV,
    LayerState,
    StateArray,
)

Layers = tuple[int, int, int, int | None]
"""Number of layers, KV heads, head size and window."""

SHAPES: dict[str, list[Layers]] = {
    "gemma 3 270m": [(15, 1, 256, 512), (3, 1, 256, None)],
    "gemma 3 1b": [(22, 1, 256, 512), (4, 1, 256, None)],
    "gemma 3 4b": [(29, 4, 256, 1024), (5, 4, 256, None)],
    "gemma 3 12b": [(40, 8, 256, 1024), (8, 8, 256, None)],
    "gemma 3 27b": [(52, 16, 128, 1024), (10, 16, 128, None)],
    "gemma 3n e4b": [(16, 2, 256, 512), (4, 2, 256, None)],
    "gemma 4 31b": [(50, 16, 256, 1024), (10, 4, 512, None)],
    "gemma 4 26b": [(25, 8, 256, 1024), (5, 2, 512, None)],
    "gemma 4 e4b": [(20, 2, 256, 512), (4, 2, 512, None)],
    "gemma 4 e2b": [(12, 1, 256, 512), (3, 1, 512, None)],
    "gpt-oss 20b": [(12, 8, 64, 128), (12, 8, 64, None)],
    "gpt-oss 120b": [(18, 8, 64, 128), (18, 8, 64, None)],
    "gemma 2 9b": [(21, 8, 256, 4096), (21, 8, 256, None)],
    "llama 4 scout's ratio": [(36, 8, 128, 8192), (12, 8, 128, None)],
    "mistral 7b": [(32, 8, 128, 4096)],
    "llama 8b": [(32, 8, 128, None)],
    "three lifetimes": [(8, 2, 128, 256), (8, 2, 128, 1024), (4, 2, 128, None)],
}
DTYPES = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
NUM_TOKENS = 4096


def _spec(shape: list[Layers], dtype: torch.dtype, num_ranks: int = 1) -> KVCacheSpec:
    return KVCacheSpec(
        layers=tuple(
            LayerKV(num_kv_heads=max(1, heads // num_ranks), head_dim=size, window=window)
            for count, heads, size, window in shape
            for _ in range(count)
        ),
        dtype=dtype,
        releases_windows=True,
    )


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_of_all_groups_are_used_but_for_a_twentieth(shape: list[Layers]) -> None:
    for dtype, num_ranks, preferred in product(DTYPES, (1, 2, 4, 8), (16, 64)):
        _assert_blocks_are_used(_spec(shape, dtype, num_ranks), preferred)


def _assert_blocks_are_used(spec: KVCacheSpec, preferred: int) -> None:
    block_size = spec.choose_block_size(preferred)
    groups = spec.groups(block_size)
    block_bytes = spec.block_bytes(block_size)
    assert block_bytes % BLOCK_ALIGNMENT == 0
    assert max(group.block_tokens for group in groups) == block_size <= MAX_BLOCK_TOKENS
    assert all(group.block_tokens % 16 == 0 for group in groups)
    used = reserved = 0
    for index, group in enumerate(groups):
        kept = [kv for kv, own in zip(spec.layers, spec.group_of, strict=True) if own == index]
        token_bytes = sum(kv.num_elements(spec.dtype) for kv in kept) * spec.dtype.itemsize
        num_blocks = min(group.span or NUM_TOKENS, NUM_TOKENS) / group.block_tokens
        used += num_blocks * group.block_tokens * token_bytes
        reserved += num_blocks * block_bytes
        assert group.block_tokens * token_bytes <= block_bytes
    assert used >= 0.95 * reserved
    assert spec.padding(block_size) <= 0.05


def test_groups_are_ordered_by_their_windows_after_the_one_that_keeps_all() -> None:
    spec = _spec([(2, 1, 64, 512), (2, 1, 64, None), (4, 1, 64, 128)], torch.float32)
    assert spec.groups(64) == (
        CacheGroup(lifetime=CacheLifetime.GROWING, block_tokens=64),
        CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=32, span=128),
        CacheGroup(lifetime=CacheLifetime.WINDOW, block_tokens=64, span=512),
    )
    assert spec.group_of == (2, 2, 0, 0, 1, 1, 1, 1)


def _in_chunks(chunk: int, num_full: int, num_chunked: int) -> KVCacheSpec:
    layer = LayerKV(num_kv_heads=8, head_dim=128)
    layers = (layer,) * num_full + (replace(layer, chunk=chunk),) * num_chunked
    return KVCacheSpec(layers=layers, dtype=torch.bfloat16)


def test_layers_with_chunks_are_a_group_although_windows_are_kept() -> None:
    spec = _in_chunks(8192, num_full=1, num_chunked=3)
    assert spec.groups(48) == (
        CacheGroup(lifetime=CacheLifetime.GROWING, block_tokens=48),
        CacheGroup(lifetime=CacheLifetime.CHUNK, block_tokens=16, span=8192),
    )
    assert spec.group_of == (0, 1, 1, 1)


@pytest.mark.parametrize("preferred", [16, 64])
def test_blocks_of_llama_4_are_used_but_for_a_twentieth(preferred: int) -> None:
    for num_full, num_chunked in ((12, 36), (1, 3), (3, 1)):
        _assert_blocks_are_used(_in_chunks(8192, num_full, num_chunked), preferred)


@pytest.mark.parametrize("block_size", [1, 4, 16, 48, 64, 256])
@pytest.mark.parametrize("chunk", [1, 7, 12, 16, 100, 240, 8192])
def test_blocks_of_chunks_divide_them(chunk: int, block_size: int) -> None:
    for num_full, num_chunked in ((0, 2), (1, 1), (1, 3), (3, 1)):
        spec = _in_chunks(chunk, num_full, num_chunked)
        for size in (block_size, spec.choose_block_size(block_size)):
            *_, group = spec.groups(size)
            assert chunk % group.block_tokens == 0
            assert chunk % 16 or size % 16 or group.block_tokens % 16 == 0
        if chunk >= 100:
            assert spec.padding(spec.choose_block_size(block_size)) <= 0.05


def test_a_sequence_needs_blocks_for_a_chunk_of_the_model_and_one_of_its_prompt() -> None:
    spec = _in_chunks(64, 0, 2)
    assert spec.num_blocks(4096, chunk=1, block_size=16) == 4 + 1
    assert spec.num_blocks(4096, chunk=32, block_size=16) == 6 + 1
    assert spec.num_blocks(40, chunk=32, block_size=16) == 3


def test_the_smallest_blocks_of_a_cpu_have_sixty_four_tokens() -> None:
    spec = _spec(SHAPES["gemma 3 270m"], torch.bfloat16)
    assert spec.choose_block_size(preferred=64) == 320
    assert [group.block_tokens for group in spec.groups(320)] == [320, 64]
    assert spec.choose_block_size(preferred=16) == 80


def test_one_group_has_the_preferred_size() -> None:
    assert _spec(SHAPES["llama 8b"], torch.bfloat16).choose_block_size(preferred=64) == 64
    assert _spec(SHAPES["mistral 7b"], torch.bfloat16).choose_block_size(preferred=256) == 256


def test_a_configured_size_is_that_of_the_group_with_most_tokens_per_block() -> None:
    spec = _spec(SHAPES["gemma 3 27b"], torch.bfloat16)
    assert [group.block_tokens for group in spec.groups(320)] == [320, 64]
    assert [group.block_tokens for group in spec.groups(8)] == [8, 2]


def test_a_sequence_needs_blocks_for_all_tokens_or_for_a_window_and_a_chunk() -> None:
    spec = _spec(SHAPES["gemma 3 270m"], torch.bfloat16)
    growing = 13  # blocks of 320 for 4,096 tokens; those of 64 hold 511 tokens and the chunk
    assert spec.num_blocks(4096, chunk=1, block_size=320) == growing + 9
    assert spec.num_blocks(4096, chunk=512, block_size=320) == growing + 17
    assert spec.num_blocks(4096, chunk=4096, block_size=320) == growing + 64
    assert spec.num_blocks(100, chunk=1, block_size=320) == 1 + 2


def test_windows_are_kept_like_everything_else_until_they_are_released() -> None:
    layers = _spec(SHAPES["gemma 3 270m"], torch.bfloat16).layers
    spec = KVCacheSpec(layers=layers, dtype=torch.bfloat16, releases_windows=False)
    assert spec.groups(64) == (CacheGroup(block_tokens=64),)
    assert set(spec.group_of) == {0}


def test_stages_of_a_pipeline_agree_on_groups_and_hold_their_own_layers() -> None:
    whole = _spec(SHAPES["gemma 3 270m"], torch.bfloat16)
    stages = [
        KVCacheSpec(
            layers=whole.layers, dtype=whole.dtype, releases_windows=True, stage=range(*stage)
        )
        for stage in ((0, 9), (9, 18))
    ]
    assert all(stage.groups(320) == whole.groups(320) for stage in stages)
    assert stages[0].group_of + stages[1].group_of == whole.group_of
    assert stages[0].block_bytes(320) == 9 * 64 * 1024
    assert stages[1].block_bytes(320) == max(3 * 320, 6 * 64) * 1024
    assert stages[1].padding(320) == pytest.approx(1 - 6 * 64 / (3 * 320))


@pytest.mark.parametrize("shape", ["gemma 3 270m", "mistral 7b"])
def test_ranks_with_and_without_drafts_agree_on_groups(shape: str) -> None:
    other = replace(_spec(SHAPES[shape], torch.bfloat16), has_shared_drafts=True)
    drafting = other.with_drafts(_spec([(4, 2, 64, None)], torch.bfloat16))
    size = other.choose_block_size(64)
    assert drafting.choose_block_size(64) == size
    assert drafting.groups(size) == other.groups(size)
    assert other.groups(size)[0].lifetime is CacheLifetime.GROWING
    assert drafting.block_bytes(size) >= other.block_bytes(size)
    assert other.padding(size) <= 0.05
    pool = torch.zeros(2, drafting.block_bytes(size), dtype=torch.uint8)
    assert len(drafting.views(pool, size)) == len(other.layers)
    assert len(drafting.draft_views(pool, size)) == 4


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_latents_are_stored_once_as_keys_and_values(dtype: torch.dtype) -> None:
    layer = LayerKV(num_kv_heads=1, head_dim=576, has_values=False)
    spec = KVCacheSpec(layers=(layer,) * 2, dtype=dtype)
    assert spec.block_bytes(64) == 2 * 64 * stored_head_size(576, dtype) * dtype.itemsize
    pool = torch.zeros(3, spec.block_bytes(64), dtype=torch.uint8)
    for number, (keys, values) in enumerate(spec.views(pool, 64)):
        assert keys.shape == (3, 64, 1, stored_head_size(576, dtype))
        assert (keys.data_ptr(), keys.stride()) == (values.data_ptr(), values.stride())
        keys.view(torch.int8).fill_(number + 1)
    halves = pool.view(3, 2, -1).view(torch.int8)
    assert bool((halves == torch.tensor([1, 2], dtype=torch.int8)[:, None]).all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32], ids=str)
def test_layers_of_a_group_share_a_block_without_overlap(dtype: torch.dtype) -> None:
    spec = _spec([(2, 3, 20, 32), (1, 2, 16, None), (1, 1, 48, None)], dtype)
    pool = torch.zeros(3, spec.block_bytes(48), dtype=torch.uint8)
    views = spec.views(pool, 48)
    groups = spec.groups(48)
    for index, group in enumerate(groups):
        kept = [kv for kv, own in zip(views, spec.group_of, strict=True) if own == index]
        for number, tensor in enumerate(tensor for pair in kept for tensor in pair):
            assert tensor.shape[:2] == (3, group.block_tokens)
            tensor.view(torch.int8).fill_(number + 1)
        for number, tensor in enumerate(tensor for pair in kept for tensor in pair):
            assert bool((tensor.view(torch.int8) == number + 1).all())


def _with_states(stage: range | None = None, num_ranks: int = 1) -> KVCacheSpec:
    """Three layers with a state for each with attention, as Qwen3-Next's."""
    state = LayerState(
        arrays=(
            StateArray(num_units=2, shape=(3, 2048 // num_ranks), dtype=torch.bfloat16),
            StateArray(num_units=32 // num_ranks, shape=(128, 128), dtype=torch.float32),
        )
    )
    attention = LayerKV(num_kv_heads=2 // num_ranks, head_dim=256)
    layers = (state, state, state, attention) * 4
    return KVCacheSpec(layers=layers, dtype=torch.bfloat16, stage=stage)


def test_states_are_a_group_of_their_own_with_little_padding() -> None:
    spec = _with_states()
    size = spec.choose_block_size(64)
    assert size == 64
    tokens, states = spec.groups(size)
    assert tokens == CacheGroup(block_tokens=64)
    assert states.lifetime is CacheLifetime.STATE
    used = 12 * (2 * 3 * 2048 * 2 + 32 * 128 * 128 * 4)
    assert used <= states.num_blocks * spec.block_bytes(size) < used + 2 * spec.block_bytes(size)
    assert spec.num_blocks(1000, 64, size) == 16 + states.num_blocks
    assert spec.group_of == (1, 1, 1, 0) * 4


def test_blocks_hold_the_largest_unit_of_a_state() -> None:
    spec = _with_states()
    unit = 128 * 128 * 4
    assert spec.block_bytes(1) == unit
    assert spec.groups(1)[1].num_blocks == 12 * 33
    assert spec.groups(spec.choose_block_size(1))[0].block_tokens == 16
    alone = KVCacheSpec(layers=spec.layers[:3], dtype=torch.bfloat16)
    assert alone.groups(64) == (CacheGroup(lifetime=CacheLifetime.STATE, num_blocks=1),)
    assert alone.block_bytes(64) == 3 * (2 * 3 * 2048 * 2 + 32 * unit)


@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_units_of_states_share_blocks_without_overlap(block_size: int, num_ranks: int) -> None:
    stages = (None, range(8), range(8, 16), range(3), range(3, 4))
    groups = _with_states(None, num_ranks).groups(block_size)
    for stage in stages:
        spec = _with_states(stage, num_ranks)
        assert spec.groups(block_size) == groups, "ranks agree"
        num_blocks = groups[1].num_blocks
        pool = torch.zeros(num_blocks, spec.block_bytes(block_size), dtype=torch.uint8)
        states = [view for view in spec.views(pool, block_size) if isinstance(view[0], StateUnits)]
        number, expected = 0, 0
        for part in (part for view in states for part in view):
            assert isinstance(part, StateUnits)
            wide = part.pages.dtype == torch.float32
            size = 128 * 128 if wide else 3 * 2048 // num_ranks
            for block, first in part.places.tolist():
                number += 1
                assert first * part.pages.dtype.itemsize % 64 == 0
                unit = part.pages[block, first : first + size]
                assert len(unit) == size
                assert not unit.view(torch.uint8).any(), "nothing else is here"
                unit.view(torch.uint8).fill_(1)
                expected += size * part.pages.dtype.itemsize
        assert number == len(states) * (2 + 32 // num_ranks)
        assert int(pool.sum(dtype=torch.int64)) == expected
