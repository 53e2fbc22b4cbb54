"""Plans of the worker's own kind, of which a test gives what it is about."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from worker_service.plan import BlockTable, NewSequence, SamplerParams, StepPlan

WIDTHS = {
    "swap_out": 2,
    "swap_in": 2,
    "copy": 2,
    "appended_tokens": 2,
    "block_updates": 4,
    "saved_states": 4,
}
COLUMNS = ("forget_seq_ids", "seq_ids", "num_tokens", "output", "lookahead", *WIDTHS)


def step_plan(**fields: Any) -> StepPlan:
    """A plan with these fields, columns as any sequences; its other columns are empty."""
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        column = np.array(fields.pop(name, ()), np.int32)
        columns[name] = column.reshape(-1, WIDTHS[name]) if name in WIDTHS else column
    return StepPlan(**{"epoch": 1, "step_id": 1, "new_sequences": ()} | columns | fields)


def block_table(block_ids: Sequence[int], group: int = 0, first_index: int = 0) -> BlockTable:
    """A table of these blocks."""
    blocks = np.array(block_ids, np.int32)
    return BlockTable(group=group, first_index=first_index, block_ids=blocks)


def new_sequence(block_ids: Sequence[int] = (1,), **fields: Any) -> NewSequence:
    """A sequence with these blocks, of which none is computed; one prompt token by default."""
    token_ids = np.array(fields.pop("token_ids", [1]), np.int32)
    defaults = {
        "seq_id": 1,
        "choice_index": 0,
        "num_prompt_tokens": len(token_ids),
        "num_computed_tokens": 0,
        "tables": (block_table(block_ids),),
        "sampling": SamplerParams(),
        "parent_seq_id": None,
        "prompt_logprobs_start": 0,
    }
    return NewSequence(token_ids=token_ids, **defaults | fields)
