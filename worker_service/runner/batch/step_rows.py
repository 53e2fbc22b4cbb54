"""A step's rows, checked against what the worker knows of their sequences.

Rows that compute tokens are concatenated without padding, prefills and decodes together
(`inputs.py`).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from worker_service.array_types import BoolArray, Int32Array, Int64Array
from worker_service.errors import InvalidPlan
from worker_service.plan import PoolingType, RowErrorReason, RowOutput, StepPlan
from worker_service.runner.state.sequence_table import SequenceTable

_NO_ROWS = np.empty(0, np.int64)

# Not members of an enum, for which numpy takes several times as long as for integers.
_NOTHING, _TOKEN, _CANDIDATES, _VECTOR = map(int, RowOutput)


class Drafts(NamedTuple):
    """The drafts of a step's rows."""

    counts: Int32Array
    """[num_rows]: tokens of each row that are drafts, its last ones."""

    offsets: Int64Array
    """[num_sampling]: drafts before each place that is sampled at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRows:
    """The rows of a plan, checked against what the worker knows; arrays are [num_rows]."""

    row_ids: Int64Array
    num_tokens: Int32Array
    firsts: Int64Array
    """Position of each row's first token: how many were computed before."""

    sample: BoolArray
    brings_vector: BoolArray

    computes: BoolArray
    """Rows in the forward pass: they have tokens to compute and have not failed before."""

    are_decodes: bool
    """Whether every row computes one token and samples."""

    forks: Int64Array
    """[num_forks]: the rows without tokens, which sample from their parents' last logits."""

    parents: Int64Array
    """[num_forks]: their parents' rows."""

    sampling: Int64Array
    """[num_sampling]: the rows that sample now, those with drafts once more for each of them; none
    of a sequence that failed before."""

    errors: dict[int, RowErrorReason]
    """The rows of sequences that failed before."""

    saved_states: Int32Array | None = None
    """[n, 4]: those of the plan, with rows of the table as sequences; None if there are none."""

    drafts: Drafts | None = None
    """None if no row has any."""

    def ends(self) -> Int64Array:
        """[num_rows]: one past each row's last hidden state in the forward pass."""
        return np.cumsum(np.where(self.computes, self.num_tokens, 0))

    def last_states(self) -> Int64Array:
        """[num_sampling]: the hidden states to sample from; a fork's is its parent's."""
        if not len(self.sampling):
            return self.sampling
        ends = self.ends()
        if len(self.forks):
            ends[self.forks] = ends[self.parents]
        if self.drafts is not None:
            ends = ends - self.drafts.counts
            return ends[self.sampling] - 1 + self.drafts.offsets
        return ends[self.sampling] - 1

    @property
    def num_computed(self) -> Int32Array:
        """[num_rows]: tokens of each row that are computed for good, which drafts are not."""
        num_drafts = 0 if self.drafts is None else self.drafts.counts
        return np.where(self.computes, self.num_tokens - num_drafts, 0)

    @property
    def expecting(self) -> Int64Array:
        """[n]: the sequences that sample, one after the other, whether or not they have drafts."""
        row_ids = self.row_ids[self.sampling]
        return row_ids if self.drafts is None else row_ids[self.drafts.offsets == 0]


def resolve_rows(plan: StepPlan, row_ids: Int64Array, table: SequenceTable) -> StepRows:
    """The plan's rows. row_ids: rows of the table. Raises InvalidPlan if they contradict it."""
    if len(set(row_ids.tolist())) != len(row_ids):
        raise InvalidPlan("seq_ids", "a sequence has two rows")
    computes = plan.num_tokens > 0
    forks = parents = _NO_ROWS
    errors: dict[int, RowErrorReason] = {}
    if failures := table.failures:
        ids = enumerate(row_ids.tolist())
        errors = {row: failures[row_id] for row, row_id in ids if row_id in failures}
    if errors or not computes.all():
        is_alive = np.ones(len(row_ids), np.bool_)
        is_alive[list(errors)] = False
        forks = np.flatnonzero(~computes & is_alive)
        parents = np.array([_parent_row(plan, row, table) for row in forks.tolist()], np.int64)
        computes &= is_alive
    saved_states = None
    if len(saved := plan.saved_states):
        saved_ids = table.rows.of(saved[:, 0], "saved_states").astype(np.int32)
        saved_states = np.column_stack([saved_ids, saved[:, 1:]])
    planned = plan.samples
    samples = planned & computes
    samples[forks] = True
    rows = StepRows(
        row_ids=row_ids,
        num_tokens=plan.num_tokens,
        firsts=table.num_computed_tokens[row_ids],
        sample=planned,
        brings_vector=plan.output == _VECTOR,
        computes=computes,
        are_decodes=bool((computes & planned & (plan.num_tokens == 1)).all()),
        forks=forks,
        parents=parents,
        sampling=np.flatnonzero(samples),
        errors=errors,
        saved_states=saved_states,
    )
    _check_lengths(rows, plan, table)
    _check_outputs(rows, plan, table)
    return rows


