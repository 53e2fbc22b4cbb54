"""Steps on a GPU, which are launched without waiting for the device.

A launch sends the changes of the plan and the inputs of the step in one copy from pinned memory;
state that is on the device already is gathered by row (`rows.py`). Sampled tokens stay on the
device for the next step, and are copied to the host in the background (`in_flight_step.py`). A
batch replays a CUDA graph if one was captured for its size (`cuda_graphs.py`): of decodes, or of
decodes and chunks of prompts. Large prefills, prefills with a long context, prompts whose states
are saved or whose log probabilities are reported, and tokens with embeddings of adapters run
eagerly. Sampling is part of the graph, whatever the parameters; it is eager for rows with log
probabilities or candidates, which are copied to the host together with the tokens. Bitmasks of
constraints are sent in a separate copy, since they are computed while the forward pass runs.

Ranks that share the layers of a model launch the same steps, in the same form, because each of
their collectives takes part of a batch's shape. One of them samples; the others receive the tokens
on their devices, in the graph if the step is replayed, and their hosts learn them later as that of
a single GPU does. The host of the rank that samples chooses the drafts of a step, and sends them to
the other hosts when it launches the step (`drafting/rank_drafts.py`).

A head drafts on the device (`drafts.py`), and drafts are verified there, too: it stores the last
token of each sequence, and how many drafts were accepted, from which the positions of the next step
follow (`SamplingTables.num_ahead`). Each rank accepts the same drafts from the same tokens.

A launch waits until the host knows tokens only in these cases:

| a plan with | waits for |
| --- | --- |
| a fork | the tokens of its parent, which it inherits |
| bad words of several tokens | the tokens of the sequences that have them |
| constraints | the tokens of the sequences that have them, but only after its own forward pass is
  launched, which the device computes at the same time |
| sequences that are due for drafts, but of a head | the tokens of these sequences |
| drafts that another rank chooses | its message |
| more sequences, edits or penalties than `rows.py` has room for | every step launched
  before; the step itself is computed on the host, which waits for the device |
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from pagewire_kernels.batch import mask_width
from worker_service.array_types import Int64Array
from worker_service.engine.executor import Step
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.plan import StepPlan
from worker_service.runner.batch.pooling import PooledRows, Pooling
from worker_service.runner.batch.step_outcome import StepStart
from worker_service.runner.batch.step_rows import StepRows, resolve_rows
from worker_service.runner.device.buffers import StepBuffers
from worker_service.runner.device.columns import PlacesAdapters, StepColumns
from worker_service.runner.device.drafts import DeviceHeadDrafter
from worker_service.runner.device.eager import compute_eagerly
from worker_service.runner.device.in_flight_step import (
    BufferPool,
    CudaEvent,
    DeviceEvent,
    InFlightStep,
    LastFinishTime,
)
from worker_service.runner.device.reports import DevicePass, Sampled, StepReports, sample
from worker_service.runner.device.state import DeviceState
from worker_service.runner.drafting.speculation import Speculation
from worker_service.runner.state.sequence_state import (
    FORGOTTEN,
    NO_PLACEHOLDER,
    Resolved,
    SequenceState,
)
from worker_service.runner.state.sequence_table import PlanRows, SequenceTable


class DeviceSteps:
    """Launches steps on one KV cache before the results of earlier ones are known."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        state: DeviceState,
        make_event: Callable[[], DeviceEvent] = CudaEvent,
        check: Callable[[], None] | None = None,
        pooling: Pooling | None = None,
        adapters: PlacesAdapters | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """make_event: records an event on the current stream; check: raises GroupBroken if the
        ranks that share the model were interrupted, None for one rank; pooling: None generates
        tokens; adapters: those that sequences may have, None: none; speculation: None adds no
        drafts."""
        self._model = model
        self._adapters = adapters
        self._caches = cache.caches
        self._state = state
        self._buffers = BufferPool(cache.device_cache.device)
        self._make_event = make_event
        self._check = check
        self._pooling = pooling
        self._speculation = speculation
        self._shares_drafts = state.sampler.is_shared and state.shape.max_drafts > 0
        self._head: DeviceHeadDrafter | None = None
        if speculation is not None and isinstance(speculation.drafter, DeviceHeadDrafter):
            self._head = speculation.drafter
            self._head.attach(state.rows, state.sampler, state.draft_graphs)
        self._last_finish = LastFinishTime()
        state.rows.forget()

    def forget_all(self) -> None:
        """Forget all sequences; steps in flight may still be collected."""
        self._state.rows.forget()

    def finish(self) -> None:
        """Wait until the device has done what was launched, or was interrupted, and destroy the
        graphs, before the ranks that share the model part."""
        self._buffers.wait()
        self._state.graphs = None

    def record_tokens(self, row_ids: Int64Array) -> None:
        """Record that the host has sampled for these sequences."""
        self._state.rows.record_tokens(row_ids)

    def launch(
        self, plan: StepPlan, plan_rows: PlanRows, sequences: SequenceState, start: StepStart
    ) -> Step | None:
        """Launch a step; None if the host has to compute it. Waits for the device only if edits,
        bitmasks or drafts need pending tokens. Raises InvalidPlan."""
        table, state = sequences.table, self._state
        rows = self._hold(plan, plan_rows, sequences)
        if rows is None:
            return None
        if self._speculation is not None and plan.lookahead.any():
            rows = self._speculation.add(rows, plan, sequences)
        # Drafts of earlier steps may have been accepted since.
        rows = replace(rows, firsts=table.num_computed_tokens[rows.row_ids])
        columns = StepColumns.of(
            rows,
            sequences,
            state.rows,
            self._head,
            self._adapters,
            shares_drafts=self._shares_drafts,
        )
        buffers, begin = self._buffers.pop(sequences.pending), self._make_event()
        queued = None
        if state.graphs is not None and self._pooling is None:  # graphs keep no hidden states
            queued = state.graphs.run(columns, buffers.staging)
        if queued is None:
            queued = compute_eagerly(columns, self._model, self._caches, state, buffers.staging)
        computed = self._make_event()
        if (columns.sampling.mask_rows >= 0).any():
            queued = self._constrain(queued, rows, columns, sequences, buffers)
        sampled = self._sample(queued, rows, columns, table, buffers)
        step = InFlightStep(
            plan=plan,
            rows=np.concatenate([rows.sampling, columns.reports.reporting]),
            errors=rows.errors,
            numbers=sampled.numbers,
            offsets=None if rows.drafts is None else rows.drafts.offsets,
            reports=sampled.reports,
            buffers=buffers,
            begin=begin,
            computed=computed,
            end=self._make_event(),
            start=start,
            last_finish=self._last_finish,
            samples=state.sampler.samples,
            check=self._check,
        )
        table.advance(
            rows.row_ids, rows.num_computed, rows.row_ids[rows.parents], rows.row_ids[rows.forks]
        )
        if columns.drafting is not None:
            columns.drafting.observe(queued.captured, sampled.outcome, sampled.num_accepted)
            columns.drafting.advance(rows, table)
        positions = table.expect_tokens(rows.expecting)
        self._add_pending(step, rows, positions, columns.reports, sequences)
        self._buffers.add(step)
        return step

    def _hold(
        self, plan: StepPlan, plan_rows: PlanRows, sequences: SequenceState
    ) -> StepRows | None:
        """The rows of a plan, whose changes are recorded for the device; None if the device has no
        room for them, or nothing to compute."""
        table, device_rows = sequences.table, self._state.rows
        rows = resolve_rows(plan, plan_rows.batch, table)
        if table.sampling.edits:
            device_rows.record_edits(_resolve_edits(rows.row_ids[rows.sampling], sequences))
        device_rows.record(plan, plan_rows)
        fits = rows.computes.any() and device_rows.hold(rows.row_ids, table.sampling)
        return rows if fits else None

    def _constrain(
        self,
        queued: DevicePass,
        rows: StepRows,
        columns: StepColumns,
        sequences: SequenceState,
        buffers: StepBuffers,
    ) -> DevicePass:
        """Send the bitmask of the constrained rows, if this rank samples. All ranks wait for the
        rows' pending tokens, while the device computes the forward pass launched last."""
        row_ids, state = rows.row_ids[rows.sampling], self._state
        constrained = np.flatnonzero(columns.sampling.mask_rows >= 0)
        sequences.pending.resolve(row_ids[constrained])
        if not state.sampler.samples:
            return queued
        bitmask = np.zeros((len(constrained), mask_width(sequences.table.vocab_size)), np.int32)
        offsets = None if rows.drafts is None else rows.drafts.offsets
        if sequences.masks and (found := sequences.constrained_rows(row_ids, offsets)):
            masked = sequences.masks.compute(found)
            places = np.searchsorted(constrained, masked.rows)
            bitmask[places, :-1] = masked.bitmask
            bitmask[places, -1] = masked.failed
        target = state.graphs.bitmask if state.graphs and queued.sample else None
        sent = buffers.send_bitmask(bitmask, target)
        return queued._replace(rows=queued.rows._replace(bitmask=sent))

    def _sample(
        self,
        queued: DevicePass,
        rows: StepRows,
        columns: StepColumns,
        table: SequenceTable,
        buffers: StepBuffers,
    ) -> Sampled:
        """Queue sampling, by the graph of the pass if its rows report nothing."""
        sampler, reports = self._state.sampler, columns.reports
        if queued.sample is None or queued.outcome is None or not reports.is_empty:
            pooled: Sequence[PooledRows] = ()
            if self._pooling is not None and queued.hidden is not None and sampler.samples:
                pooled = self._pooling.pool(rows, queued.hidden, table)
            return sample(queued, reports, sampler, self._model, buffers, pooled)
        if len(columns.states):
            queued.sample()
        return Sampled(queued.outcome, buffers.fetch([queued.outcome])[0])

    def _add_pending(
        self,
        step: InFlightStep,
        rows: StepRows,
        positions: Int64Array,
        reports: StepReports,
        sequences: SequenceState,
    ) -> None:
        """Add the step's tokens, of which the table expects one at each position, and failures."""
        row_ids, resolved = rows.expecting, None
        if rows.drafts is not None:
            sequences.table.num_pending_drafts[rows.row_ids] += rows.drafts.counts
        if num_reporting := len(reports.reporting):
            row_ids = np.concatenate([row_ids, reports.reporting_ids])
            positions = np.append(positions, np.full(num_reporting, NO_PLACEHOLDER))
        if self._speculation is not None:
            resolved = self._resolved(step, rows, sequences, self._speculation)
        sequences.pending.add(step, row_ids, positions, resolved)

    def _resolved(
        self,
        step: InFlightStep,
        rows: StepRows,
        sequences: SequenceState,
        speculation: Speculation,
    ) -> Resolved:
        """What follows once a step's tokens are in the table."""
        were_decodes = bool((rows.sample & (rows.num_computed == 1)).all())

        def resolved(row_ids: Int64Array, num_accepted: Int64Array) -> None:
            if were_decodes:
                speculation.record_step(rows, step.end.us_since(step.begin))
            if rows.drafts is None:
                return
            num_drafts = np.zeros_like(row_ids)
            counts = rows.drafts.counts[rows.sampling[rows.drafts.offsets == 0]]
            num_drafts[: len(counts)] = counts
            verified = (num_drafts > 0) & (row_ids != FORGOTTEN)
            columns = row_ids[verified], num_drafts[verified], num_accepted[verified]
            sequences.table.num_pending_drafts[columns[0]] -= columns[1]
            self._state.rows.record_accepted(columns[0], columns[2])
            speculation.record_drafts(*columns)
            if self._head is not None:
                self._head.record_accepted(columns[0], columns[2], sequences.table)

        return resolved


def _resolve_edits(row_ids: Int64Array, sequences: SequenceState) -> Int64Array:
    """The sequences whose edits depend on their last tokens, once the host knows these."""
    edits = sequences.table.sampling.edits
    found = ((row_id, edits.get(row_id)) for row_id in row_ids.tolist())
    reading = np.array([row for row, edit in found if edit and edit.reads_last_tokens], np.int64)
    sequences.pending.resolve(reading)
    return reading
