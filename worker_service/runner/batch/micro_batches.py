"""Micro-batches of a step, so that the stages of a pipeline work at the same time.

Every plan is divided into as many parts as there are stages, and each rank computes the parts one
after the other. While a stage computes one part, the stage before it computes the next; and since
a sequence decodes in the same part of every plan, the first stage begins with a part of the next
plan as soon as that part's tokens are known:

    stage 0    plan 1 a   plan 1 b   plan 2 a   plan 2 b   plan 3 a
    stage 1               plan 1 a   plan 1 b   plan 2 a   plan 2 b

That needs two plans at the worker, which the core's pipelining provides.

The slowest part sets the pace, so parts are even in tokens. A prompt's tokens are all known, and
may be cut into pieces that follow one another in the order of the parts; the last of them samples.
A piece beyond the sequence's own part has a price: that part of the next plan, in which it decodes
for the first time, waits for the token. So a row that samples fills its own part first, then those
before it, and only then those after it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.errors import InvalidPlan
from worker_service.plan import StepPlan
from worker_service.runner.state.sequence_table import SequenceTable

MIN_TOKENS = 16
"""Fewest tokens in a piece: a part may be longer than the mean by about this many."""


def micro_batches(
    plan: StepPlan, row_ids: Int64Array, table: SequenceTable
) -> Iterator[tuple[Int64Array, StepPlan]]:
    """(rows of the plan, a plan of these rows) for each part that has rows. A row that was cut is
    in several parts and samples in the last of them. row_ids: rows of the table.

    Every rank computes the same parts, since they depend on the plans alone. A fork that samples
    from its parent's logits is in the part in which its parent samples. Raises InvalidPlan if a
    sequence has two rows.
    """
    shares, ends = _divide(plan, row_ids, table)
    for part in range(table.rows.num_parts):
        ends_here = ends == part
        rows = np.flatnonzero((shares[part] > 0) | ends_here)
        if len(rows):
            yield (
                rows,
                replace(
                    plan,
                    seq_ids=plan.seq_ids[rows],
                    num_tokens=shares[part, rows],
                    output=np.where(ends_here, plan.output, 0)[rows],
                    lookahead=np.where(ends_here, plan.lookahead, 0)[rows],
                ),
            )


def _divide(
    plan: StepPlan, row_ids: Int64Array, table: SequenceTable
) -> tuple[Int32Array, Int64Array]:
    """[num_parts, num_rows]: each row's tokens in each part; [num_rows]: the part it ends in."""
    if len(np.unique(row_ids)) != len(row_ids):
        raise InvalidPlan("seq_ids", "a sequence has two rows")
    ends = table.rows.parts(row_ids)
    shares = np.zeros((table.rows.num_parts, len(row_ids)), np.int32)
    is_long = plan.num_tokens > MIN_TOKENS
    short = np.flatnonzero(~is_long)
    shares[ends[short], short] = plan.num_tokens[short]
    room = -(-int(plan.num_tokens.sum()) // table.rows.num_parts) - shares.sum(axis=1)
    samples = plan.samples
    # Rows that sample come first: only they prefer certain parts.
    for row in sorted(np.flatnonzero(is_long).tolist(), key=lambda row: not samples[row]):
        order = _order(int(ends[row]), table.rows.num_parts, samples=bool(samples[row]))
        shares[:, row] = _pieces(int(plan.num_tokens[row]), room, order)
        room -= shares[:, row]
        ends[row] = np.flatnonzero(shares[:, row])[-1]
    for row in np.flatnonzero(plan.num_tokens == 0).tolist():
        ends[row] = _end_of_parent(plan, row, ends)
    return shares, ends


def _order(part: int, num_parts: int, *, samples: bool) -> Sequence[int]:
    """The parts in the order in which a row fills them."""
    if not samples:
        return range(num_parts)
    return [*range(part, -1, -1), *range(part + 1, num_parts)]


def _pieces(num_tokens: int, room: Int64Array, order: Sequence[int]) -> Int64Array:
    """How many of a row's tokens each part takes; none exceeds its room by much."""
    pieces, num_remaining = np.zeros_like(room), num_tokens
    for part in order:
        if num_remaining <= room[part] + MIN_TOKENS:
            pieces[part] = num_remaining
            return pieces
        if room[part] > 0:
            pieces[part] = max(int(room[part]), MIN_TOKENS)
            num_remaining -= int(pieces[part])
    pieces[np.argmax(room - pieces)] += num_remaining
    return pieces


def _end_of_parent(plan: StepPlan, row: int, ends: Int64Array) -> int:
    """The part in which a fork's parent ends. A row without a parent in this plan keeps its own
    part: the runner then reports the error."""
    seq_id = int(plan.seq_ids[row])
    parent = next((new.parent_seq_id for new in plan.new_sequences if new.seq_id == seq_id), None)
    found = [] if parent is None else np.flatnonzero(plan.seq_ids == parent).tolist()
    return int(ends[found[0]] if found else ends[row])
