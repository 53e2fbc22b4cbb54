"""The `flashinfer` backend: what it passes to the wrappers, which plan once for all layers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewire_kernels import flashinfer as module
from pagewire_kernels import reference
from pagewire_kernels.batch import AttentionMetadata, HostLengths
from pagewire_kernels.flashinfer import FlashInferBackend, list_pages
from pagewire_kernels.interface import FP8, AttentionNeeds
from pagewire_kernels.self_check import self_check
from tests.support import fake_flashinfer
from tests.support.paged_batch import PagedSequences, Shape

LENGTHS = [300, 1, 17, 32, 16]
PARTS = {
    "prefill and chunk": [(0, 250, 300), (1, 0, 1), (2, 0, 17)],
    "decode": [(0, 299, 300), (1, 0, 1), (2, 16, 17), (3, 31, 32), (4, 15, 16)],
    "mixed": [(1, 0, 1), (3, 31, 32), (0, 290, 300), (2, 0, 17)],
}
NUM_DECODES = {"mixed": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 7},
    "window of one": {"sliding_window": 1},
    "cap": {"soft_cap": 2.0},
}


@pytest.fixture(autouse=True)
def small_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper, "made", [])
    monkeypatch.setattr(fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper, "made", [])


def _backend() -> FlashInferBackend:
    return FlashInferBackend(fake_flashinfer, reference.write_kv)


def _counts() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(plans, runs) of the wrappers for decodes, and of those for prefills."""
    decodes = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made
    prefills = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper.made
    return (
        [(each.num_plans, each.num_runs) for each in decodes],
        [(each.num_plans, each.num_runs) for each in prefills],
    )


