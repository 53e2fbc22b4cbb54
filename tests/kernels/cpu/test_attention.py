"""The compiled CPU kernels against the reference."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_kernels import reference
from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.interface import AttentionBackend
from tests.support.native import native_libraries
from tests.support.paged_batch import PagedSequences, Rows, Shape

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Per dtype: float32 sums differ in order only; the others also in the output's rounding."""

BACKENDS = {native.instruction_set: NativeBackend(native) for native in native_libraries()}

each_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
each_cache = pytest.mark.parametrize("cache_dtype", [None, torch.int8], ids=str)


def _both(
    backend: AttentionBackend, sequences: PagedSequences, parts: list[Rows], **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write all keys and values with a CPU backend, then attend with it and the reference."""
    sequences.write(backend)
    return sequences.attend(parts, backend, **options), sequences.attend(parts, **options)


@each_backend
@each_cache
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 7},
        {"soft_cap": 2.0},
        {"sinks": torch.tensor([0.5, -3.0, 40.0, 0.0])},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 0.0625])},
        {
            "sliding_window": 20,
            "soft_cap": 1.0,
            "sinks": torch.zeros(4),
            "alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 0.0625]),
        },
    ],
    ids=["plain", "window", "cap", "sinks", "alibi", "all"],
)
def test_a_ragged_batch_agrees_with_the_reference(
    backend: AttentionBackend,
    cache_dtype: torch.dtype | None,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> None:
    sequences = PagedSequences(Shape(dtype=dtype, cache_dtype=cache_dtype), [33, 1, 190, 17])
    parts = [(0, 32, 33), (1, 0, 1), (2, 20, 190), (3, 0, 17)]
    output, expected = _both(backend, sequences, parts, scale=0.3, **options)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


@each_backend
@each_cache
@given(
    num_kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([8, 16, 17, 20, 31, 48, 64, 80, 100, 128]),
    block_size=st.sampled_from([1, 3, 8, 16, 24, 32]),
    ends=st.lists(st.integers(1, 140), min_size=1, max_size=4),
    share=st.floats(0, 1),
    window=st.none() | st.integers(1, 80),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_any_shape_agrees_with_the_reference(
    backend: AttentionBackend,
    cache_dtype: torch.dtype | None,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    ends: list[int],
    share: float,
    window: int | None,
    seed: int,
) -> None:
    shape = Shape(
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        cache_dtype=cache_dtype,
    )
    sequences = PagedSequences(shape, ends, seed)
    parts = [(i, int(share * (end - 1)), end) for i, end in enumerate(ends)]
    output, expected = _both(backend, sequences, parts, scale=0.3, sliding_window=window)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=2e-5)


@each_backend
@each_cache
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_heads", [32, 24, 16, 7])
@pytest.mark.parametrize(
    "parts",
    [
        pytest.param([(0, 30, 33), (1, 299, 300), (2, 0, 190)], id="mixed"),
        pytest.param([(1, 299, 300)], id="one-decode"),
        pytest.param([(0, 32, 33), (1, 299, 300), (2, 189, 190)], id="decode-per-thread"),
    ],
)
def test_threads_that_share_one_kv_head_give_the_bits_of_one_thread(
    backend: AttentionBackend,
    cache_dtype: torch.dtype | None,
    dtype: torch.dtype,
    num_heads: int,
    parts: list[Rows],
) -> None:
    shape = Shape(
        num_heads=num_heads, num_kv_heads=1, head_dim=72, dtype=dtype, cache_dtype=cache_dtype
    )
    sequences = PagedSequences(shape, [33, 300, 190])
    options: dict[str, Any] = {
        "scale": 0.1,
        "sinks": torch.linspace(-1, 1, num_heads),
        "alibi_slopes": torch.linspace(0, 0.5, num_heads),
    }
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone, expected = _both(backend, sequences, parts, **options)
        torch.set_num_threads(3)
        together, _ = _both(backend, sequences, parts, **options)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(together, expected, atol=tolerance, rtol=tolerance)


@each_backend
@each_cache
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_heads", [12, 2])
@pytest.mark.parametrize("value_dim", [1, 40, 64, 96])
@pytest.mark.parametrize("window", [None, 20])
def test_elements_of_values_that_are_left_out_do_not_change_the_bits_of_the_others(
    backend: AttentionBackend,
    cache_dtype: torch.dtype | None,
    dtype: torch.dtype,
    num_heads: int,
    value_dim: int,
    window: int | None,
) -> None:
    shape = Shape(
        num_heads=num_heads, num_kv_heads=1, head_dim=104, dtype=dtype, cache_dtype=cache_dtype
    )
    sequences = PagedSequences(shape, [33, 300, 190])
    sequences.write(backend)
    parts = [(0, 30, 33), (1, 299, 300), (2, 0, 190)]
    options = {"scale": 0.1, "sliding_window": window}
    expected = sequences.attend(parts, backend, **options)
    found = sequences.attend(parts, backend, **options, value_dim=value_dim)
    assert torch.equal(found[:, :, :value_dim], expected[:, :, :value_dim])


@each_backend
def test_large_scores_do_not_overflow(backend: AttentionBackend) -> None:
    sequences = PagedSequences(Shape(), [40])
    output, expected = _both(backend, sequences, [(0, 0, 40)], scale=200.0)
    torch.testing.assert_close(output, expected, atol=1e-4, rtol=1e-4)


@each_backend
@each_cache
def test_a_nan_spoils_its_own_sequence_only(
    backend: AttentionBackend, cache_dtype: torch.dtype | None
) -> None:
    sequences = PagedSequences(Shape(cache_dtype=cache_dtype), [30, 30])
    sequences.keys[0][11] = float("nan")
    output, expected = _both(backend, sequences, [(0, 0, 30), (1, 0, 30)], scale=0.3)
    assert bool(output[:11].isfinite().all())
    assert bool(output[11:30].isnan().all())
    torch.testing.assert_close(output[30:], expected[30:], atol=1e-5, rtol=1e-5)


@each_backend
@each_cache
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "window"), [(32, 8, 1), (39, 48, 20), (32, 80, 100)]
)
def test_released_blocks_are_not_read(
    backend: AttentionBackend,
    cache_dtype: torch.dtype | None,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    window: int,
) -> None:
    shape = Shape(dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim, block_size=block_size)
    sequences = PagedSequences(shape, [33, 400, 390, 17])
    parts = [(0, 32, 33), (1, 399, 400), (2, 200, 390), (3, 0, 17)]
    before, _ = _both(backend, sequences, parts, scale=0.3, sliding_window=window)
    sequences.release(parts, window)
    after = sequences.attend(parts, backend, scale=0.3, sliding_window=window)
    assert torch.equal(after, before)


@each_backend
@each_cache
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("head_dim", [32, 39])
def test_keys_and_values_are_stored_bit_by_bit(
    backend: AttentionBackend, cache_dtype: torch.dtype | None, dtype: torch.dtype, head_dim: int
) -> None:
    sequences = PagedSequences(
        Shape(dtype=dtype, cache_dtype=cache_dtype, head_dim=head_dim), [150]
    )
    sequences.keys[0][5] = 0.0
    sequences.keys[0][6] = torch.tensor(1e-37).to(dtype)  # less than a scale may be
    sequences.keys[0][7, 0, 3] = float("-inf")
    sequences.values[0][8, 1, 31] = float("nan")
    sequences.values[0][9] = torch.arange(-head_dim, head_dim).view(2, -1).to(dtype) / 2
    twin = sequences.cache.clone()
    parts = [(0, 0, 150)]
    slots = sequences.metadata(parts).slot_mapping
    slots[[3, 77]] = -1
    keys, values = (sequences.rows(of, parts) for of in (sequences.keys, sequences.values))
    stacked = torch.cat([keys, values], dim=1)  # as views of a stacked product, with strides
    heads = sequences.shape.num_kv_heads
    backend.write_kv(
        stacked[:, :heads],
        stacked[:, heads:],
        sequences.key_cache,
        sequences.value_cache,
        slots,
    )
    reference.write_kv(keys, values, twin[:, 1, 0], twin[:, 1, 1], slots)
    assert torch.equal(sequences.cache.view(torch.int8), twin.view(torch.int8))


@each_backend
def test_rows_of_another_type_than_the_cache_are_refused(backend: AttentionBackend) -> None:
    sequences = PagedSequences(Shape(), [4])
    sequences.queries[0] = sequences.queries[0].to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"got torch\.float32 for rows of torch\.bfloat16"):
        _both(backend, sequences, [(0, 0, 4)], scale=0.3)


@each_backend
def test_a_cache_whose_heads_are_apart_is_refused(backend: AttentionBackend) -> None:
    sequences = PagedSequences(Shape(), [4])
    swapped = torch.zeros(2, 2, 8, 32).transpose(1, 2)
    with pytest.raises(ValueError, match="the heads of a token are contiguous"):
        backend.write_kv(sequences.keys[0], sequences.values[0], swapped, swapped, torch.arange(4))


@each_backend
def test_a_scaled_cache_is_refused(backend: AttentionBackend) -> None:
    sequences = PagedSequences(Shape(), [4])
    with pytest.raises(ValueError, match="does not support scaled caches"):
        _both(backend, sequences, [(0, 0, 4)], scale=0.3, key_scale=0.5)
