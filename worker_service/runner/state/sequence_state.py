"""What a runner knows of the sequences of its epoch, and the tokens that are still to come.

Tokens that are sampled elsewhere, on the device or by another rank, are not known here at once. The
model thread adds a step's pending tokens when it launches the step: a placeholder stands in
each sequence, and an `Outcome` will give the tokens. They are *resolved* into the table of
sequences once they have arrived, or when a plan needs to know one now. Steps resolve in the order
in which they were launched.

There are two kinds of outcomes: an in-flight step of a GPU (`device/in_flight_step.py`), and the
message in which the sampling rank broadcasts its tokens (`batch/rank_outcomes.py`). Since only one
rank samples, ranks cannot disagree. The others wait for a row's token only when they compute that
row again, so that the first stage of a pipeline can continue with other rows.

When a step resolves depends on the speed of a device or of other ranks. So it changes nothing that
a later batch depends on: a failed row remains in the batches, in which it fails again, until a plan
needs its sequence's tokens. Ranks therefore compute the same batches, as their collectives require.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from pagewire_kernels.batch import NO_CANDIDATES, NON_FINITE, OFF_CONSTRAINT
from worker_service.array_types import Int64Array
from worker_service.errors import InvalidPlan
from worker_service.plan import KeptSequence, NewSequence, RowErrorReason, StepPlan
from worker_service.runner.state.sequence_table import PlanRows, SequenceTable
from worker_service.sampling.sampler import NO_TOKEN
from worker_service.structured.masks import ConstrainedRow, TokenMasks

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars


FAILURES = {
    NON_FINITE: RowErrorReason.NON_FINITE_LOGITS,
    NO_CANDIDATES: RowErrorReason.NO_CANDIDATES,
    OFF_CONSTRAINT: RowErrorReason.CONSTRAINT,
}
"""Negative outcomes of sampling that fail the row's sequence."""

FORGOTTEN = -1
"""Row of a step's outcome that nothing waits for."""

KEPT_WAIT_S = 0.5
"""How long a stream that ends waits for the last tokens of its sequences."""

NO_PLACEHOLDER = -1
"""Position of a row that has no token to come, but may fail."""


