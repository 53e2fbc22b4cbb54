"""Drafts of an EAGLE-3 head (`models/eagle.py`), from hidden states of the model's own steps.

The head's keys and values of row t, which has token t + 1 as an input, are in the slot of position
t, in a cache with the blocks of the target's. Each block operation is done there, too, so the
target's block tables, prefix cache, swaps and copies serve both. A step of the target brings the
hidden states of its tokens and the token after them, so these rows are written at its end. The last
one is computed when drafts are asked for, as it predicts the first.

One row can be wrong, which may cost right drafts and never changes a token: the last one of a full
block that sequences share and continue in different ways. New choices share the block in which they
begin, too, until each writes to it; so their last rows are written again with the next step.
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
    """Drafts for all rows of a step together, one position after the other."""

    takes_time = True

    def __init__(self, head: EagleHead, cache: CacheEngine) -> None:
        """cache: of `head`, with as many blocks as the target's."""
        self._head = head
        self._cache = cache
        self._inputs = DecodeInputs()
        self._hidden = head.hidden_like
        """By row of the table: what stands for the last token that the target has computed."""
        self._num_computed = np.zeros(0, np.int64)
        """By row: the tokens up to that one; 0: there is none."""
        self._is_provisional = np.zeros(0, np.bool_)
        """By row: whether the head's row of that token is to be written again."""
        self._positions = np.zeros(0, np.int64)
        """By row: the next one that the head computes."""

    def begin(self, plan: StepPlan, table: SequenceTable) -> None:
        """Move what the target's cache moves."""
        self._cache.execute(plan)

    def forget(self, row_ids: Int64Array) -> None:
        """The next sequences with these rows have no hidden state yet."""
        row_ids = row_ids[row_ids < len(self._num_computed)]
        self._num_computed[row_ids], self._is_provisional[row_ids] = 0, False

    def forget_all(self) -> None:
        """The same with all rows."""
        self.forget(np.arange(len(self._num_computed)))

    def observe(self, rows: StepRows, forward: ForwardPass, table: SequenceTable) -> None:
        """Write the rows of the tokens that were computed, and keep the last hidden states."""
        self._make_room(table.num_rows)
        computed = np.flatnonzero(rows.computes)
        row_ids, starts = rows.row_ids[computed], forward.starts[computed]
        firsts, ends = forward.firsts[computed], table.num_computed_tokens[row_ids]
        hidden = torch.cat([self._head.fuse(forward.captured), self._hidden[row_ids]])
        num_fused = len(hidden) - len(row_ids)
        is_again = self._is_provisional[row_ids] & (self._num_computed[row_ids] == firsts)
        begins = firsts - is_again
        stops = np.minimum(ends, self._head.max_model_len)
        # Where the core chooses the next token, any will do until it has.
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
        """Sampled as if each draft had been output."""
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
        """The same sequences with the token after each position, and the head's progress."""
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
