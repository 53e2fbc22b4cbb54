"""The flattened inputs of a forward pass."""

import numpy as np
import pytest
import torch

from worker_service.cache_groups import CacheGroup
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


def test_decodes_read_their_last_tokens_slots_and_tables_in_each_group() -> None:
    lengths = [97, 1, 12]
    table = _table(lengths, seed=1)
    row_ids = np.array([2, 0, 1])
    firsts = table.num_computed_tokens[row_ids]
    batch = build_batch(lay_out(row_ids, firsts, np.ones(3, np.int32), table), table, CACHES)
    assert batch.token_ids.tolist() == table.token_ids[row_ids, firsts].tolist()
    assert batch.positions.tolist() == [11, 96, 0]
    for group, tables in zip(batch.attention, table.tables, strict=True):
        blocks = tables.blocks[row_ids, firsts // tables.block_tokens].astype(np.int64)
        offsets = firsts % tables.block_tokens
        assert group.slot_mapping.tolist() == (blocks * tables.block_tokens + offsets).tolist()
        assert group.block_tables.shape[1] == -(-97 // tables.block_tokens)
        assert group.block_tables.is_contiguous()
        assert group.query_start.tolist() == [0, 1, 2, 3]
        assert group.context_lens.tolist() == [12, 97, 1]
        assert (group.max_query_len, group.max_context_len) == (1, 97)
