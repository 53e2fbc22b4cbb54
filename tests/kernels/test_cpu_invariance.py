"""The promise of the CPU backend: a row's bits depend on the row and its sequence alone."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_kernels.cpu import CpuBackend, threads
from tests.support.paged_batch import PagedSequences, Shape

LENGTHS = [61, 40, 7, 90]
SHAPES = {
    "plain": Shape(),
    "many queries per key": Shape(num_heads=12, num_kv_heads=1, head_dim=64, block_size=16),
    "one query per key": Shape(num_heads=3, num_kv_heads=3, head_dim=40, block_size=5),
    "bfloat16": Shape(dtype=torch.bfloat16, head_dim=128, block_size=32),
    "float16": Shape(dtype=torch.float16),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 13},
    "cap": {"soft_cap": 3.0},
}


class Attention:
    """One backend over some sequences, computing them part by part and batch by batch."""

    def __init__(self, shape: Shape, **options: Any) -> None:
        self.sequences = PagedSequences(shape, LENGTHS)
        self.backend = CpuBackend()
        self.options = options

    def run(self, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Store the parts' keys and values, then attend; returns each part's rows."""
        s = self.sequences
        metadata = s.metadata(parts)
        self.backend.write_kv(
            s.rows(s.keys, parts),
            s.rows(s.values, parts),
            s.key_cache,
            s.value_cache,
            metadata.slot_mapping,
        )
        output = self.backend.paged_attention(
            s.rows(s.queries, parts),
            s.key_cache,
            s.value_cache,
            metadata,
            scale=0.3,
            **self.options,
        )
        return list(output.split([end - start for _, start, end in parts]))

    def whole(self, sequence: int) -> torch.Tensor:
        """A sequence's rows from one prefill of it alone."""
        return self.run([(sequence, 0, LENGTHS[sequence])])[0]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_decodes_give_the_bits_of_a_prefill(shape: Shape, options: dict[str, Any]) -> None:
    expected = Attention(shape, **options).whole(0)
    attention = Attention(shape, **options)
    rows = [attention.run([(0, at, at + 1)])[0] for at in range(LENGTHS[0])]
    assert torch.equal(torch.cat(rows), expected)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_batch_gives_the_bits_of_each_sequence_alone(shape: Shape) -> None:
    alone = [Attention(shape).whole(i) for i in range(len(LENGTHS))]
    together = Attention(shape).run([(i, 0, length) for i, length in enumerate(LENGTHS)])
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


CHUNKED = Shape(head_dim=48, num_heads=6)


@cache
def _alone() -> list[torch.Tensor]:
    return [Attention(CHUNKED).whole(i) for i in range(len(LENGTHS))]


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_any_chunks_in_any_company_give_the_same_bits(data: st.DataObject) -> None:
    attention = Attention(CHUNKED)
    expected = _alone()
    done = [0] * len(LENGTHS)
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        pending = [i for i, length in enumerate(LENGTHS) if done[i] < length]
        chosen = data.draw(st.lists(st.sampled_from(pending), min_size=1, unique=True))
        parts = []
        for i in chosen:
            size = data.draw(st.integers(1, LENGTHS[i] - done[i]))
            parts.append((i, done[i], done[i] + size))
            done[i] += size
        for (i, start, end), rows in zip(parts, attention.run(parts), strict=True):
            assert torch.equal(rows, expected[i][start:end])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_the_number_of_threads_does_not_matter(num_threads: int) -> None:
    expected = Attention(SHAPES["plain"]).whole(3)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(Attention(SHAPES["plain"]).whole(3), expected)
    finally:
        torch.set_num_threads(before)


def test_threads_of_our_own_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Attention(SHAPES["plain"]).whole(3)
    pool = threads.ThreadPool(2)
    monkeypatch.setattr(threads, "_team", lambda: pool.run)
    try:
        assert torch.equal(Attention(SHAPES["plain"]).whole(3), expected)
    finally:
        pool.close()
