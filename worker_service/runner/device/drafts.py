"""Drafts from a head, made on the device between steps that are launched ahead.

Before a step's forward pass, the head samples its drafts from the hidden state of each sequence's
last computed token, its latest token and its progress, all of which the device keeps; the step
names them by codes (`FIRST_DRAFT`). After the step is sampled, the head writes its keys and values
for all rows of the step, refused drafts included: they lie after the sequence's last computed
token, and are written again before they are read. The host reads nothing in between, so steps with
drafts are launched ahead as others are. The passes that make the drafts are replayed from CUDA
graphs (`draft_passes.py`), unless rows have penalties, which count earlier drafts.

The rules are those of `drafting/head_drafter.py`, with the same columns of the table; only the
upper bounds of positions that the host knows are compared with the length of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pagewire_kernels.batch import FIRST_DRAFT, LayerMemory, StepBatch, StepInputs
from worker_service.array_types import BoolArray, Int32Array, Int64Array
from worker_service.models.decoder.draft_head import DraftHead
from worker_service.pinned_memory import Column
from worker_service.runner.batch.inputs import HostInputs, lay_out
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.device.draft_passes import NUM_INPUTS, DraftGraphs, DraftPass
from worker_service.runner.device.rows import DeviceRows
from worker_service.runner.device.sampler import DeviceSampler
from worker_service.runner.drafting.drafter import Draft, Drafter
from worker_service.runner.drafting.head_drafter import LENGTH, PROVISIONAL
from worker_service.runner.state.sequence_table import SequenceTable


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposed:
    """The drafts that are made before a step; rows with more drafts come first."""

    counts: list[int]
    """[k]: rows that have a draft at each place, falling."""

    inputs: Int32Array
    """[k, NUM_INPUTS, n], see there; rows without a draft at a place are padding."""

    is_replayed: bool
    """Whether graphs make the drafts, to one of whose sizes the inputs are padded."""

    counted: list[Int64Array]
    """[k] of [2, m]: rows and codes of the drafts before that penalties count; empty if no row has
    penalties."""

    max_context_len: int
    """Of the first place."""

    @property
    def columns(self) -> list[Column]:
        """What is sent to the device."""
        if self.is_replayed:
            return [self.inputs]
        num_rows = self.counts[0]
        starts = np.arange(num_rows + 1, dtype=np.int32)
        no_masks = np.full(num_rows, -1, np.int32)
        return [self.inputs, starts, no_masks, *self.counted]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Observed:
    """The rows of a step whose keys and values the head writes after it."""

    inputs: HostInputs
    """Each token is the one after its position."""

    sources: Int64Array | None
    """[num_tokens]: rows of the step's forward pass; None: all."""

    sampled: Int64Array
    """[2, m]: places that were sampled at, and the tokens that their outcome is."""

    kept: Int64Array
    """[2, n]: rows of the table, and tokens whose hidden states they keep if no draft is
    accepted."""

    verified: Int64Array
    """[2, v]: of the rows with drafts, their places among those that sample, and in `kept`."""

    @property
    def columns(self) -> list[Column]:
        """What is sent to the device."""
        inputs = self.inputs
        int32 = (
            np.maximum(inputs.token_ids, 0),  # placeholders; what is sampled replaces them
            inputs.positions,
            inputs.token_row_ids,
            inputs.row_ids,
            inputs.context_lens,
            inputs.query_start,
        )
        further = [] if self.sources is None else [self.sources]
        of_rows = (self.sampled, self.kept, self.verified)
        return [*(column.astype(np.int32) for column in int32), *of_rows, *further]


