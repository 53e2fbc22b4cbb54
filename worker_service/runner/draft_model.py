"""Drafts of a second, smaller model with the same vocabulary.

It has a KV cache of its own with as many blocks of as many tokens, so a sequence's block table
serves both. Its KV moves with no operation of a plan: `_num_computed` says how many first tokens of
a sequence it has computed in the sequence's present blocks, and the rest is computed before the
next draft. So what is not known to be there is recomputed: for a new sequence, a fork, one that was
swapped, and a block that was copied. Wrong KV would cost right drafts and never change a token.

Drafts are sampled like tokens, with the same parameters and random numbers: the nearer the two
models are, the more often they draw the same token.
"""

from copy import copy

import numpy as np
from torch import Tensor

from worker_service.array_types import Int64Array
from worker_service.models.interface import Model
from worker_service.plan import StepPlan
from worker_service.runner.batch import Drafts, StepRows, sampling_batch
from worker_service.runner.drafter import Draft, Drafter
from worker_service.runner.forward import HostForward
from worker_service.runner.sequence_table import SequenceTable
from worker_service.sampling.sampler import NO_TOKEN, sample

MAX_CATCH_UP = 512
"""Most tokens of a sequence that are computed in one step, so that a long prompt, of which this
model has no KV, does not hold up the batch. Until it has caught up, the sequence has no drafts."""

_NO_ROWS = np.empty(0, np.int64)


class DraftModel(Drafter):
    """Drafts for all rows of a step together, one position after the other."""

    takes_time = True

    def __init__(self, model: Model, cache: Tensor) -> None:
        """cache: of `model`, with the blocks of the target's cache."""
        self._max_model_len = model.max_model_len
        self._forward = HostForward(model, cache)
        self._num_computed = np.zeros(0, np.int64)
        """By row of the table."""

    def forget(self, row_ids: Int64Array) -> None:
        """Compute what gets these rows next from its first token on."""
        self._num_computed[row_ids[row_ids < len(self._num_computed)]] = 0

    def forget_all(self) -> None:
        """The same with all rows."""
        self._num_computed[:] = 0

    def begin(self, plan: StepPlan, table: SequenceTable) -> None:
        """KV remains in the blocks before those that are set in a block table."""
        row_ids = table.row_ids(plan.block_updates[:, 0], "block_updates")
        known = row_ids < len(self._num_computed)
        firsts = plan.block_updates[known, 1].astype(np.int64) * table.block_size
        np.minimum.at(self._num_computed, row_ids[known], firsts)

    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """Sampled as if each draft had been output. Sequences that are far behind have none yet."""
        missing = table.num_rows - len(self._num_computed)
        self._num_computed = np.append(self._num_computed, np.zeros(missing, np.int64))
        ends = table.num_tokens[row_ids]
        most = np.minimum(np.array(counts, np.int64), self._max_model_len - ends)
        num_tokens = ends - self._num_computed[row_ids]
        num_drafts = np.zeros(len(row_ids), np.int64)
        own = copy(table)  # the same tokens and blocks, with this model's progress
        own.num_computed_tokens = self._num_computed
        rows = np.flatnonzero(most > 0)
        is_behind = num_tokens > MAX_CATCH_UP
        num_tokens = np.minimum(num_tokens, MAX_CATCH_UP)
        while len(rows):
            sampling = np.flatnonzero(~is_behind[rows])
            tokens = self._sample(
                row_ids[rows], num_tokens[rows], sampling, num_drafts[rows], table, own
            )
            self._num_computed[row_ids[rows]] += num_tokens[rows]
            rows, tokens = rows[sampling][tokens != NO_TOKEN], tokens[tokens != NO_TOKEN]
            table.token_ids[row_ids[rows], ends[rows] + num_drafts[rows]] = tokens
            num_drafts[rows] += 1
            num_tokens[rows] = 1
            rows = rows[num_drafts[rows] < most[rows]]
        # Whether drafts are right is not known yet: they are computed again with the token more.
        self._num_computed[row_ids] = np.minimum(self._num_computed[row_ids], ends)
        places = zip(row_ids.tolist(), ends.tolist(), num_drafts.tolist(), strict=True)
        return [Draft(table.token_ids[row, end : end + n].copy()) for row, end, n in places]

    def _sample(
        self,
        row_ids: Int64Array,
        num_tokens: Int64Array,
        sampling: Int64Array,
        num_drafts: Int64Array,
        table: SequenceTable,
        own: SequenceTable,
    ) -> Int64Array:
        """Compute the next tokens of some sequences. Returns the draft that follows, for those that
        sample."""
        samples = np.zeros(len(row_ids), np.bool_)
        samples[sampling] = True
        rows = StepRows(
            row_ids=row_ids,
            num_tokens=num_tokens.astype(np.int32),
            sample=samples,
            computes=np.ones(len(row_ids), np.bool_),
            are_decodes=bool((samples & (num_tokens == 1)).all()),
            forks=_NO_ROWS,
            parents=_NO_ROWS,
            sampling=sampling,
            errors={},
        )
        forward = self._forward.run(rows, own)
        assert forward is not None, "each row has a token to compute"
        logits = self._forward.last_logits(rows, forward)
        if logits is None:
            return _NO_ROWS
        drafts = Drafts(num_drafts.astype(np.int32), num_drafts[sampling])
        batch = sampling_batch(row_ids[sampling], table, None, drafts)
        return sample(logits[0], batch, table.sampling, logits[1]).tokens
