"""What a runner knows of the sequences of its epoch."""

from typing import TYPE_CHECKING

import numpy as np

from worker_service.array_types import Int64Array
from worker_service.errors import InvalidPlan
from worker_service.plan import NewSequence, StepPlan
from worker_service.runner.pending_tokens import PendingTokens
from worker_service.runner.sequence_table import SequenceTable
from worker_service.structured.masks import ConstrainedRow, TokenMasks

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars


class SequenceState:
    """The table of sequences, the tokens that it lacks, and the matchers of constraints."""

    def __init__(self, table: SequenceTable, grammars: "Grammars | None") -> None:
        """grammars: None refuses sequences with a constraint."""
        self.table = table
        self.pending = PendingTokens(table)
        self.masks = TokenMasks(grammars) if grammars is not None else None

    def forget(self, plan: StepPlan) -> Int64Array:
        """Drop the sequences that a plan forgets. Returns the rows that they had."""
        row_ids = self.table.row_ids(plan.forget_seq_ids, "forget_seq_ids")
        self.pending.forget(row_ids)
        if self.masks is not None:
            self.masks.remove(row_ids)
        self.table.forget(plan.forget_seq_ids)
        return row_ids

    def admit(self, plan: StepPlan) -> None:
        """Add new sequences, chosen tokens and blocks. Waits for the pending tokens that a fork
        inherits or that a chosen token follows."""
        table = self.table
        seq_ids = [new.parent_seq_id for new in plan.new_sequences if new.parent_seq_id is not None]
        seq_ids += plan.appended_tokens[:, 0].tolist()
        row_ids = [table.row_id(seq_id) for seq_id in seq_ids if seq_id in table]
        self.pending.resolve(np.array(row_ids, np.int64))
        for index, new in enumerate(plan.new_sequences):
            field = f"new_sequences[{index}]"
            table.add(new, field)
            if new.sampling.constraint is not None:
                self._add_constraint(new, f"{field}.sampling.constraint")
        table.append_chosen(plan.appended_tokens)
        table.update_blocks(plan.block_updates)

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
        parent = None if new.parent_seq_id is None else table.row_id(new.parent_seq_id)
        try:
            self.masks.add(table.row_id(new.seq_id), params.constraint, params.min_tokens, parent)
        except ValueError as error:
            raise InvalidPlan(field, str(error)) from error
