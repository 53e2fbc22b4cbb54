"""All ranks know the tokens that one of them sampled.

One rank samples, and tells. So ranks agree by construction, whatever machines they run on, and the
logits need no second look. The others take note of a row's token only when they need it: until then
a placeholder stands in its sequence, so that the first stage of a pipeline can go on with other
rows. A message carries its step's number, which has to be the receiver's own.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_service.array_types import Int64Array
from worker_service.distributed.communicator import Lines, Transfer
from worker_service.errors import GroupBroken
from worker_service.plan import RowErrorReason
from worker_service.runner.sequence_table import SequenceTable

_NOTHING = -1
"""Of a row that neither sampled nor failed, or for whose token the core has candidates."""
_FIRST_ERROR = -2
"""Errors count down from here, in the order of RowErrorReason."""
_REASONS = list(RowErrorReason)
_NOBODY = -1


def encode_outcome(tokens: Int64Array, errors: dict[int, RowErrorReason]) -> Int64Array:
    """One number per row: its token, _NOTHING, or its error."""
    numbers = tokens.copy()
    for row, reason in errors.items():
        numbers[row] = _FIRST_ERROR - _REASONS.index(reason)
    return numbers


@dataclass(kw_only=True, slots=True)
class _Expected:
    """A message that has not been taken note of."""

    step_id: int
    transfer: Transfer
    slots: Int64Array
    """Of the rows; _NOBODY where nothing is to be learned, or the sequence is forgotten."""

    has_placeholder: npt.NDArray[np.bool_]
    """Rows whose token is awaited."""


class Agreement:
    """This rank's side of it, for one epoch."""

    def __init__(self, lines: Lines, table: SequenceTable) -> None:
        self._lines = lines
        self._table = table
        self._expected: deque[_Expected] = deque()
        self._told: deque[Transfer] = deque()

    def tell(self, step_id: int, numbers: Int64Array) -> None:
        """On the sampling rank: what came of some rows, in `encode_outcome`'s form."""
        while self._told and self._told[0].is_done:
            self._told.popleft().wait()
        message = torch.from_numpy(np.concatenate([[step_id], numbers]))
        self._told.append(self._lines.share_with_all(message))

    def expect(self, step_id: int, slots: Int64Array, sampling: npt.NDArray[np.bool_]) -> None:
        """On the others: these rows' sequences have a placeholder now where they are `sampling`."""
        while self._expected and self._expected[0].transfer.is_done:
            self._take_note()
        waits = slots[sampling]
        self._table.append_tokens(waits, np.zeros(len(waits), np.int64))
        # Only rows that sample, or report what the model makes of their prompt, can fail.
        may_fail = sampling | np.isin(slots, list(self._table.prompt_logprobs))
        message = torch.empty(1 + len(slots), dtype=torch.int64)
        self._expected.append(
            _Expected(
                step_id=step_id,
                transfer=self._lines.share_with_all(message),
                slots=np.where(may_fail, slots, _NOBODY),
                has_placeholder=sampling,
            )
        )

    def know(self, slots: Int64Array) -> None:
        """Wait until nothing is awaited of these sequences. Raises GroupBroken."""
        last = max(
            (i for i, e in enumerate(self._expected) if np.isin(e.slots, slots).any()), default=-1
        )
        for _ in range(last + 1):
            self._take_note()

    def forget(self, slots: Int64Array) -> None:
        """What is still to come of these sequences is of no interest."""
        for expected in self._expected:
            expected.slots[np.isin(expected.slots, slots)] = _NOBODY

    def _take_note(self) -> None:
        expected = self._expected.popleft()
        step_id, *numbers = expected.transfer.wait().tolist()
        if step_id != expected.step_id:
            raise GroupBroken(f"rank at step {expected.step_id}, the sampling rank at {step_id}")
        rows = zip(expected.slots.tolist(), expected.has_placeholder, numbers, strict=True)
        for slot, has_placeholder, number in rows:
            if slot == _NOBODY:
                continue
            if number >= 0:
                self._table.token_ids[slot, self._table.num_tokens[slot] - 1] = number
            elif has_placeholder:
                self._table.num_tokens[slot] -= 1
            if number <= _FIRST_ERROR:
                self._table.failures[slot] = _REASONS[_FIRST_ERROR - number]
