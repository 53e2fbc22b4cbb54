"""Chunked attention: batches whose sequences are divided at chunks. Triton is tested in `gpu/`."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_kernels import reference
from pagewire_kernels.batch import AttentionMetadata
from pagewire_kernels.flash_attention import FlashBackend
from pagewire_kernels.reference.backend import ReferenceBackend
from tests.kernels.cpu.test_attention import BACKENDS as NATIVE
from tests.kernels.test_flash_attention import CALLS
from tests.support.chunked_attention import attended_in_chunks
from tests.support.paged_batch import PagedSequences, Shape

BACKENDS = {
    "reference": ReferenceBackend(),
    **NATIVE,
    **{
        name: FlashBackend(call, reference.write_kv, reference.packed_attention)
        for name, call in CALLS.items()
        if call.abilities.block_multiple <= 16
    },
}


@pytest.mark.parametrize("name", BACKENDS)
@given(
    block_size=st.sampled_from([1, 4, 8, 16]),
    blocks_per_chunk=st.integers(1, 5),
    ends=st.lists(st.integers(1, 140), min_size=1, max_size=4),
    share=st.floats(0, 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=15)
def test_a_token_sees_what_the_mask_of_transformers_shows_it(
    name: str, block_size: int, blocks_per_chunk: int, ends: list[int], share: float, seed: int
) -> None:
    """Blocks of chunks before the first row's are full of NaN, and -1 in the tables."""
    backend = BACKENDS[name]
    is_flash = backend.name == "flash"
    dtype = torch.bfloat16 if is_flash else torch.float32
    block_size = 16 if is_flash else block_size
    chunk = block_size * blocks_per_chunk
    sequences = PagedSequences(Shape(block_size=block_size, dtype=dtype), ends, seed)
    parts = [(i, int(share * (end - 1)), end) for i, end in enumerate(ends)]
    sequences.write(backend)
    caches = sequences.key_cache, sequences.value_cache
    sequences.release(parts, chunk=chunk)
    queries, metadata = sequences.rows(sequences.queries, parts), sequences.metadata(parts)
    in_chunks = metadata.in_chunks(chunk, block_size)
    output = backend.paged_attention(queries, *caches, in_chunks, scale=0.3)
    expected = attended_in_chunks(sequences, parts, chunk, scale=0.3)
    tolerance = 2e-2 if is_flash else 2e-5
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(in_chunks.slot_mapping, metadata.slot_mapping)


def _metadata(ranges: list[tuple[int, int]], **options: Any) -> AttentionMetadata:
    tables = torch.arange(10 * len(ranges), dtype=torch.int32).view(len(ranges), 10)
    return replace(AttentionMetadata.of_ranges(ranges, tables, 4), **options)


def test_rows_in_several_chunks_are_as_many_sequences() -> None:
    """Positions 5 to 20 in chunks of 8, then a decode at position 31."""
    found = _metadata([(5, 21), (31, 32)]).in_chunks(8, 4)
    assert found.query_start.tolist() == [0, 3, 11, 16, 17, 17, 17]
    assert found.context_lens.tolist() == [8, 8, 5, 8, 0, 0]
    assert found.block_tables[:4].tolist() == [[0, 1], [2, 3], [4, 5], [16, 17]]
    assert (found.max_query_len, found.max_context_len) == (8, 8)


def test_decodes_are_as_many_sequences_as_before() -> None:
    found = _metadata([(7, 8), (8, 9)]).in_chunks(8, 4)
    assert found.query_start.tolist() == [0, 1, 2]
    assert found.context_lens.tolist() == [8, 1]
    assert found.block_tables.tolist() == [[0, 1], [12, 13]]
    assert found.max_query_len == 1


def test_without_chunks_nothing_changes() -> None:
    metadata = _metadata([(5, 21), (31, 32)])
    assert metadata.in_chunks(0, 4) is metadata


@pytest.mark.parametrize("size", [1, 4, 7])
def test_what_pads_a_captured_batch_of_decodes_attends_over_nothing(size: int) -> None:
    """Rows of no sequence, with a context of 0 tokens."""
    padded = _metadata([(20, 21)] + [(-1, 0)] * (size - 1), max_context_len=40)
    found = padded.in_chunks(8, 4)
    assert found.query_start.tolist() == [*range(size + 1)]
    assert found.context_lens.tolist() == [5] + [0] * (size - 1)


def test_shapes_of_a_captured_mixed_batch_do_not_depend_on_its_contents() -> None:
    """Padded at its end: by sequences without rows, and by rows of no sequence."""
    shapes = set()
    for ranges, num_rows in (([(19, 20), (5, 21)], 17), ([(0, 9), (0, 1)], 10)):
        before = _metadata(ranges)
        padded = replace(
            before,
            query_start=torch.tensor([*before.query_start.tolist(), num_rows, num_rows]).int(),
            context_lens=torch.tensor([*before.context_lens.tolist(), 0, 0]).int(),
            block_tables=torch.cat([before.block_tables, torch.full((2, 10), -1)]).int(),
            slot_mapping=torch.full((32,), -1),
            max_context_len=40,
            max_query_len=32,
        )
        found, expected = padded.in_chunks(8, 4), before.in_chunks(8, 4)
        num_parts = int((expected.query_start.diff() > 0).sum())
        shapes.add((found.query_start.shape, found.block_tables.shape))
        for name in ("query_start", "context_lens", "block_tables"):
            assert torch.equal(
                getattr(found, name)[:num_parts], getattr(expected, name)[:num_parts]
            )
        assert set(found.query_start[num_parts:].tolist()) == {num_rows}
        assert set(found.context_lens[num_parts:].tolist()) == {0}
    assert len(shapes) == 1
