"""The exchange of what the ranks that share a model sample."""

from collections import deque

import numpy as np
import torch

from worker_service.array_types import Int64Array
from worker_service.distributed.communicator import Communicator, Transfer
from worker_service.errors import GroupBroken
from worker_service.runner.batch.step_outcome import StepOutcome
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.state.sequence_state import (
    FORGOTTEN,
    NO_PLACEHOLDER,
    PendingTokens,
    Resolved,
)
from worker_service.runner.state.sequence_table import SequenceTable


class _Broadcast:
    """The sampling rank's message on its way to this rank. It begins with a step id, which must
    equal this rank's."""

    def __init__(self, step_id: int, num_columns: int, transfer: Transfer) -> None:
        self._step_id = step_id
        self._num_columns = num_columns
        self._transfer = transfer

    @property
    def is_available(self) -> bool:
        return self._transfer.is_done

    def wait(self) -> Int64Array:
        """Raises GroupBroken."""
        message = self._transfer.wait().numpy()
        if message[0] != self._step_id:
            raise GroupBroken(f"rank at step {self._step_id}, the sampling rank at {message[0]}")
        return message[1:].reshape(-1, self._num_columns)


class RankOutcomes:
    """One rank samples and broadcasts, the others receive."""

    def __init__(self, communicator: Communicator) -> None:
        """Raises GroupBroken if several ranks share the model and they have not joined."""
        self.layout = communicator.layout
        self._communicator = communicator
        self._sent: deque[Transfer] = deque()
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
        groups = self._communicator.joined
        if self.layout.samples:
            while self._sent and self._sent[0].is_done:
                self._sent.popleft().wait()
            encoded = outcome.encode(max_drafts).ravel()
            message = torch.from_numpy(np.concatenate([[step_id], encoded]))
            self._sent.append(groups.share_with_all(message))
            return
        positions = np.full(len(rows.row_ids), NO_PLACEHOLDER)
        sampling = rows.sampling if rows.drafts is None else np.unique(rows.sampling)
        positions[sampling] = table.expect_tokens(rows.row_ids[sampling])
        # Only rows that sample, or report log probabilities of their prompt, can fail.
        may_fail = np.isin(rows.row_ids, list(table.prompt_logprobs))
        may_fail[sampling] = True
        num_columns = 1 + 2 * max_drafts
        num_numbers = 1 + len(rows.row_ids) * num_columns
        transfer = groups.share_with_all(torch.empty(num_numbers, dtype=torch.int64))
        row_ids = np.where(may_fail, rows.row_ids, FORGOTTEN)
        pending.add(_Broadcast(step_id, num_columns, transfer), row_ids, positions, resolved)

    def check(self) -> None:
        """Raises GroupBroken unless the ranks have joined and none has interrupted the others: what
        GPUs computed after that is invalid."""
        if self.layout.world_size > 1:
            self._communicator.joined.check()

    def leave(self) -> None:
        """Leave the group of ranks: the epoch is over."""
        self._communicator.leave()