def _parent_row(plan: StepPlan, row: int, table: SequenceTable) -> int:
    """The row whose logits a row without tokens samples from."""
    seq_id = int(plan.seq_ids[row])
    parent = next((new.parent_seq_id for new in plan.new_sequences if new.seq_id == seq_id), None)
    if parent is None or not plan.samples[row]:
        problem = f"row {row} computes no tokens; only a new fork that samples may do so"
        raise InvalidPlan("num_tokens", problem)
    rows = np.flatnonzero(plan.seq_ids[:row] == parent)
    if len(rows) == 0 or plan.num_tokens[rows[0]] == 0:
        problem = f"row {row} is a fork of {parent}, which computes nothing in a row before it"
        raise InvalidPlan("num_tokens", problem)
    if plan.lookahead[rows[0]]:
        problem = f"row {rows[0]} has drafts, and a fork that samples from its logits"
        raise InvalidPlan("lookahead", problem)
    row_id, parent_row_id = table.rows[seq_id], table.rows[parent]
    end = table.num_computed_tokens[parent_row_id] + plan.num_tokens[rows[0]]
    if table.num_tokens[row_id] != end or table.num_tokens[parent_row_id] != end:
        problem = f"row {row} is a fork of {parent}, which does not compute up to its last token"
        raise InvalidPlan("num_tokens", problem)
    return int(rows[0])


def _check_outputs(rows: StepRows, plan: StepPlan, table: SequenceTable) -> None:
    """Sequences with num_candidates bring candidates, texts a vector, and others a token; or
    nothing. All rows of a text whose tokens have vectors bring some."""
    has_candidates = table.sampling.num_candidates[rows.row_ids] > 0
    expected = np.where(has_candidates, _CANDIDATES, _TOKEN)
    may_be_idle = np.ones(len(expected), np.bool_)
    for row, row_id in enumerate(rows.row_ids.tolist()) if table.texts else ():
        if (text := table.texts.get(row_id)) is not None:
            expected[row] = _VECTOR
            may_be_idle[row] = text.params.type is not PoolingType.ALL
    is_wrong = (plan.output != expected) & ((plan.output != _NOTHING) | ~may_be_idle)
    if is_wrong.any():
        row = int(np.flatnonzero(is_wrong)[0])
        got, seq_id = plan.output[row], plan.seq_ids[row]
        allowed = f"0 or {expected[row]}" if may_be_idle[row] else expected[row]
        problem = f"the row of sequence {seq_id} has {got}, expected {allowed}"
        raise InvalidPlan("output", problem)


def _ends_text(rows: StepRows, table: SequenceTable) -> BoolArray:
    """[num_rows]: rows with an output that follows the last token of their sequence."""
    ends = rows.sample | rows.brings_vector
    if table.texts:
        kinds = [table.texts[row_id].params.type for row_id in rows.row_ids.tolist()]
        ends &= np.array([kind is not PoolingType.ALL for kind in kinds])
    return ends


def _check_lengths(rows: StepRows, plan: StepPlan, table: SequenceTable) -> None:
    """Rows compute tokens that exist, into blocks that exist, and sample from the last token. Rows
    with drafts compute and sample, and have blocks for all of them."""
    row_ids, firsts = rows.row_ids[rows.computes], rows.firsts[rows.computes]
    end = firsts + rows.num_tokens[rows.computes]
    last = end + table.num_pending_drafts[row_ids]
    num_tokens, limit = table.num_tokens[row_ids], table.capacity[row_ids]
    is_early = _ends_text(rows, table)[rows.computes] & (end != num_tokens)
    is_part = np.zeros(len(row_ids), np.bool_)
    if not table.tables:
        is_part = (firsts > 0) | (end < num_tokens)
    if (lookahead := plan.lookahead).any():
        last = last + lookahead[rows.computes]
        is_idle = ~rows.sample | (plan.num_tokens == 0)
        if lookahead[is_idle].any():
            seq_id = plan.seq_ids[is_idle & (lookahead > 0)][0]
            problem = "has drafts, but does not compute and sample"
            raise InvalidPlan("lookahead", f"the row of sequence {seq_id} {problem}")
    if not (is_early | is_part | (end > num_tokens) | (last > limit)).any():
        return
    for field, is_wrong, problem in (
        ("num_tokens", end > num_tokens, "computes more tokens than the sequence has"),
        ("output", is_early, "brings its output before its last token"),
        ("num_tokens", is_part, "computes a part of a text that must be computed at once"),
        ("num_tokens", end > table.max_model_len, "goes beyond the model's length"),
        ("num_tokens", end > limit, "lacks blocks"),
        ("lookahead", last > limit, "lacks blocks for its drafts, or exceeds the model"),
    ):
        if is_wrong.any():
            seq_id = plan.seq_ids[rows.computes][is_wrong][0]
            raise InvalidPlan(field, f"the row of sequence {seq_id} {problem}")
