"""The table of sequences grows with their number."""

from pathlib import Path

import numpy as np

from tests.support.plans import new_sequence, step_plan
from worker_service.array_types import Int32Array
from worker_service.cache_groups import CacheGroup
from worker_service.runner.state.sequence_table import SequenceTable


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def _table(max_model_len: int) -> SequenceTable:
    return SequenceTable(
        vocab_size=1000,
        max_model_len=max_model_len,
        groups=[CacheGroup(block_tokens=2**16)],
        num_gpu_blocks=200,
    )


def _add(table: SequenceTable, seq_id: int, prompt: Int32Array) -> None:
    new = new_sequence([seq_id], seq_id=seq_id, token_ids=prompt)
    table.apply(step_plan(new_sequences=(new,)))


def test_tokens_stay_when_it_grows() -> None:
    table = _table(max_model_len=2**16)
    prompts = {
        seq_id: np.arange(seq_id % 7 + 1, dtype=np.int32) + seq_id for seq_id in range(1, 151)
    }
    for seq_id, prompt in prompts.items():
        _add(table, seq_id, prompt)
    for seq_id, prompt in prompts.items():
        row_id = table.rows[seq_id]
        assert table.token_ids[row_id, : table.num_tokens[row_id]].tolist() == prompt.tolist()


def test_it_grows_without_memory_for_tokens_that_there_are_not() -> None:
    table = _table(max_model_len=2**21)  # 64 rows of 8 MiB
    for seq_id in range(1, 65):
        _add(table, seq_id, np.ones(4, np.int32))
    before = _resident_bytes()
    _add(table, 65, np.ones(4, np.int32))
    assert table.num_rows == 128
    # A large page for each row that has tokens, where the system uses these.
    assert _resident_bytes() - before < 65 * 2 * 2**20 + 64 * 2**20