class Outcome(Protocol):
    """Where the tokens of a step will come from."""

    @property
    def is_available(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Int64Array:
        """[n, 1 + 2 * max_drafts]: of each row, see `StepOutcome.encode`; once they are there."""
        ...


Resolved = Callable[[Int64Array, Int64Array], None]
"""Called when a step's tokens are in the table: with the row of each, FORGOTTEN for some, and how
many drafts were accepted, [n] each."""


class _PendingStep(NamedTuple):
    """A step that has not been resolved."""

    outcome: Outcome
    row_ids: Int64Array
    """[n]: rows of the table; FORGOTTEN where nothing will be resolved."""

    positions: Int64Array
    """[n]: where in its sequence each row's placeholder stands, or NO_PLACEHOLDER."""

    resolved: "Resolved | None"


class _WithoutToken(NamedTuple):
    """A row for which a step has brought no token."""

    row_id: int
    number: int
    """One of `FAILURES`, or NOT_SAMPLED."""

    has_placeholder: bool


class PendingTokens:
    """The steps of one epoch whose tokens are not yet in the table. Used on the model thread."""

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        self._steps: deque[_PendingStep] = deque()
        self._without_token: list[_WithoutToken] = []
        """Rows of resolved steps that have no token, which the table does not know yet."""

    def add(
        self,
        outcome: Outcome,
        row_ids: Int64Array,
        positions: Int64Array,
        resolved: Resolved | None = None,
    ) -> None:
        """Add a launched step, whose placeholders are in the table. Takes over the arrays."""
        self._steps.append(_PendingStep(outcome, row_ids, positions, resolved))

    def contains(self, outcome: Outcome) -> bool:
        """Whether an outcome is still to be resolved."""
        return any(step.outcome is outcome for step in self._steps)

    def resolve_available(self) -> None:
        """Resolve the steps that are done, without waiting. The table only receives tokens."""
        while self._steps and self._steps[0].outcome.is_available:
            self._resolve_next()

    def resolve(self, row_ids: Int64Array) -> None:
        """Wait until no token of these sequences is pending, and record their failures."""
        if len(row_ids) == 0:
            return
        needed = [i for i, step in enumerate(self._steps) if np.isin(step.row_ids, row_ids).any()]
        for _ in range(needed[-1] + 1 if needed else 0):
            self._resolve_next()
        if self._without_token:
            self._record(set(row_ids.tolist()))

    def resolve_all(self) -> None:
        """Wait until no token is pending, and record all failures."""
        while self._steps:
            self._resolve_next()
        self._record({row.row_id for row in self._without_token})

    def resolve_within(self, seconds: float) -> None:
        """Resolve the steps that are done within some time, and record their failures."""
        end = time.monotonic() + seconds
        self.resolve_available()
        while self._steps and time.monotonic() < end:
            time.sleep(0.001)  # nothing announces that a step's tokens have come; they are polled
            self.resolve_available()
        self._record({row.row_id for row in self._without_token})

    def unsettled_rows(self) -> set[int]:
        """Rows of which a token is pending."""
        return {row for step in self._steps for row in step.row_ids.tolist()}

    def forget(self, row_ids: Int64Array) -> None:
        """Discard the tokens that are pending for these sequences, when they arrive."""
        for step in self._steps:
            step.row_ids[np.isin(step.row_ids, row_ids)] = FORGOTTEN
        if self._without_token:
            gone = set(row_ids.tolist())
            self._without_token = [row for row in self._without_token if row.row_id not in gone]

    def _record(self, row_ids: set[int]) -> None:
        """Take back the placeholders of these rows that have no token, and record failures."""
        found, self._without_token = self._without_token, []
        for row in found:
            if row.row_id not in row_ids:
                self._without_token.append(row)
                continue
            if row.has_placeholder:
                self._table.remove_unknown(row.row_id)
            if row.number in FAILURES:
                self._table.failures[row.row_id] = FAILURES[row.number]

    def _resolve_next(self) -> None:
        outcome, row_ids, positions, resolved = self._steps.popleft()
        encoded = outcome.wait()
        numbers, further = encoded[:, 0], encoded[:, 1:]
        is_kept = row_ids != FORGOTTEN
        has_token = is_kept & (numbers >= 0)
        self._table.resolve_tokens(row_ids[has_token], positions[has_token], numbers[has_token])
        num_kept = np.zeros(len(row_ids), np.int64)
        for index in np.flatnonzero(has_token).tolist() if further.size else ():
            row_id, kept_and_next = int(row_ids[index]), np.split(further[index], 2)
            kept, drafts = (part[part != NO_TOKEN] for part in kept_and_next)
            if num := len(kept):
                num_kept[index] = num
                self._table.insert_kept(row_id, int(positions[index]) + 1, kept)
                self._move_placeholders(row_id, num)
            if len(drafts):
                self._table.next_drafts[row_id] = drafts.astype(np.int32)
        for index in np.flatnonzero(is_kept & (numbers < 0)).tolist():
            has_placeholder = bool(positions[index] != NO_PLACEHOLDER)
            row_id, number = int(row_ids[index]), int(numbers[index])
            self._without_token.append(_WithoutToken(row_id, number, has_placeholder))
        if resolved is not None:
            resolved(row_ids, num_kept)

    def _move_placeholders(self, row_id: int, by: int) -> None:
        """Move the placeholders of a sequence, which stand after a token that was resolved."""
        for step in self._steps:
            step.positions[(step.row_ids == row_id) & (step.positions != NO_PLACEHOLDER)] += by


class SequenceState:
    """The table of sequences, the tokens that it lacks, and the matchers of constraints."""

    def __init__(self, table: SequenceTable, grammars: "Grammars | None") -> None:
        """grammars: None refuses sequences with a constraint."""
        self.table = table
        self.pending = PendingTokens(table)
        self.masks = TokenMasks(grammars) if grammars is not None else None

    def apply(self, plan: StepPlan) -> PlanRows:
        """Forget, add and extend the sequences that a plan names. Waits for the pending tokens that
        a fork inherits or that a chosen token follows."""
        self.pending.resolve_available()
        forks = [new.parent_seq_id for new in plan.new_sequences if new.parent_seq_id is not None]
        if forks or len(plan.appended_tokens):
            self._resolve([*forks, *plan.appended_tokens[:, 0].tolist()])
        rows = self.table.apply(plan)
        if len(rows.forgotten):
            self.pending.forget(rows.forgotten)
            if self.masks is not None:
                self.masks.remove(rows.forgotten)
        for index, new in enumerate(plan.new_sequences):
            if new.sampling.constraint is not None:
                self._add_constraint(new, f"new_sequences[{index}].sampling.constraint")
        return rows

    def kept(self, *, waits_for_ranks: bool) -> list[KeptSequence]:
        """What the caches hold of the sequences. waits_for_ranks: whether tokens come from other
        ranks, which may have left; without those that do not come soon. Raises GroupBroken."""
        if waits_for_ranks:
            self.pending.resolve_within(KEPT_WAIT_S)
        else:
            self.pending.resolve_all()
        without = self.pending.unsettled_rows()
        return [self.table.kept(seq_id) for seq_id in self.table.seq_ids(without)]

    def _resolve(self, seq_ids: list[int]) -> None:
        """Wait until no token of these sequences is pending, if they are known."""
        row_ids = [self.table.rows[seq_id] for seq_id in seq_ids if seq_id in self.table.rows]
        self.pending.resolve(np.array(row_ids, np.int64))

    def constrained_rows(
        self, row_ids: Int64Array, num_drafts: Int64Array | None = None
    ) -> list[ConstrainedRow]:
        """The rows of a batch that have a constraint and have not failed. num_drafts: those behind
        each one's last token that count as its output."""
        if self.masks is None:
            return []
        counts = np.zeros(len(row_ids), np.int64) if num_drafts is None else num_drafts
        return [
            ConstrainedRow(row, row_id, self.table.output(row_id, int(counts[row])), counts[row])
            for row, row_id in self.masks.constrained(row_ids)
            if row_id not in self.table.failures
        ]

    def _add_constraint(self, new: NewSequence, field: str) -> None:
        if self.masks is None:
            raise InvalidPlan(field, "expected none: not supported here")
        params, table = new.sampling, self.table
        assert params.constraint is not None
        parent = None if new.parent_seq_id is None else table.rows[new.parent_seq_id]
        try:
            self.masks.add(table.rows[new.seq_id], params.constraint, params.min_tokens, parent)
        except ValueError as error:
            raise InvalidPlan(field, str(error)) from error
