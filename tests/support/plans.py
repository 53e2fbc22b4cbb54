"""Plans of the worker's own kind that move blocks and change block tables."""

from collections.abc import Sequence

import numpy as np

from worker_service.array_types import Int32Array
from worker_service.plan import BlockTable, NewSequence, SamplerParams, StepPlan

Pairs = Sequence[tuple[int, int]]


def _column(pairs: Sequence[tuple[int, ...]], width: int) -> Int32Array:
    return np.array(pairs, np.int32).reshape(-1, width)


def moving_plan(
    *,
    swap_out: Pairs = (),
    swap_in: Pairs = (),
    copy: Pairs = (),
    block_updates: Sequence[tuple[int, int, int, int]] = (),
    new_sequences: Sequence[NewSequence] = (),
) -> StepPlan:
    """A plan without rows."""
    nothing = _column((), 1).flatten()
    return StepPlan(
        epoch=1,
        step_id=1,
        forget_seq_ids=nothing,
        swap_out=_column(swap_out, 2),
        swap_in=_column(swap_in, 2),
        copy=_column(copy, 2),
        new_sequences=tuple(new_sequences),
        appended_tokens=_column((), 2),
        block_updates=_column(block_updates, 4),
        seq_ids=nothing,
        num_tokens=nothing,
        output=nothing,
        lookahead=nothing,
    )


def new_sequence(block_ids: Sequence[int]) -> NewSequence:
    """A sequence with these blocks, of which none is computed."""
    return NewSequence(
        seq_id=1,
        choice_index=0,
        token_ids=np.array([1], np.int32),
        num_prompt_tokens=1,
        num_computed_tokens=0,
        tables=(BlockTable(group=0, first_index=0, block_ids=np.array(block_ids, np.int32)),),
        sampling=SamplerParams(),
        parent_seq_id=None,
        prompt_logprobs_start=0,
    )
