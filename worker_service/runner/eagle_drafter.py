"""Drafts from an EAGLE-3 head (`models/eagle.py`), based on hidden states of the target's steps.

The head's KV for row t, whose inputs are the hidden state of token t and token t + 1, is in the
slot of position t of a cache with the same number and size of blocks as the target's. All cache
operations are repeated there, so that the target's block tables, prefix cache, swaps and copies are
valid for it. A step of the target yields the hidden states of its tokens and the token after them,
so their rows are written when the step ends. The last row is computed when drafts are requested,
because it predicts the first draft.

The last row of a full block can be wrong if sequences share the block and continue it differently;
this makes drafts worse, but never changes a sampled token. New choices share their first block
until each of them writes to it, so their last rows are written again in the next step.
"""

from copy import copy

import numpy as np
import torch

from worker_service.array_types import Int64Array
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.eagle import EagleHead
from worker_service.plan import StepPlan
from worker_service.runner.batch import (
    DecodeInputs,
    Drafts,
    StepRows,
    build_inputs,
    lay_out,
    sampling_batch,
)
from worker_service.runner.drafter import Draft, Drafter
from worker_service.runner.forward import ForwardPass
from worker_service.runner.sequence_table import SequenceTable
from worker_service.sampling.sampler import NO_TOKEN, sample


class EagleDrafter(Drafter):
    """Drafts from an EAGLE-3 head, for all rows of a step together, one position after the
    other."""

    takes_time = True

    def __init__(self, head: EagleHead, cache: CacheEngine) -> None:
        """cache: KV cache of `head`, with the same number of blocks as the target's."""
        self._head = head
        self._cache = cache
        self._inputs = DecodeInputs()
        self._hidden = head.hidden_like
        """By row of the table: the fused hidden state of the last token that the target has
        computed."""
        self._num_computed = np.zeros(0, np.int64)
        """By row: number of tokens up to that token; 0 if there is none."""
        self._is_provisional = np.zeros(0, np.bool_)
        """By row: whether the head's row for that token must be written again."""
        self._positions = np.zeros(0, np.int64)
        """By row: the next position that the head computes."""

    def begin(self, plan: StepPlan, table: SequenceTable) -> None:
        """Repeat the plan's cache operations in the head's cache."""
        self._cache.execute(plan)

    def forget(self, row_ids: Int64Array) -> None:
        """Note that the next sequences in these rows have no hidden state yet."""
        row_ids = row_ids[row_ids < len(self._num_computed)]
        self._num_computed[row_ids], self._is_provisional[row_ids] = 0, False

    def forget_all(self) -> None:
        """As `forget`, for all rows."""
        self.forget(np.arange(len(self._num_computed)))

    def observe(self, rows: StepRows, forward: ForwardPass, table: SequenceTable) -> None:
        """Write the head's KV for the tokens that the target computed in this step, and keep the
        last hidden state of each sequence."""
        self._make_room(table.num_rows)
        computed = np.flatnonzero(rows.computes)
        row_ids, starts = rows.row_ids[computed], forward.starts[computed]
        firsts, ends = forward.firsts[computed], table.num_computed_tokens[row_ids]
        hidden = torch.cat([self._head.fuse(forward.captured), self._hidden[row_ids]])
        num_fused = len(hidden) - len(row_ids)
        is_again = self._is_provisional[row_ids] & (self._num_computed[row_ids] == firsts)
        begins = firsts - is_again
        stops = np.minimum(ends, self._head.max_model_len)
        # If the core has yet to choose the next token, any token can stand in for it.
        unknown = table.num_tokens[row_ids] == ends
        table.token_ids[row_ids[unknown], ends[unknown]] = 0
        counts = np.maximum(stops - begins, 0)
        written = np.flatnonzero(counts)
        if len(written):
            self._positions[row_ids] = begins
            inputs = lay_out(
                row_ids[written], counts[written].astype(np.int32), self._shifted(table)
            )
            index = np.repeat(written, counts[written])
            sources = np.where(
                inputs.positions < firsts[index],
                num_fused + index,
                starts[index] + inputs.positions - firsts[index],
            )
            batch = build_inputs(inputs, table, hidden.device)
            self._head.write_kv(
                batch.token_ids,
                hidden[sources],
                batch.positions,
                self._cache.device_cache,
                batch.metadata.slot_mapping,
            )
        self._hidden[row_ids] = hidden[starts + ends - firsts - 1]
        self._num_computed[row_ids] = ends
        self._is_provisional[row_ids] = unknown
        forks, parents = rows.row_ids[rows.forks], rows.row_ids[rows.parents]
        self._hidden[forks] = self._hidden[parents]
        self._num_computed[forks] = self._num_computed[parents]
        self._is_provisional[forks] = True

    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """Sample drafts as if each had been output."""
        self._make_room(table.num_rows)
        ends = table.num_tokens[row_ids]
        most = np.minimum(np.array(counts, np.int64), self._head.max_model_len - ends)
        num_drafts = np.zeros(len(row_ids), np.int64)
        rows = np.flatnonzero((most > 0) & (self._num_computed[row_ids] == ends - 1) & (ends > 1))
        hidden = self._hidden[row_ids[rows]]
        shifted = self._shifted(table)
        while len(rows):
            ids = row_ids[rows]
            self._positions[ids] = ends[rows] + num_drafts[rows] - 2
            batch = self._inputs.build(ids, shifted)
            output, hidden = self._head(
                batch.token_ids, hidden, batch.positions, self._cache.device_cache, batch.metadata
            )
            drafts = Drafts(num_drafts[rows].astype(np.int32), num_drafts[rows])
            logits = self._head.compute_logits(output)
            tokens = sample(logits, sampling_batch(ids, table, None, drafts), table.sampling).tokens
            is_known = tokens != NO_TOKEN
            rows, tokens = rows[is_known], tokens[is_known]
            table.token_ids[row_ids[rows], ends[rows] + num_drafts[rows]] = tokens
            num_drafts[rows] += 1
            goes_on = num_drafts[rows] < most[rows]
            rows, hidden = rows[goes_on], hidden[np.flatnonzero(is_known)[goes_on]]
        places = zip(row_ids.tolist(), ends.tolist(), num_drafts.tolist(), strict=True)
        return [Draft(table.token_ids[row, end : end + n].copy()) for row, end, n in places]

    def _shifted(self, table: SequenceTable) -> SequenceTable:
        """The table with each position's next token as its token, and the head's progress."""
        shifted = copy(table)
        shifted.token_ids = table.token_ids[:, 1:]
        shifted.num_computed_tokens = self._positions
        return shifted

    def _make_room(self, num_rows: int) -> None:
        missing = num_rows - len(self._positions)
        if missing:
            more = np.zeros(missing, np.int64)
            self._positions = np.append(self._positions, more)
            self._num_computed = np.append(self._num_computed, more)
            self._is_provisional = np.append(self._is_provisional, more > 0)
            like = self._hidden
            self._hidden = torch.cat([like, like.new_zeros(missing, like.shape[1])])
