"""The promise of the backends on CPUs: a row's bits depend on the row and its sequence alone."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire_kernels.cpu import threads
from pagewire_kernels.cpu.attention import NativeBackend
from pagewire_kernels.interface import AttentionBackend
from pagewire_kernels.reference.backend import ReferenceBackend
from tests.support.native import native_libraries
from tests.support.paged_batch import PagedSequences, Rows, Shape

LENGTHS = [140, 40, 7, 90]
SHAPES = {
    "plain": Shape(),
    "many queries per key": Shape(num_heads=12, num_kv_heads=1, head_dim=64, block_size=16),
    "one query per key": Shape(num_heads=3, num_kv_heads=3, head_dim=40, block_size=5),
    "bfloat16": Shape(dtype=torch.bfloat16, head_dim=128, block_size=32),
    "bfloat16, odd": Shape(dtype=torch.bfloat16, num_heads=14, head_dim=39, block_size=7),
    "int8": Shape(cache_dtype=torch.int8, head_dim=80),
    "bfloat16 in int8": Shape(
        dtype=torch.bfloat16, cache_dtype=torch.int8, num_heads=14, head_dim=128, block_size=7
    ),
}

BACKENDS: dict[str, AttentionBackend] = {
    "reference": ReferenceBackend(),
    **{native.instruction_set: NativeBackend(native) for native in native_libraries()},
}

each_backend = pytest.mark.parametrize("backend", BACKENDS)
each_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs torch's many small operations on one thread, which is faster."""
    before = torch.get_num_threads()
    if request.node.callspec.params["backend"] == "reference":
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Attention:
    """One backend over some sequences, computing them part by part and batch by batch."""

    def __init__(self, backend: str, shape: Shape, **options: Any) -> None:
        self.sequences = PagedSequences(shape, LENGTHS)
        self.backend = BACKENDS[backend]
        self.options = options

    def run(self, parts: list[Rows]) -> list[torch.Tensor]:
        """Store the parts' keys and values, then attend; returns each part's rows."""
        self.sequences.write(self.backend, parts)
        output = self.sequences.attend(parts, self.backend, scale=0.3, **self.options)
        return list(output.split([end - start for _, start, end in parts]))

    def whole(self, sequence: int) -> torch.Tensor:
        """A sequence's rows from one prefill of it alone."""
        return self.run([(sequence, 0, LENGTHS[sequence])])[0]


@each_backend
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        *((shape, {}) for shape in SHAPES.values()),
        (SHAPES["bfloat16, odd"], {"sliding_window": 13}),
        (SHAPES["int8"], {"sliding_window": 13, "soft_cap": 3.0}),
    ],
    ids=str,
)
def test_decodes_give_the_bits_of_a_prefill(
    backend: str, shape: Shape, options: dict[str, Any]
) -> None:
    expected = Attention(backend, shape, **options).whole(0)
    attention = Attention(backend, shape, **options)
    rows = [attention.run([(0, at, at + 1)])[0] for at in range(LENGTHS[0])]
    assert torch.equal(torch.cat(rows), expected)


@each_backend
def test_with_everything_on_decodes_give_the_bits_of_a_prefill(backend: str) -> None:
    options: dict[str, Any] = {
        "sliding_window": 70,
        "soft_cap": 3.0,
        "sinks": torch.tensor([0.5, -3.0, 4.0, 0.0]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.0, 0.0625]),
    }
    test_decodes_give_the_bits_of_a_prefill(backend, SHAPES["plain"], options)


@each_backend
@each_shape
def test_a_batch_gives_the_bits_of_each_sequence_alone(backend: str, shape: Shape) -> None:
    alone = [Attention(backend, shape).whole(i) for i in range(len(LENGTHS))]
    together = Attention(backend, shape).run([(i, 0, length) for i, length in enumerate(LENGTHS)])
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


CHUNKED = Shape(head_dim=48, num_heads=6)


@cache
def _alone(backend: str) -> list[torch.Tensor]:
    return [Attention(backend, CHUNKED).whole(i) for i in range(len(LENGTHS))]


@each_backend
@given(data=st.data())
@settings(max_examples=10)
def test_any_chunks_in_any_company_give_the_same_bits(backend: str, data: st.DataObject) -> None:
    attention = Attention(backend, CHUNKED)
    expected = _alone(backend)
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


@each_backend
@pytest.mark.parametrize(
    ("num_threads", "shape"), [(1, "plain"), (2, "one query per key"), (5, "plain")]
)
def test_the_number_of_threads_does_not_matter(backend: str, num_threads: int, shape: str) -> None:
    expected = Attention(backend, SHAPES[shape]).whole(3)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(Attention(backend, SHAPES[shape]).whole(3), expected)
    finally:
        torch.set_num_threads(before)


@each_backend
def test_threads_of_our_own_give_the_same_bits(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Attention(backend, SHAPES["plain"]).whole(3)
    pool = threads.ThreadPool(2)
    monkeypatch.setattr(threads, "_team", lambda: pool.run)
    try:
        assert torch.equal(Attention(backend, SHAPES["plain"]).whole(3), expected)
    finally:
        pool.close()
