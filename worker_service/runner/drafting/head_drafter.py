"""Drafts from a head (`decoder/draft_head.py`), based on hidden states of the target's steps.

The head's KV for row t, whose inputs are the hidden state of token t and token t + 1, is in the
slot of position t, in the blocks of the target's group that keeps all tokens: the target's block
tables, prefix cache, swaps and copies are the head's, too.
A step of the target yields the hidden states of its tokens and the token after them,
so their rows are written when the step ends. The last row is computed when drafts are requested,
because it predicts the first draft.

The last row of a full block can be wrong if sequences share the block and continue it differently;
this makes drafts worse, but never changes a sampled token. New choices share their first block
until each of them writes to it, so their last rows are written again in the next step.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import LayerMemory
from worker_service.array_types import Int64Array
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.runner.batch.inputs import build_batch, lay_out
from worker_service.runner.batch.sampling import sampling_batch
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.drafting.drafter import Draft, Drafter
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.sampler import NO_TOKEN, sample

LENGTH, PROVISIONAL = range(2)
"""Columns of a sequence: number of tokens up to the last one whose hidden state is known, 0 if none
is; whether the head's row for that token must be written again."""


class HeadDrafter(Drafter):
    """Drafts from a head on a CPU, for all rows of a step together, one position after the
    other."""

    is_expensive = True

    def __init__(self, head: DraftHead, caches: Sequence[LayerMemory]) -> None:
        """caches: keys and values of the layer of `head`, in the target's blocks."""
        self._head = head
        self._caches = caches
        self._hidden = head.hidden_like
        """By row of the table: the hidden state of the last token that the target has
        computed."""

    def observe(self, rows: StepRows, captured: Sequence[Tensor], table: SequenceTable) -> None:
        """Write the head's KV for the tokens that the target computed in this step, and keep the
        last hidden state of each sequence."""
        if missing := table.num_rows - len(self._hidden):
            more = self._hidden.new_zeros(missing, self._hidden.shape[1])
            self._hidden = torch.cat([self._hidden, more])
        length, provisional = table.drafter_state[:, LENGTH], table.drafter_state[:, PROVISIONAL]
        computed = np.flatnonzero(rows.computes)
        row_ids, firsts = rows.row_ids[computed], rows.firsts[computed]
        starts = rows.ends()[computed] - rows.num_tokens[computed]
        ends = table.num_computed_tokens[row_ids]
        hidden = torch.cat([self._head.fuse(captured), self._hidden[row_ids]])
        num_fused = len(hidden) - len(row_ids)
        is_again = provisional[row_ids].astype(bool) & (length[row_ids] == firsts)
        begins = firsts - is_again
        stops = np.minimum(ends, self._head.max_model_len)
        # If the core has yet to choose the next token, any token can stand in for it.
        unknown = table.num_tokens[row_ids] == ends
        table.token_ids[row_ids[unknown], ends[unknown]] = 0
        counts = np.maximum(stops - begins, 0)
        written = np.flatnonzero(counts)
        if len(written):
            num_tokens, shifted = counts[written].astype(np.int32), table.for_drafts(shift=1)
            inputs = lay_out(row_ids[written], begins[written], num_tokens, shifted)
            index = np.repeat(written, counts[written])
            sources = np.where(
                inputs.positions < firsts[index],
                num_fused + index,
                starts[index] + inputs.positions - firsts[index],
            )
            batch = build_batch(inputs, shifted, self._caches)
            self._head.write_kv(batch, hidden[sources])
        self._hidden[row_ids] = hidden[starts + ends - firsts - 1]
        length[row_ids], provisional[row_ids] = ends, unknown
        forks, parents = rows.row_ids[rows.forks], rows.row_ids[rows.parents]
        self._hidden[forks] = self._hidden[parents]
        length[forks], provisional[forks] = length[parents], True

    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """Sample drafts as if each had been output."""
        ends = table.num_tokens[row_ids]
        limits = np.minimum(np.array(counts, np.int64), self._head.max_model_len - ends)
        num_drafts = np.zeros(len(row_ids), np.int64)
        has_token = table.drafter_state[row_ids, LENGTH] == ends - 1
        rows = np.flatnonzero((limits > 0) & has_token & (ends > 1))
        hidden = self._hidden[row_ids[rows]]
        shifted = table.for_drafts(shift=1)
        while len(rows):
            ids = row_ids[rows]
            firsts, ones = ends[rows] + num_drafts[rows] - 2, np.ones(len(rows), np.int32)
            batch = build_batch(lay_out(ids, firsts, ones, shifted), shifted, self._caches)
            output, hidden = self._head(batch, hidden)
            logits = self._head.compute_logits(output)
            sampling = sampling_batch(ids, table, num_drafts=num_drafts[rows])
            tokens = sample(logits, sampling, table.sampling).tokens
            has_token = tokens != NO_TOKEN
            rows, tokens = rows[has_token], tokens[has_token]
            table.token_ids[row_ids[rows], ends[rows] + num_drafts[rows]] = tokens
            num_drafts[rows] += 1
            continues = num_drafts[rows] < limits[rows]
            rows, hidden = rows[continues], hidden[np.flatnonzero(has_token)[continues]]
        places = zip(row_ids.tolist(), ends.tolist(), num_drafts.tolist(), strict=True)
        return [Draft(table.token_ids[row, end : end + n].copy()) for row, end, n in places]
