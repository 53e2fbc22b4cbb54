"""Plans of the worker's own kind that only move blocks."""

from collections.abc import Sequence

import numpy as np

from worker_service.array_types import Int32Array
from worker_service.plan import StepPlan

Pairs = Sequence[tuple[int, int]]


def _column(pairs: Sequence[tuple[int, ...]], width: int) -> Int32Array:
    return np.array(pairs, np.int32).reshape(-1, width)


def moving_plan(*, swap_out: Pairs = (), swap_in: Pairs = (), copy: Pairs = ()) -> StepPlan:
    """A plan without rows."""
    nothing = _column((), 1).flatten()
    return StepPlan(
        epoch=1,
        step_id=1,
        forget_seq_ids=nothing,
        swap_out=_column(swap_out, 2),
        swap_in=_column(swap_in, 2),
        copy=_column(copy, 2),
        new_sequences=(),
        appended_tokens=_column((), 2),
        block_updates=_column((), 3),
        seq_ids=nothing,
        num_tokens=nothing,
        sample=nothing.astype(bool),
    )
