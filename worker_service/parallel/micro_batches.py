"""A step's rows in parts, so that the stages of a pipeline work at the same time.

Every plan is divided into as many parts as there are stages, and each rank computes the parts one
after the other. While a stage computes one part, the stage before it computes the next; and since
a sequence is in the same part of every plan, the first stage begins with a part of the next plan
as soon as that part's tokens are known:

    stage 0    plan 1 a   plan 1 b   plan 2 a   plan 2 b   plan 3 a
    stage 1               plan 1 a   plan 1 b   plan 2 a   plan 2 b

That needs two plans at the worker, as the core's pipelining gives it.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from worker_service.plan import StepPlan
from worker_service.sequence_state import SequenceTable

Int64Array = npt.NDArray[np.int64]


def micro_batches(plan: StepPlan, table: SequenceTable) -> Iterator[tuple[Int64Array, StepPlan]]:
    """(rows of the plan, a plan of these rows) of each part that has rows.

    The same on every rank: slots, and with them parts, follow from the plans alone. A fork that
    samples from its parent's logits is in its parent's part.
    """
    if table.num_parts == 1:
        yield np.arange(len(plan.seq_ids)), plan
        return
    parts = table.parts(table.slots(plan.seq_ids, "seq_ids"))
    for row in np.flatnonzero(plan.num_tokens == 0).tolist():
        parts[row] = _part_of_parent(plan, row, parts)
    for part in range(table.num_parts):
        rows = np.flatnonzero(parts == part)
        if len(rows):
            yield (
                rows,
                replace(
                    plan,
                    seq_ids=plan.seq_ids[rows],
                    num_tokens=plan.num_tokens[rows],
                    sample=plan.sample[rows],
                ),
            )


def _part_of_parent(plan: StepPlan, row: int, parts: Int64Array) -> int:
    """A row that names no parent of this plan stays: the runner tells what is wrong with it."""
    seq_id = int(plan.seq_ids[row])
    parent = next((new.parent_seq_id for new in plan.new_sequences if new.seq_id == seq_id), None)
    found = [] if parent is None else np.flatnonzero(plan.seq_ids == parent).tolist()
    return int(parts[found[0]] if found else parts[row])
