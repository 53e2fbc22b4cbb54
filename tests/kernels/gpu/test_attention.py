"""Paged attention on the GPU against the reference."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagewire_kernels import reference
from pagewire_kernels.triton import Launch, TritonBackend, choose_launch, paged_attention, write_kv
from pagewire_kernels.triton.attention import parts_of
from pagewire_kernels.triton.attention_kernels import plan_splits
from tests.support.chunked_attention import attended_in_chunks
from tests.support.gpu_kernels import DEVICE, DTYPES, MARKS, assert_agrees, on_device
from tests.support.paged_batch import PagedSequences, Rows, Shape

pytestmark = MARKS

LAUNCHES = {
    "whole": Launch(tile_rows=16, tile_keys=16, num_warps=4),
    "even splits": Launch(tile_rows=16, tile_keys=16, num_warps=4, num_splits=2),
    "by length": Launch(tile_rows=16, tile_keys=16, num_warps=4, num_planned=9),
    "fixed splits": Launch(tile_rows=16, tile_keys=16, num_warps=4, num_splits=2, split_tokens=32),
    "fixed spans": Launch(tile_rows=16, tile_keys=16, num_warps=4, split_tokens=32),
}

SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "cap": {"soft_cap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -3.0, 40.0, 0.0])},
    "alibi": {"alibi_slopes": SLOPES},
    "all": {
        "sliding_window": 20,
        "soft_cap": 1.0,
        "sinks": torch.zeros(4),
        "alibi_slopes": SLOPES,
    },
}


def _attend(
    sequences: PagedSequences, parts: list[Rows], *, num_decodes: int = 0, **options: Any
) -> torch.Tensor:
    cache = sequences.cache.to(DEVICE)
    options = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    return paged_attention(
        sequences.rows(sequences.queries, parts).to(DEVICE),
        cache[:, 1, 0],
        cache[:, 1, 1],
        on_device(sequences.metadata(parts, num_decodes=num_decodes)),
        **options,
    )


LENGTHS = [33, 1, 60, 4]
RAGGED = [(0, 32, 33), (1, 0, 1), (2, 51, 60), (3, 0, 4)]
"""The rows of one sequence are more than a tile has."""
DECODES = [(0, 32, 33), (1, 0, 1), (2, 59, 60), (3, 3, 4)]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=[] if name == "all" else pytest.mark.long)
        for name, options in OPTIONS.items()
    ],
)
def test_a_ragged_batch_agrees_with_the_reference(options: dict[str, Any]) -> None:
    sequences = PagedSequences(Shape(), LENGTHS)
    sequences.write()
    launch = LAUNCHES["even splits"]
    output = _attend(sequences, RAGGED, scale=0.3, launch=launch, **options)
    assert_agrees(output, sequences.attend(RAGGED, scale=0.3, **options))


@pytest.mark.parametrize("launch", LAUNCHES)
def test_released_blocks_are_not_read(launch: str) -> None:
    sequences = PagedSequences(Shape(), LENGTHS)
    sequences.write()
    parts = DECODES if LAUNCHES[launch].num_planned else RAGGED
    options = {"scale": 0.3, "sliding_window": 7, "launch": LAUNCHES[launch]}
    before = _attend(sequences, parts, **options)
    sequences.release(parts, 7)
    assert torch.equal(_attend(sequences, parts, **options), before)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_decodes", [0, 2])
def test_a_token_sees_its_chunk_alone(batch_invariant: bool, num_decodes: int) -> None:
    """Blocks of earlier chunks are released."""
    sequences = PagedSequences(Shape(), LENGTHS)
    sequences.write()
    parts = [(0, 32, 33), (1, 0, 1), (2, 20, 60), (3, 0, 4)]
    sequences.release(parts, chunk=16)
    metadata = sequences.metadata(parts, num_decodes=num_decodes)
    output = paged_attention(
        sequences.rows(sequences.queries, parts).to(DEVICE),
        *sequences.cache.to(DEVICE)[:, 1].unbind(1),
        on_device(metadata).in_chunks(16, sequences.shape.block_size),
        scale=0.3,
        batch_invariant=batch_invariant,
    )
    assert_agrees(output, attended_in_chunks(sequences, parts, 16, scale=0.3))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_decodes_agree_with_the_reference(dtype: torch.dtype, launch: Launch) -> None:
    sequences = PagedSequences(Shape(dtype=dtype), LENGTHS)
    sequences.write()
    options = OPTIONS["all"]
    output = _attend(sequences, DECODES, scale=0.3, launch=launch, **options)
    assert_agrees(output, sequences.attend(DECODES, scale=0.3, **options))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.long),
        pytest.param({"sliding_window": 290}, id="window"),
    ],
)
def test_many_splits_are_merged(options: dict[str, Any]) -> None:
    """More than are merged at once, even behind a window."""
    sequences = PagedSequences(Shape(num_heads=2, num_kv_heads=1), [330, 40])
    sequences.write()
    launch = Launch(tile_rows=16, tile_keys=16, num_warps=4, num_splits=21)  # of 16 keys or none
    for parts in ([(0, 329, 330), (1, 39, 40)], [(0, 326, 330), (1, 39, 40)]):
        output = _attend(sequences, parts, scale=0.3, launch=launch, **options)
        assert_agrees(output, sequences.attend(parts, scale=0.3, **options))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_heads=1, num_kv_heads=1, head_dim=8, block_size=1),
        Shape(num_heads=6, num_kv_heads=2, head_dim=80, block_size=16),
        Shape(num_heads=7, num_kv_heads=1, head_dim=64, block_size=32),
        Shape(num_heads=20, num_kv_heads=1, head_dim=16, block_size=4),
        Shape(num_heads=5, num_kv_heads=5, head_dim=128, block_size=3),
        Shape(num_heads=2, num_kv_heads=1, head_dim=256, block_size=16),
    ],
    ids=str,
)
def test_any_shape_agrees_with_the_reference(shape: Shape) -> None:
    sequences = PagedSequences(shape, [20, 5])
    sequences.write()
    for parts in ([(0, 16, 20), (1, 0, 5)], [(0, 19, 20), (1, 4, 5)]):
        output = _attend(sequences, parts, scale=0.2)
        assert_agrees(output, sequences.attend(parts, scale=0.2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_fp8_cache_agrees_with_the_reference(dtype: torch.dtype) -> None:
    sequences = PagedSequences(Shape(dtype=dtype), [33, 9])
    cache = torch.zeros(sequences.cache.shape).to(torch.float8_e4m3fn)
    everything = [(0, 0, 33), (1, 0, 9)]
    scales = {"key_scale": 0.02, "value_scale": 0.01}
    for side, rows in enumerate((sequences.keys, sequences.values)):
        reference.write_kv(
            *[sequences.rows(rows, everything)] * 2,
            *[cache[:, 1, side]] * 2,
            sequences.metadata(everything).slot_mapping,
            key_scale=tuple(scales.values())[side],
            value_scale=tuple(scales.values())[side],
        )
    sequences.key_cache, sequences.value_cache = cache[:, 1, 0], cache[:, 1, 1]
    sequences.cache = cache
    parts = [(0, 20, 33), (1, 8, 9)]
    output = _attend(sequences, parts, scale=0.3, **scales)
    assert_agrees(output, sequences.attend(parts, scale=0.3, **scales))


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_fixed_splits_a_row_is_the_same_in_any_batch(dtype: torch.dtype) -> None:
    options = OPTIONS["sinks"] | OPTIONS["cap"] | {"sliding_window": 40}
    sequences = PagedSequences(Shape(dtype=dtype), [50, 5])
    sequences.write()
    spans, splits = LAUNCHES["fixed spans"], LAUNCHES["fixed splits"]
    prefill = _attend(sequences, [(0, 0, 50)], scale=0.3, launch=spans, **options)
    for parts, launch, rows in (
        ([(0, 29, 50)], splits, slice(29, 50)),
        ([(0, 49, 50), (1, 0, 5)], splits, slice(49, 50)),
        ([(0, 32, 33)], splits, slice(32, 33)),
        ([(0, 49, 50)], spans, slice(49, 50)),
    ):
        output = _attend(sequences, parts, scale=0.3, launch=launch, **options)
        num_rows = rows.stop - rows.start
        assert torch.equal(output[:num_rows], prefill[rows])


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_rows_of_a_padded_batch_attend_over_nothing(launch: Launch) -> None:
    sequences = PagedSequences(Shape(), LENGTHS)
    sequences.write()
    metadata = sequences.metadata(DECODES)
    padded = replace(
        metadata,
        query_start=torch.arange(len(DECODES) + 4, dtype=torch.int32),
        context_lens=torch.nn.functional.pad(metadata.context_lens, (0, 3)),
        block_tables=torch.nn.functional.pad(metadata.block_tables, (0, 0, 0, 3), value=-1),
    )
    query = sequences.rows(sequences.queries, DECODES)
    cache = sequences.cache.to(DEVICE)
    output = paged_attention(
        torch.nn.functional.pad(query, (0, 0, 0, 0, 0, 3)).to(DEVICE),
        cache[:, 1, 0],
        cache[:, 1, 1],
        on_device(padded),
        scale=0.3,
        launch=launch,
    )
    assert_agrees(output[: len(DECODES)], sequences.attend(DECODES, scale=0.3))


@pytest.mark.parametrize(
    ("lengths", "extra"),
    [
        ([4000], 8),
        ([4000, 10, 0, 300, 0], 8),
        ([0, 0, 7], 1),
        ([500] * 1500 + [90_000] + [0] * 100, 60),
    ],
    ids=["one", "skewed", "padded", "many"],
)
def test_contexts_are_shared_evenly_by_length(lengths: list[int], extra: int) -> None:
    num_seqs = len(lengths)
    plan = torch.zeros(num_seqs + 2, dtype=torch.int32, device=DEVICE)
    context_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    plan_splits[(1,)](plan, context_lens, num_seqs, num_seqs + extra, LEAST=128, TILE_KEYS=32)
    *first, keys = plan.tolist()
    assert keys % 32 == 0
    assert keys >= 128
    assert np.diff(first).tolist() == [-(-length // keys) for length in lengths]
    assert first[0] == 0
    assert first[-1] <= num_seqs + extra
    fewer_keys = keys - 32  # shorter splits would not be an even share
    assert fewer_keys < max(128, -(-sum(lengths) // extra))


MIXED = [(2, 59, 60), (1, 0, 1), (0, 13, 33), (3, 0, 4)]
"""Two decodes, then two prefills."""


@pytest.mark.parametrize("num_decodes", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(OPTIONS["all"], marks=pytest.mark.long),
        {"batch_invariant": True},
        {"chunk": 16},
    ],
    ids=["plain", "all", "batch-invariant", "chunks"],
)
def test_a_padded_batch_agrees_whose_decodes_only_the_device_counts(
    options: dict[str, Any], num_decodes: int
) -> None:
    """As a captured graph computes it: with sequences without rows, and rows of no sequence."""
    parts = [(2, 59, 60), (1, 0, 1), (4, 300, 301), (0, 24, 33), (3, 0, 4)]
    if num_decodes == 3:
        parts = parts[:3]
    sequences = PagedSequences(Shape(), [*LENGTHS, 301])
    sequences.write()
    exact = sequences.metadata(parts)
    metadata = replace(
        exact,
        query_start=torch.cat([exact.query_start, exact.query_start[-1].repeat(2)]),
        context_lens=torch.nn.functional.pad(exact.context_lens, (0, 2)),
        block_tables=torch.nn.functional.pad(exact.block_tables, (0, 5, 0, 2), value=-1),
        max_query_len=64,
        max_context_len=2000,
        device_num_decodes=torch.tensor([num_decodes], dtype=torch.int32),
    )
    query = sequences.rows(sequences.queries, parts)
    cache = sequences.cache.to(DEVICE)
    given = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in options.items()
    }
    chunk = given.pop("chunk", 0)
    output = paged_attention(
        torch.nn.functional.pad(query, (0, 0, 0, 0, 0, 3), value=torch.nan).to(DEVICE),
        cache[:, 1, 0],
        cache[:, 1, 1],
        on_device(metadata).in_chunks(chunk, sequences.shape.block_size),
        scale=0.3,
        **given,
    )
    if chunk:
        expected = attended_in_chunks(sequences, parts, chunk, scale=0.3)
        assert_agrees(output[: len(query)], expected)
        return
    features = {name: value for name, value in options.items() if name != "batch_invariant"}
    assert_agrees(output[: len(query)], sequences.attend(parts, scale=0.3, **features))


def test_split_prefills_after_decodes_agree_with_the_reference() -> None:
    sequences = PagedSequences(Shape(), [40, 700])
    sequences.write()
    parts = [(0, 39, 40), (1, 690, 700)]
    query = sequences.rows(sequences.queries, parts).to(DEVICE)
    metadata = sequences.metadata(parts, num_decodes=1)
    [_, prefill] = parts_of(metadata, len(query))
    assert choose_launch(query, 2, metadata, part=prefill).num_splits > 1
    output = _attend(sequences, parts, scale=0.3, num_decodes=1)
    assert_agrees(output, sequences.attend(parts, scale=0.3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decode_beside_prefills_is_the_same_as_in_any_batch(dtype: torch.dtype) -> None:
    sequences = PagedSequences(Shape(dtype=dtype), LENGTHS)
    sequences.write()
    mixed = _attend(sequences, MIXED, scale=0.3, num_decodes=2, batch_invariant=True)
    alone = _attend(sequences, [(2, 0, 60)], scale=0.3, batch_invariant=True)
    assert torch.equal(mixed[:1], alone[-1:])


def test_layers_of_a_step_share_the_plan_of_its_splits() -> None:
    sequences = PagedSequences(Shape(), LENGTHS)
    sequences.write()
    metadata = on_device(sequences.metadata(DECODES))
    query = sequences.rows(sequences.queries, DECODES).to(DEVICE)
    cache = sequences.cache.to(DEVICE)
    plans = []
    for _ in range(2):
        output = paged_attention(query, cache[:, 1, 0], cache[:, 1, 1], metadata, scale=0.3)
        assert_agrees(output, sequences.attend(DECODES, scale=0.3))
        plans += metadata.plans.values()
    assert plans[0] is plans[1]
    assert len(plans) == 2
    assert replace(metadata, max_context_len=60).plans == {}


def test_layers_of_a_step_may_have_different_features() -> None:
    sequences = PagedSequences(Shape(), LENGTHS)
    sequences.write()
    metadata = on_device(sequences.metadata(DECODES))
    query = sequences.rows(sequences.queries, DECODES).to(DEVICE)
    cache = sequences.cache.to(DEVICE)
    options: dict[str, Any]
    for options in ({}, {"sliding_window": 9}, {"sliding_window": 4}, {"soft_cap": 2.0}, {}):
        caches = cache[:, 1, 0], cache[:, 1, 1]
        output = paged_attention(query, *caches, metadata, scale=0.3, **options)
        assert_agrees(output, sequences.attend(DECODES, scale=0.3, **options))


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_backend_writes_and_attends(batch_invariant: bool) -> None:
    sequences = PagedSequences(Shape(), [33, 9])
    backend = TritonBackend(batch_invariant=batch_invariant)
    cache = sequences.cache.to(DEVICE)
    everything = [(0, 0, 33), (1, 0, 9)]
    metadata = on_device(sequences.metadata(everything))
    backend.write_kv(
        sequences.rows(sequences.keys, everything).to(DEVICE),
        sequences.rows(sequences.values, everything).to(DEVICE),
        cache[:, 1, 0],
        cache[:, 1, 1],
        metadata.slot_mapping,
    )
    output = backend.paged_attention(
        sequences.rows(sequences.queries, everything).to(DEVICE),
        cache[:, 1, 0],
        cache[:, 1, 1],
        metadata,
        scale=0.3,
    )
    sequences.write()
    assert_agrees(output, sequences.attend(everything, scale=0.3))


def test_tensors_that_would_be_misread_are_refused() -> None:
    sequences = PagedSequences(Shape(), [3])
    parts = [(0, 0, 3)]
    query = sequences.rows(sequences.queries, parts)
    key, value = sequences.key_cache, sequences.value_cache
    metadata = sequences.metadata(parts)
    with pytest.raises(TypeError, match="key_cache: expected float16 or float8_e4m3fn, got"):
        paged_attention(query.half(), key, value, metadata, scale=1.0)
    with pytest.raises(ValueError, match=r"query: expected a multiple of 2 heads, .*, got 3"):
        paged_attention(query[:, :3], key, value, metadata, scale=1.0)
    with pytest.raises(ValueError, match=r"query: expected shape \[\*, \*, 32\], got \[3, 4, 16\]"):
        paged_attention(query[..., :16], key, value, metadata, scale=1.0)
    with pytest.raises(TypeError, match="slot_mapping: expected int64, got"):
        write_kv(query[:, :2], query[:, :2], key, value, metadata.slot_mapping.int())
