"""Which part of a model a rank holds."""

import pytest

from worker_service.distributed.layout import Layout, Shard
from worker_service.errors import InvalidOption


def layouts(tensor: int, pipeline: int = 1) -> list[Layout]:
    return [
        Layout(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, rank=rank)
        for rank in range(tensor * pipeline)
    ]


def test_ranks_are_numbered_stage_by_stage_and_one_samples() -> None:
    ranks = layouts(2, 3)
    assert [(rank.stage, rank.tensor_rank) for rank in ranks] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    assert [rank.samples for rank in ranks] == [False] * 4 + [True, False]
    assert [rank.is_first_stage for rank in ranks] == [True, True] + [False] * 4
    assert [rank.is_last_stage for rank in ranks] == [False] * 4 + [True, True]


@pytest.mark.parametrize("num_layers", [3, 4, 7, 32])
def test_stages_have_all_layers_between_them(num_layers: int) -> None:
    ranges = [layout.layer_range(num_layers) for layout in layouts(1, 3)]
    assert [layer for part in ranges for layer in part] == list(range(num_layers))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1


@pytest.mark.parametrize("vocab_size", [5, 8, 300, 301])
def test_ranks_have_all_tokens_between_them(vocab_size: int) -> None:
    shards = [layout.vocab_shard(vocab_size) for layout in layouts(4)]
    tokens = [t for s in shards for t in range(s.start, s.start + s.size)]
    assert tokens == list(range(vocab_size))
    assert all(s.size <= layouts(4)[0].vocab_rows(vocab_size) for s in shards)


def test_kv_heads_are_divided_or_held_by_several_ranks() -> None:
    assert [layout.kv_head_shard(8) for layout in layouts(4)] == [
        Shard(2 * rank, 2, 8) for rank in range(4)
    ]
    assert [layout.kv_head_shard(2).start for layout in layouts(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("size", "num_heads", "num_kv_heads"), [(2, 8, 2), (4, 8, 2), (8, 8, 1), (4, 12, 4)]
)
def test_a_rank_holds_the_kv_heads_that_its_queries_need(
    size: int, num_heads: int, num_kv_heads: int
) -> None:
    for layout in layouts(size):
        heads, kv_heads = layout.even_shard(num_heads, "heads"), layout.kv_head_shard(num_kv_heads)
        queries = range(heads.start, heads.start + heads.size)
        needed = {head // (num_heads // num_kv_heads) for head in queries}
        assert needed == set(range(kv_heads.start, kv_heads.start + kv_heads.size))


def test_what_cannot_be_divided_is_an_error_that_names_the_numbers() -> None:
    last = layouts(4)[3]
    with pytest.raises(InvalidOption, match="4 ranks cannot share the model's 6 attention heads"):
        last.even_shard(6, "attention heads")
    with pytest.raises(InvalidOption, match="4 ranks cannot share the model's 3 key and value"):
        last.kv_head_shard(3)
    with pytest.raises(InvalidOption, match="expected at most 2, the model's layers, got 3"):
        layouts(1, 3)[0].layer_range(2)
    with pytest.raises(InvalidOption, match="rank: expected 0 to 5 with 2 x 3 ranks, got 6"):
        Layout(tensor_parallel_size=2, pipeline_parallel_size=3, rank=6)
    with pytest.raises(InvalidOption, match="pipeline_parallel_size: expected 1 to 4096, got 0"):
        Layout(pipeline_parallel_size=0)