def _sequences(cache_dtype: torch.dtype | None = None) -> PagedSequences:
    shape = Shape(block_size=16, head_dim=64, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    sequences = PagedSequences(shape, LENGTHS)
    everything = [(i, 0, length) for i, length in enumerate(LENGTHS)]
    scale = 0.5 if cache_dtype == FP8 else 1.0
    _backend().write_kv(
        sequences.rows(sequences.keys, everything),
        sequences.rows(sequences.values, everything),
        sequences.key_cache,
        sequences.value_cache,
        sequences.metadata(everything).slot_mapping,
        key_scale=scale,
        value_scale=scale,
    )
    return sequences


def _arguments(
    sequences: PagedSequences, name: str, metadata: AttentionMetadata | None = None
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    parts = PARTS[name]
    queries = sequences.rows(sequences.queries, parts)
    if metadata is None:
        metadata = sequences.metadata(parts, num_decodes=NUM_DECODES.get(name, 0))
    return queries, sequences.key_cache, sequences.value_cache, metadata


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("are_lengths_known", [True, False])
def test_the_wrappers_get_what_they_expect(
    option: str, parts: str, are_lengths_known: bool
) -> None:
    *tensors, metadata = _arguments(_sequences(), parts)
    if are_lengths_known:
        lengths = HostLengths(metadata.query_start, metadata.context_lens)
        metadata = replace(metadata, host_lengths=lengths)
    output = _backend().paged_attention(*tensors, metadata, scale=0.3, **OPTIONS[option])
    expected = reference.paged_attention(*tensors, metadata, scale=0.3, **OPTIONS[option])
    assert torch.equal(output, expected)


@pytest.mark.parametrize("parts", PARTS)
def test_fp8_caches_are_scaled(parts: str) -> None:
    arguments = _arguments(_sequences(FP8), parts)
    options = {"scale": 0.3, "key_scale": 0.5, "value_scale": 0.5}
    output = _backend().paged_attention(*arguments, **options)
    assert torch.equal(output, reference.paged_attention(*arguments, **options))


def test_a_batch_is_planned_once_for_all_layers() -> None:
    sequences, backend = _sequences(), _backend()
    batches = [_arguments(sequences, name) for name in PARTS]
    for arguments in batches:
        for _ in range(3):
            backend.paged_attention(*arguments, scale=0.3)
    assert _counts() == ([(2, 6)], [(2, 6)])
    # Layers with a window have other plans, and a batch that comes again is planned again.
    for arguments in batches:
        for window in (None, 9):
            output = backend.paged_attention(*arguments, scale=0.3, sliding_window=window)
            expected = reference.paged_attention(*arguments, scale=0.3, sliding_window=window)
            assert torch.equal(output, expected)
    assert _counts() == ([(4, 8), (2, 2)], [(4, 8), (2, 2)])


def _decodes(lengths: list[int], sequences: PagedSequences) -> AttentionMetadata:
    """A batch of decodes, as graphs have it: lengths are on the device alone."""
    return AttentionMetadata(
        query_start=torch.arange(len(lengths) + 1, dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=sequences.tables[: len(lengths)],
        slot_mapping=torch.full((len(lengths),), -1),
        max_query_len=1,
        max_context_len=1000,
    )


def test_a_captured_batch_is_planned_before_every_replay() -> None:
    sequences, backend = _sequences(), _backend()
    size, windows = len(LENGTHS), (None, 9, None)
    context_lens = torch.zeros(size, dtype=torch.int32)
    tables = torch.full((size, sequences.tables.shape[1]), -1, dtype=torch.int32)
    query, *caches, _ = _arguments(sequences, "decode")
    before_replay: dict[Any, Any] = {}

    def replay() -> list[Tensor]:
        """Three layers of two kinds, over what the static tensors hold."""
        metadata = replace(
            _decodes([0] * size, sequences),
            context_lens=context_lens,
            block_tables=tables,
            before_replay=before_replay,
        )
        return [
            backend.paged_attention(query, *caches, metadata, scale=0.3, sliding_window=window)
            for window in windows
        ]

    replay()  # of padding alone
    assert len(before_replay) == 2
    for lengths in (LENGTHS, [16, 1, 0, 0, 0], [33, 1, 17, 2, 0]):
        context_lens.copy_(torch.tensor(lengths))
        tables.copy_(torch.where(context_lens[:, None] > 0, sequences.tables, -1))
        for plan in before_replay.values():
            plan(HostLengths(torch.arange(size + 1).int(), context_lens.clone()))
        count = sum(length > 0 for length in lengths)
        arguments = query[:count], *caches, _decodes(lengths[:count], sequences)
        for output, window in zip(replay(), windows, strict=True):
            expected = reference.paged_attention(*arguments, scale=0.3, sliding_window=window)
            assert torch.equal(output[:count], expected)
    assert _counts() == ([(4, 8), (4, 4)], [])
    first, second = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made
    assert first.workspaces[0] is second.workspaces[0]
    assert first.workspaces[1] is not second.workspaces[1], "both plans are read in one replay"


def test_graphs_of_all_sizes_share_their_memory() -> None:
    sequences, backend = _sequences(), _backend()
    query, *caches, _ = _arguments(sequences, "decode")
    for size in (5, 3, 1):
        metadata = replace(_decodes([0] * size, sequences), before_replay={})
        backend.paged_attention(query[:size], *caches, metadata, scale=0.3)
    made = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made
    assert len(made) == 3
    shared = [(each.pages, *each.workspaces) for each in made]
    places = {tuple(each.data_ptr() for each in tensors if each is not None) for tensors in shared}
    assert len(places) == 1


def test_pages_are_listed_without_gaps() -> None:
    tables = torch.tensor([[7, 3, -1], [2, -1, -1], [-1, -1, -1], [4, 5, 6]], dtype=torch.int32)
    pages = torch.full((13,), 99, dtype=torch.int32)
    list_pages(tables, torch.tensor([0, 2, 3, 4, 7], dtype=torch.int32), pages)
    assert pages[:7].tolist() == [7, 3, 2, 0, 4, 5, 6]


def test_what_it_cannot_do_is_refused() -> None:
    backend = _backend()
    *tensors, metadata = _arguments(_sequences(), "decode")
    options: dict[str, Any]
    for options in ({"sinks": torch.zeros(4)}, {"alibi_slopes": torch.zeros(4)}):
        with pytest.raises(ValueError, match="attention backend 'flashinfer' does not support"):
            backend.paged_attention(*tensors, metadata, scale=1.0, **options)
    mixed = replace(metadata, device_num_decodes=torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="does not support captured mixed batches"):
        backend.paged_attention(*tensors, mixed, scale=1.0)
    needs = AttentionNeeds(
        dtype=torch.float32, head_dim=96, sinks=True, alibi=True, batch_invariant=True
    )
    assert [*backend.abilities.obstacles(needs)] == [
        "does not compute in float32",
        "takes heads of 64, 128, 256 elements, not 96",
        "has no attention sinks",
        "has no ALiBi biases",
        "is not batch-invariant",
    ]


@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_the_startup_check_passes(cache_dtype: torch.dtype | None) -> None:
    needs = AttentionNeeds(
        dtype=torch.bfloat16,
        head_dim=64,
        sliding_window=True,
        soft_cap=True,
        cache_dtype=cache_dtype,
    )
    self_check(_backend(), torch.device("cpu"), needs)