class DeviceHeadDrafter(Drafter):
    """Drafts from a head, on the device."""

    is_expensive = True
    is_on_device = True

    def __init__(self, head: DraftHead, caches: Sequence[LayerMemory]) -> None:
        """caches: keys and values of the layer of `head`, in the target's blocks."""
        self.head = head
        self.caches = caches
        self.hidden = head.hidden_like
        """By row of the device: the fused hidden state of the last token that the target has
        computed."""

    def attach(
        self, rows: DeviceRows, sampler: DeviceSampler, graphs: DraftGraphs | None = None
    ) -> None:
        """Draft for the sequences of these rows, which are all new. graphs: None for none."""
        self.sampler, self.tables, self.graphs = sampler, rows.sampling, graphs
        self._padding_row = rows.padding_row
        num_rows, size = rows.padding_row + 1, self.hidden.shape[1]
        self.hidden = self.head.hidden_like.new_zeros(num_rows, size)

    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """Codes of the drafts that `plan` will have the device make."""
        ends = table.num_tokens[row_ids]
        room = self.head.max_model_len - ends - table.num_pending_drafts[row_ids]
        limits = np.minimum(np.minimum(counts, room), self.tables.drafts.shape[1])
        is_ready = (table.drafter_state[row_ids, LENGTH] == ends - 1) & (ends > 1)
        return [
            Draft(FIRST_DRAFT - np.arange(limit, dtype=np.int32))
            for limit in np.where(is_ready, limits, 0).tolist()
        ]

    def plan(self, rows: StepRows, table: SequenceTable) -> "StepDrafts":
        """What the head does before and after a step with these rows."""
        fits = self._fits(rows, table)
        proposed, observed = self._proposed(rows, table), self._observed(rows, fits, table)
        return StepDrafts(self, fits, proposed, observed)

    def _proposed(self, rows: StepRows, table: SequenceTable) -> _Proposed | None:
        computed = np.flatnonzero(rows.computes)
        row_ids, firsts = rows.row_ids[computed], rows.firsts[computed]
        counts = np.zeros(len(computed), np.int32)
        if rows.drafts is not None:
            counts = rows.drafts.counts[computed]
        # Forks shared the block of their last row; each writes it in its own block.
        state, pending = table.drafter_state[row_ids], table.num_pending_drafts[row_ids]
        is_again = (state[:, PROVISIONAL] == 1) & (state[:, LENGTH] == firsts) & (firsts > 0)
        is_again &= firsts + pending <= self.head.max_model_len
        counts = np.maximum(counts, is_again)
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        if len(order) == 0:
            return None
        row_ids, firsts, counts = row_ids[order], firsts[order], counts[order]
        places = np.arange(counts[0])[:, np.newaxis]
        num_rows = (counts > places).sum(axis=1).tolist()
        counted, size = _counted(row_ids, num_rows, table), None
        if self.graphs is not None and not counted:
            size = self.graphs.size_for(len(order))
        inputs = np.zeros((len(places), NUM_INPUTS, size or len(order)), np.int32)
        inputs[:, -1] = self._padding_row
        lengths = firsts + places
        outputs = table.num_tokens[row_ids] - table.num_prompt_tokens[row_ids] + places
        tokens = np.broadcast_to(FIRST_DRAFT + 1 - places, lengths.shape).copy()
        tokens[0] = table.token_ids[row_ids, firsts]
        ids = np.broadcast_to(row_ids, lengths.shape)
        columns = np.stack([tokens, lengths - 1, lengths, outputs, ids], axis=1)
        drafts = (counts > places)[:, np.newaxis]
        np.copyto(inputs[..., : len(order)], columns, casting="same_kind", where=drafts)
        return _Proposed(
            counts=num_rows,
            inputs=inputs,
            is_replayed=size is not None,
            counted=counted,
            max_context_len=int((firsts + pending[order]).max()),
        )

    def _observed(self, rows: StepRows, fits: BoolArray, table: SequenceTable) -> _Observed | None:
        observed = np.flatnonzero(fits)
        if len(observed) == 0:
            return None
        row_ids, num_tokens = rows.row_ids[observed], rows.num_tokens[observed]
        shifted = table.for_drafts(shift=1)
        inputs = lay_out(row_ids, rows.firsts[observed], num_tokens, shifted)
        num_all = np.where(rows.computes, rows.num_tokens, 0)
        token_fits = np.repeat(fits, num_all)
        token_at = np.cumsum(token_fits) - 1  # by token of the step, if its row is observed
        # A fork samples from its parent's last state, which the parent's own token follows.
        is_put = fits[rows.sampling]
        sampled = np.stack([np.flatnonzero(is_put), token_at[rows.last_states()[is_put]]])
        num_drafts = np.zeros_like(num_all) if rows.drafts is None else rows.drafts.counts
        last_at = token_at[np.maximum(rows.ends() - num_drafts - 1, 0)]
        forks = np.flatnonzero(fits[rows.parents])
        kept_at = np.concatenate([last_at[observed], last_at[rows.parents[forks]]])
        kept_ids = np.concatenate([row_ids, rows.row_ids[rows.forks[forks]]])
        verified = np.empty((2, 0), np.int64)
        if rows.drafts is not None:
            of_starts = rows.sampling[rows.drafts.offsets == 0]
            places = np.flatnonzero(num_drafts[of_starts])
            verified = np.stack([places, np.searchsorted(observed, of_starts[places])])
        return _Observed(
            inputs=inputs,
            sources=None if token_fits.all() else np.flatnonzero(token_fits),
            sampled=sampled,
            kept=np.stack([kept_ids, kept_at]),
            verified=verified,
        )

    def _fits(self, rows: StepRows, table: SequenceTable) -> BoolArray:
        """[num_rows]: rows that are computed, within the length of the head even if all drafts are
        accepted."""
        last = rows.firsts + rows.num_tokens + table.num_pending_drafts[rows.row_ids]
        return rows.computes & (last <= self.head.max_model_len)

    def record_accepted(
        self, row_ids: Int64Array, num_accepted: Int64Array, table: SequenceTable
    ) -> None:
        """Count accepted drafts, which the table counts as computed, too."""
        table.drafter_state[row_ids, LENGTH] += num_accepted


