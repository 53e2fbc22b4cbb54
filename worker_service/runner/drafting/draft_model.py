"""Drafts from a draft model: a smaller model with the same vocabulary.

The KV of the draft model lies in the blocks of the target's group that keeps all tokens, behind
that of the target's layers, so a copied block holds the drafter's KV as well. A column of the table
counts the first tokens of a sequence whose draft KV is in its blocks; the KV of all others is
computed before the next draft: for a new sequence, a fork, and a sequence that was swapped. Wrong
KV would make drafts worse, but never change a sampled token.

Drafts are sampled with the same parameters and random numbers as tokens: the closer the two models
are, the more often they draw the same token.
"""

from collections.abc import Sequence

import numpy as np

from pagewire_kernels.batch import LayerMemory, tensor_of
from worker_service.array_types import Int64Array
from worker_service.models.interface import Model
from worker_service.runner.batch.forward import HostForward
from worker_service.runner.batch.sampling import sampling_batch
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.drafting.drafter import Draft, Drafter
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.sampler import NO_TOKEN, sample

MAX_CATCH_UP = 512
"""Maximum number of tokens of a sequence that the draft model computes in one step, so that a long
prompt does not delay the batch. A sequence has no drafts until its draft KV is complete."""

_NO_ROWS = np.empty(0, np.int64)


class DraftModel(Drafter):
    """Drafts from a draft model, for all rows of a step together, one position after the other."""

    is_expensive = True

    def __init__(self, model: Model, caches: Sequence[LayerMemory]) -> None:
        """caches: keys and values of the layers of `model`, in the target's blocks."""
        self._max_model_len = model.max_model_len
        self._forward = HostForward(model, caches, tensor_of(caches[0]).device)

    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """Sample drafts as if each had been output. Sequences that lack KV of more than
        `MAX_CATCH_UP` tokens have no drafts yet."""
        num_computed = table.drafter_state[:, 0]
        ends = table.num_tokens[row_ids]
        limits = np.minimum(np.array(counts, np.int64), self._max_model_len - ends)
        num_tokens = ends - num_computed[row_ids]
        num_drafts = np.zeros(len(row_ids), np.int64)
        rows = np.flatnonzero(limits > 0)
        is_behind = num_tokens > MAX_CATCH_UP
        num_tokens = np.minimum(num_tokens, MAX_CATCH_UP)
        while len(rows):
            sampling = np.flatnonzero(~is_behind[rows])
            tokens = self._sample(
                row_ids[rows], num_tokens[rows], sampling, num_drafts[rows], table
            )
            num_computed[row_ids[rows]] += num_tokens[rows]
            rows, tokens = rows[sampling][tokens != NO_TOKEN], tokens[tokens != NO_TOKEN]
            table.token_ids[row_ids[rows], ends[rows] + num_drafts[rows]] = tokens
            num_drafts[rows] += 1
            num_tokens[rows] = 1
            rows = rows[num_drafts[rows] < limits[rows]]
        # Drafts may be rejected, so their KV is computed again, together with the next token.
        num_computed[row_ids] = np.minimum(num_computed[row_ids], ends)
        places = zip(row_ids.tolist(), ends.tolist(), num_drafts.tolist(), strict=True)
        return [Draft(table.token_ids[row, end : end + n].copy()) for row, end, n in places]

    def _sample(
        self,
        row_ids: Int64Array,
        num_tokens: Int64Array,
        sampling: Int64Array,
        num_drafts: Int64Array,
        table: SequenceTable,
    ) -> Int64Array:
        """Compute the next tokens of some sequences, and sample a draft for some of them.

        row_ids, num_tokens: [n], rows and numbers of tokens to compute; sampling: [m], indices of
        the sequences that sample; num_drafts: [n], drafts that they have so far. Returns drafts,
        [m].
        """
        samples = np.zeros(len(row_ids), np.bool_)
        samples[sampling] = True
        rows = StepRows(
            row_ids=row_ids,
            num_tokens=num_tokens.astype(np.int32),
            firsts=table.drafter_state[row_ids, 0],
            sample=samples,
            brings_vector=np.zeros_like(samples),
            computes=np.ones(len(row_ids), np.bool_),
            are_decodes=bool((samples & (num_tokens == 1)).all()),
            forks=_NO_ROWS,
            parents=_NO_ROWS,
            sampling=sampling,
            errors={},
        )
        forward = self._forward.run(rows, table.for_drafts())
        assert forward is not None, "each row has a token to compute"
        if forward.logits is None:
            return _NO_ROWS
        batch = sampling_batch(row_ids[sampling], table, num_drafts=num_drafts[sampling])
        return sample(forward.logits, batch, table.sampling, forward.largest).tokens
