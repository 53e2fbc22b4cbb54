"""The drafts of a step that several ranks launch ahead, chosen by the rank that samples.

The host of a rank learns tokens when its own device has them, so hosts differ in what they know
when they launch a step, and one of them chooses. It broadcasts the drafts to the other hosts, which
wait for them before they launch the same step. It also says for which sequences it has waited until
no token was pending: the others do the same, so that all record the same failures, and later steps
have the same rows.

Drafts that a head makes on the device travel between devices (`DeviceSampler.share_drafts`); hosts
have codes of them.
"""

from typing import NamedTuple

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.plan import StepPlan
from worker_service.runner.batch.step_messages import StepMessages
from worker_service.sampling.sampler import NO_TOKEN


class ChosenDrafts(NamedTuple):
    """The drafts of a step's rows."""

    resolved: Int64Array
    """[n]: rows of which no token is pending any more, because drafts were searched for."""

    tokens: dict[int, Int32Array]
    """Drafts, or their codes, by row."""


class RankDrafts:
    """One rank chooses and sends, the others receive."""

    def __init__(self, messages: StepMessages) -> None:
        self._messages = messages

    def send(self, plan: StepPlan, chosen: ChosenDrafts) -> None:
        """Broadcast the drafts of a step's rows, which have no more than the plan allows."""
        numbers = np.full((len(plan.seq_ids), 2 + plan.lookahead.max()), NO_TOKEN, np.int64)
        numbers[:, :2] = 0
        numbers[chosen.resolved, 0] = 1
        for row, tokens in chosen.tokens.items():
            numbers[row, 1] = len(tokens)
            numbers[row, 2 : 2 + len(tokens)] = tokens
        self._messages.send(plan.step_id, numbers[plan.lookahead > 0])

    def receive(self, plan: StepPlan) -> ChosenDrafts:
        """Wait for the drafts of a step's rows. Raises GroupBroken."""
        rows = np.flatnonzero(plan.lookahead)
        message = self._messages.expect(plan.step_id, len(rows), 2 + int(plan.lookahead.max()))
        numbers = message.wait()
        counts = numbers[:, 1]
        tokens = numbers[:, 2:].astype(np.int32)
        columns = zip(rows.tolist(), counts.tolist(), tokens, strict=True)
        drafts = {row: drafts[:count] for row, count, drafts in columns if count}
        return ChosenDrafts(rows[numbers[:, 0] == 1], drafts)