class StepDrafts:
    """The work of a head for one step. `begin` is called before the step's forward pass, `observe`
    after its rows are sampled."""

    def __init__(
        self,
        drafter: DeviceHeadDrafter,
        fits: BoolArray,
        proposed: _Proposed | None,
        observed: _Observed | None,
    ) -> None:
        """fits: [num_rows], the rows that are observed."""
        self._drafter = drafter
        self._fits = fits
        self._proposed = proposed
        self._observed = observed
        self._sent: list[Tensor] = []
        self._batch: StepBatch | None = None

    @property
    def columns(self) -> list[Column]:
        """What is sent to the device, with the step's inputs."""
        parts = (self._proposed, self._observed)
        return [column for part in parts if part is not None for column in part.columns]

    def begin(self, sent: list[Tensor]) -> None:
        """Make the step's drafts. sent: `columns` on the device."""
        if self._proposed is not None:
            num_columns = len(self._proposed.columns)
            self._propose(self._proposed, sent[:num_columns])
            sent = sent[num_columns:]
        if self._observed is not None:
            inputs = self._observed.inputs
            # Positions are those before the step's drafts are accepted.
            self._batch = self._drafter.sampler.prepare(
                StepInputs(*sent[:5]),
                self._drafter.caches,
                sent[5],
                inputs.max_context_len,
                num_groups=1,
                max_query_len=inputs.max_query_len,
                num_decodes=inputs.num_decodes,
            )
            self._sent = sent[6:]

    def _propose(self, proposed: _Proposed, sent: list[Tensor]) -> None:
        drafter, tables = self._drafter, self._drafter.tables
        if proposed.is_replayed:
            assert drafter.graphs is not None, "as when the inputs were padded"
            drafter.graphs.run(sent[0], drafter.hidden, proposed.counts)
            return
        inputs, starts, no_masks, *counted = sent
        draft_pass = DraftPass(drafter.head, drafter.caches, drafter.sampler)
        indices = inputs[0, -1].long()
        hidden = drafter.hidden.index_select(0, indices)
        for place, num_rows in enumerate(proposed.counts):
            drafts, hidden = draft_pass.run(
                inputs[place, :, :num_rows],
                hidden[:num_rows],
                starts[: num_rows + 1],
                no_masks[:num_rows],
                proposed.max_context_len + place,
                counted[place] if counted else None,
            )
            tables.drafts[:, place].index_copy_(0, indices[:num_rows], drafts)

    def observe(
        self, captured: Sequence[Tensor], outcome: Tensor, num_accepted: Tensor | None
    ) -> None:
        """Write the head's keys and values for the step's rows, and keep the last hidden state of
        each sequence.

        captured: see `Computed`; outcome: int64, of each place that was sampled at; num_accepted:
        int32, of each row that samples, None if none has drafts.
        """
        if self._observed is None:
            return
        assert self._batch is not None, "begun before"
        sampled, kept, verified, *sources = self._sent
        fused = self._drafter.head.fuse(captured)
        if sources:
            fused = fused.index_select(0, sources[0])
        at = kept[1]
        if num_accepted is not None and verified.numel():
            accepted = num_accepted.index_select(0, verified[0]).long()
            at = at.index_add(0, verified[1], accepted)
        self._drafter.hidden.index_copy_(0, kept[0], fused.index_select(0, at))
        if sampled.numel():
            tokens = outcome.index_select(0, sampled[0]).clamp_min_(0)
            self._batch.token_ids.index_copy_(0, sampled[1], tokens)
        self._drafter.head.write_kv(self._batch, fused)

    def advance(self, rows: StepRows, table: SequenceTable) -> None:
        """Record the hidden states that are kept of the step's rows, which the table has counted as
        computed."""
        fits = self._fits
        forks = rows.forks[fits[rows.parents]]
        for row_ids, is_provisional in ((rows.row_ids[fits], 0), (rows.row_ids[forks], 1)):
            table.drafter_state[row_ids, LENGTH] = table.num_computed_tokens[row_ids]
            table.drafter_state[row_ids, PROVISIONAL] = is_provisional


def _counted(row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Int64Array]:
    """`_Proposed.counted`."""
    edits = table.sampling.edits
    found = ((place, edits.get(row_id)) for place, row_id in enumerate(row_ids.tolist()))
    penalized = np.array(
        [place for place, edit in found if edit is not None and edit.occurrences is not None],
        np.int64,
    )
    if len(penalized) == 0:
        return []
    columns = []
    for place, num_rows in enumerate(counts):
        rows = penalized[penalized < num_rows]
        codes = FIRST_DRAFT - np.arange(place)
        columns.append(np.stack([np.repeat(rows, place), np.tile(codes, len(rows))]))
    return columns
