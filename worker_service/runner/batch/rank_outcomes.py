"""The exchange of what the ranks that share a model sample."""

import numpy as np

from worker_service.distributed.communicator import Communicator
from worker_service.runner.batch.step_messages import StepMessages
from worker_service.runner.batch.step_outcome import StepOutcome
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.state.sequence_state import (
    FORGOTTEN,
    NO_PLACEHOLDER,
    PendingTokens,
    Resolved,
)
from worker_service.runner.state.sequence_table import SequenceTable


class RankOutcomes:
    """One rank samples and broadcasts, the others receive."""

    def __init__(self, communicator: Communicator) -> None:
        """Raises GroupBroken if several ranks share the model and they have not joined."""
        self.layout = communicator.layout
        self._communicator = communicator
        self._messages = StepMessages(communicator)
        self.check()

    def exchange(
        self,
        step_id: int,
        rows: StepRows,
        outcome: StepOutcome,
        table: SequenceTable,
        pending: PendingTokens,
        max_drafts: int,
        resolved: Resolved | None = None,
    ) -> None:
        """Broadcast the outcome of a batch of rows to the other ranks, or expect it and add its
        tokens as pending. max_drafts: of one of its rows, and of the sequence's next row;
        resolved: called on the other ranks."""
        if self.layout.samples:
            self._messages.send(step_id, outcome.encode(max_drafts))
            return
        positions = np.full(len(rows.row_ids), NO_PLACEHOLDER)
        sampling = rows.sampling if rows.drafts is None else np.unique(rows.sampling)
        positions[sampling] = table.expect_tokens(rows.row_ids[sampling])
        # Only rows that sample, or report log probabilities of their prompt, can fail.
        may_fail = np.isin(rows.row_ids, list(table.prompt_logprobs))
        may_fail[sampling] = True
        message = self._messages.expect(step_id, len(rows.row_ids), 1 + 2 * max_drafts)
        row_ids = np.where(may_fail, rows.row_ids, FORGOTTEN)
        pending.add(message, row_ids, positions, resolved)

    def check(self) -> None:
        """Raises GroupBroken unless the ranks have joined and none has interrupted the others: what
        GPUs computed after that is invalid."""
        if self.layout.world_size > 1:
            self._communicator.joined.check()

    def leave(self) -> None:
        """Leave the group of ranks: the epoch is over."""
        self._communicator.leave()
