"""Inputs of decode steps are those of any batch, built in arrays that are kept."""

import numpy as np
import pytest
import torch

from worker_service.cache_groups import CacheGroup
from worker_service.runner.batch.decode_inputs import DecodeInputs
from worker_service.runner.batch.inputs import build_batch, lay_out
from worker_service.runner.state.sequence_table import SequenceTable

BLOCK_SIZE, MAX_BLOCKS = 4, 25
GROUPS = [CacheGroup(block_tokens=BLOCK_SIZE), CacheGroup(block_tokens=10)]
CACHES = [(torch.empty(0), torch.empty(0))]


def _table(lengths: list[int], seed: int) -> SequenceTable:
    """Sequences in table rows 0, 1 …, whose last tokens are to be computed; blocks in any order."""
    table = SequenceTable(
        vocab_size=1000,
        max_model_len=BLOCK_SIZE * MAX_BLOCKS,
        groups=GROUPS,
        num_gpu_blocks=10_000,
    )
    rng = np.random.default_rng(seed)
    for row_id, length in enumerate(lengths):
        table.token_ids[row_id, :length] = rng.integers(1000, size=length)
        table.num_tokens[row_id] = length
        table.num_computed_tokens[row_id] = length - 1
        for tables in table.tables:
            num_blocks = -(-length // tables.block_tokens)
            tables.blocks[row_id] = -1
            tables.blocks[row_id, :num_blocks] = rng.permutation(10_000)[:num_blocks]
    return table


@pytest.mark.parametrize(
    ("num_tokens", "num_decodes"),
    [([1, 1, 3, 1], 2), ([3, 1], 0), ([1, 1], 2), ([1, 2], 1)],
)
def test_decodes_before_the_first_longer_row_are_counted(
    num_tokens: list[int], num_decodes: int
) -> None:
    table = _table([8] * len(num_tokens), seed=0)
    table.num_computed_tokens[: len(num_tokens)] = 8 - np.array(num_tokens)
    row_ids = np.arange(len(num_tokens))
    firsts = table.num_computed_tokens[row_ids]
    inputs = lay_out(row_ids, firsts, np.array(num_tokens, np.int32), table)
    assert inputs.num_decodes == num_decodes
    assert build_batch(inputs, table, CACHES).attention[0].num_decodes == num_decodes


@pytest.fixture(scope="module")
def kept() -> DecodeInputs:
    """One for all batches, which leave what they leave."""
    return DecodeInputs(CACHES)


@pytest.mark.parametrize(
    "lengths",
    [[1], [100], [4, 5, 8, 9], [3], [97, 1], list(range(1, 51)), [2, 2], [64] * 33],
    ids=str,
)
def test_they_are_those_of_any_batch(kept: DecodeInputs, lengths: list[int]) -> None:
    table = _table(lengths, seed=len(lengths))
    row_ids = np.random.default_rng(0).permutation(len(lengths))
    firsts = table.num_computed_tokens[row_ids]
    found = kept.build(row_ids, firsts, table)
    ones = np.ones(len(lengths), np.int32)
    expected = build_batch(lay_out(row_ids, firsts, ones, table), table, CACHES)
    for name in ("token_ids", "positions"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for group, wanted in zip(found.attention, expected.attention, strict=True):
        for name in ("query_start", "context_lens", "slot_mapping"):
            column = getattr(group, name)
            assert column.dtype == getattr(wanted, name).dtype
            assert torch.equal(column, getattr(wanted, name)), name
        blocks, width = group.block_tables, wanted.block_tables.shape[1]
        assert torch.equal(blocks[:, :width], wanted.block_tables)
        assert (blocks[:, width:] == -1).all()
        assert blocks.is_contiguous()
        assert group.max_query_len == 1
        assert group.max_context_len == max(lengths)
    assert found.sampled is not None
    assert found.sampled.tolist() == list(range(len(lengths)))
    assert found.caches is CACHES


def test_each_batch_has_metadata_of_its_own(kept: DecodeInputs) -> None:
    """Attention backends distinguish batches by their metadata object."""
    table = _table([5, 6], seed=0)
    batches = [kept.build(np.arange(2), np.array([4, 5]), table) for _ in range(2)]
    assert batches[0].attention[0] is not batches[1].attention[0]
