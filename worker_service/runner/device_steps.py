"""Steps of a GPU, which are launched without waiting for the device.

A launch sends what the plan changed, and the step's inputs, in one copy from pinned memory; what
the device already has is gathered by row (`device_rows.py`). Sampled tokens stay on the device,
where the next step finds them, and are copied to the host in the background (`in_flight_step.py`).
A batch of decodes replays a CUDA graph (`cuda_graphs.py`); prefills and mixed batches run eagerly.

A launch waits for the host to know tokens only in these cases:

| a plan with | waits for |
| --- | --- |
| a fork | the tokens of its parent, which it inherits |
| bad words of several tokens | the tokens of the sequences that have them |
| more penalties than the device counts for (`device_sampler.py`) | the same |
| constraints | the tokens of the sequences that have them, but only after its own forward pass is
  launched, which the device computes at the same time |
| candidates, chosen tokens, prompt log probabilities | every step launched before; the step itself
  is computed on the host (`model_runner.py`), which waits for the device |
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from torch import Tensor

from pagewire_kernels.batch import AttentionMetadata
from worker_service.array_types import Int32Array, Int64Array
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.pinned_memory import Column, upload
from worker_service.plan import StepPlan
from worker_service.runner.batch import HostInputs, StepRows, lay_out, sampling_batch
from worker_service.runner.device_sampler import SamplingRows
from worker_service.runner.device_state import DeviceState, RowChanges
from worker_service.runner.in_flight_step import (
    CudaEvent,
    DeviceEvent,
    FetchedLogprobs,
    InFlightStep,
    LastFinishTime,
    StepBuffers,
)
from worker_service.runner.pending_tokens import PendingTokens
from worker_service.runner.sequence_state import SequenceState
from worker_service.runner.sequence_table import UNKNOWN_TOKEN, SequenceTable
from worker_service.runner.step_outcome import StepStart
from worker_service.sampling.sampler import SamplingBatch
from worker_service.sampling.sampling_table import NO_LOGPROBS
from worker_service.structured.masks import MaskedRows


class StepLaunch:
    """One step's work: first `forward` or `replay`, then `sample`; none waits for the device."""

    def __init__(
        self, model: Model, kv_cache: Tensor, state: DeviceState, buffers: StepBuffers
    ) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._state = state
        self._device_rows = state.rows
        self._sampler = state.sampler
        self._graphs = state.graphs
        self._buffers = buffers
        self._replayed_size = 0
        self._rows: SamplingRows | None = None
        self._logits: Callable[[], Tensor] | None = None

    def recorded_size(self, num_rows: int, changes: RowChanges) -> int | None:
        """The padded size at which a decode step of `num_rows` rows can be replayed, if any."""
        if self._graphs is None or not self._graphs.have_room_for(changes.columns):
            return None
        return self._graphs.size_for(num_rows)

    def forward(
        self,
        inputs: HostInputs,
        last_states: Int64Array,
        batch: SamplingBatch,
        changes: RowChanges,
    ) -> None:
        """Compute any batch eagerly. last_states: the hidden states from which its rows sample."""
        unknown = np.flatnonzero(inputs.token_ids == UNKNOWN_TOKEN)
        sequences = np.searchsorted(inputs.query_start, unknown, side="right") - 1
        columns: list[Column] = [
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.query_start.astype(np.int32),
            inputs.context_lens.astype(np.int32),
            inputs.row_ids,
            unknown,
            inputs.row_ids[sequences],
            last_states,
            batch.row_ids,
            batch.positions.astype(np.int32),
        ]
        sent = self._buffers.staging.send([*columns, *changes.columns])
        self._state.apply(changes, sent[len(columns) :])
        token_ids, positions, slot_mapping, query_start, context_lens, row_ids = sent[:6]
        unknown_at, unknown_row_ids, last, sampling_row_ids, row_positions = sent[6 : len(columns)]
        self._device_rows.fill_in(token_ids, unknown_at, unknown_row_ids)
        block_tables = self._device_rows.block_tables[:, : inputs.max_blocks]
        metadata = AttentionMetadata(
            query_start=query_start,
            context_lens=context_lens,
            block_tables=block_tables.index_select(0, row_ids),
            slot_mapping=slot_mapping,
            max_query_len=inputs.max_query_len,
            max_context_len=inputs.max_context_len,
        )
        hidden = self._model.forward(token_ids, positions, self._kv_cache, metadata)
        self._rows = SamplingRows(row_ids=sampling_row_ids, positions=row_positions)
        # Do not capture `self`: a reference cycle would hold GPU memory until the next collection.
        model = self._model
        self._logits = lambda: model.compute_logits(hidden.index_select(0, last))

    def replay(
        self, inputs: HostInputs, batch: SamplingBatch, changes: RowChanges, size: int
    ) -> None:
        """Compute a batch of decodes that all sample, with the graph of a padded size."""
        graphs, num_rows = self._graphs, len(batch.row_ids)
        assert graphs is not None, "recorded_size gave a size"
        columns = graphs.columns(inputs, batch.positions, size)
        sent = self._buffers.staging.send([columns, *changes.columns], graphs.static_inputs)
        self._state.apply(changes, sent[1:])
        graphs.replay_forward(size)
        self._replayed_size = size
        self._logits = lambda: graphs.logits(num_rows)

    def sample(
        self, batch: SamplingBatch, wanted: Int64Array, num_top: Int32Array
    ) -> tuple[Int64Array, FetchedLogprobs | None]:
        """Sample. Returns host memory that will hold a token or failure per row, and log
        probabilities, once the device is done.

        wanted: the rows that ask for log probabilities, with `num_top` of the most probable tokens.
        """
        num_rows = len(batch.row_ids)
        if num_rows == 0:
            return np.empty(0, np.int64), None
        if self._replayed_size:
            assert self._graphs is not None, "replayed before"
            if not batch.is_changed and not len(wanted):
                self._graphs.replay_sampling(self._replayed_size)
                return self._buffers.fetch(self._graphs.outcome[:num_rows]), None
            self._rows = self._graphs.rows(self._replayed_size, num_rows)
        return self._sample_eagerly(batch, wanted, num_top)

    def _sample_eagerly(
        self, batch: SamplingBatch, wanted: Int64Array, num_top: Int32Array
    ) -> tuple[Int64Array, FetchedLogprobs | None]:
        assert self._rows is not None, "computed before"
        assert self._logits is not None, "computed before"
        logits = self._logits()
        index = upload(wanted, logits.device) if len(wanted) else None
        # Log probabilities are those of the unedited logits, which are edited in place below.
        raw = None if index is None else logits.index_select(0, index)
        if batch.is_changed:
            outcome = self._sampler.sample_changed(logits, self._rows, batch)
        else:
            outcome = self._sampler.sample(logits, self._rows)
        numbers = self._buffers.fetch(outcome)
        if index is None or raw is None:
            return numbers, None
        chosen = outcome.index_select(0, index)
        tensors = self._sampler.logprobs(raw, chosen, int(num_top.max()))
        return numbers, FetchedLogprobs.fetch(wanted, num_top, tensors)


class DeviceSteps:
    """Launches steps over one cache before the results of earlier ones are known."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        state: DeviceState,
        make_event: Callable[[], DeviceEvent] = CudaEvent,
    ) -> None:
        """make_event: records an event in the device's queue of work."""
        self._model = model
        self._cache = cache
        self._state = state
        self._device = cache.device_cache.device
        self._make_event = make_event
        self._last_finish = LastFinishTime()
        self._steps: deque[InFlightStep] = deque()
        """Those whose buffers may still be written to or read."""
        self._spare: list[StepBuffers] = []
        state.forget()

    def forget_all(self) -> None:
        """Forget all sequences; steps in flight may still be collected."""
        self._state.forget()

    def forget(self, row_ids: Int64Array) -> None:
        """Forget the sequences in these rows."""
        for row_id in row_ids.tolist():
            self._state.penalties.release(row_id)

    def admit(self, plan: StepPlan, sequences: SequenceState) -> None:
        """Note what a plan has changed in the table, to be sent with the next step."""
        table = sequences.table
        if table.num_rows > self._state.rows.padding_row:
            sequences.pending.resolve_all()
            self._state.grow(table)
            return
        for new in plan.new_sequences:
            self._state.note_new(table.row_id(new.seq_id), table)
        if len(plan.block_updates):
            changed = table.row_ids(plan.block_updates[:, 0], "block_updates")
            self._state.rows.note_blocks(changed, plan.block_updates[:, 1])

    def note_sampled(self, row_ids: Int64Array, table: SequenceTable) -> None:
        """The host has sampled for these sequences."""
        for row_id in row_ids.tolist():
            self._state.penalties.note(row_id, table.sampling)

    def can_launch(self, plan: StepPlan, rows: StepRows, table: SequenceTable) -> bool:
        """Whether a step can be launched ahead; if not, the host computes it."""
        row_ids = rows.row_ids[rows.computes]
        if len(row_ids) == 0 or len(plan.appended_tokens):
            return False
        if (table.sampling.num_candidates[rows.row_ids] > 0).any():
            return False
        if not (asking := table.prompt_logprobs):
            return True
        in_prompt = table.num_computed_tokens[row_ids] < table.num_prompt_tokens[row_ids]
        return not any(row_id in asking for row_id in row_ids[in_prompt].tolist())

    def launch(
        self, plan: StepPlan, rows: StepRows, sequences: SequenceState, start: StepStart
    ) -> InFlightStep:
        """Queue a step's work. Waits for the device only for tokens that edits and masks need."""
        table, pending = sequences.table, sequences.pending
        row_ids = rows.row_ids[rows.sampling]
        pending.resolve(self._row_ids_to_read(row_ids, table))
        batch = sampling_batch(row_ids, table)
        buffers = self._buffers(pending)
        begin = self._make_event()
        launch = StepLaunch(self._model, self._cache.device_cache, self._state, buffers)
        inputs = lay_out(rows.row_ids[rows.computes], rows.num_tokens[rows.computes], table)
        changes = self._state.changes(table)
        size = None
        all_sample = len(row_ids) == len(inputs.row_ids) and not len(rows.forks)
        if inputs.max_query_len == 1 and all_sample:
            size = launch.recorded_size(len(row_ids), changes)
        if size is None:
            launch.forward(inputs, rows.last_states(rows.ends()), batch, changes)
        else:
            launch.replay(inputs, batch, changes, size)
        computed = self._make_event()
        batch = replace(batch, masked=_masks_of(row_ids, sequences))
        num_top = table.sampling.num_logprobs[row_ids]
        wanted = np.flatnonzero(num_top != NO_LOGPROBS)
        numbers, logprobs = launch.sample(batch, wanted, num_top[wanted])
        rows.advance(table)
        step = InFlightStep(
            plan=plan,
            rows=rows.sampling,
            errors=rows.errors,
            numbers=numbers,
            logprobs=logprobs,
            buffers=buffers,
            begin=begin,
            computed=computed,
            end=self._make_event(),
            start=start,
            cache_device_us=self._cache.timer(),
            last_finish=self._last_finish,
        )
        pending.add(step, row_ids, table.expect_tokens(row_ids))
        self._steps.append(step)
        return step

    def _buffers(self, pending: PendingTokens) -> StepBuffers:
        """Memory for one more in-flight step."""
        steps = self._steps
        while steps and steps[0].is_collected and not pending.contains(steps[0]):
            self._spare.append(steps.popleft().buffers)
        return self._spare.pop() if self._spare else StepBuffers(self._device)

    def _row_ids_to_read(self, row_ids: Int64Array, table: SequenceTable) -> Int64Array:
        """The sequences whose tokens the host must know before it edits their logits."""
        edits, counted = table.sampling.edits, self._state.penalties
        reading = [
            row_id
            for row_id in (row_ids.tolist() if edits else ())
            if (found := edits.get(row_id)) is not None
            and (
                found.reads_last_tokens or (found.occurrences is not None and row_id not in counted)
            )
        ]
        return np.array(reading, np.int64)


def _masks_of(row_ids: Int64Array, sequences: SequenceState) -> MaskedRows | None:
    """Masks of constraints. Waits for the pending tokens of constrained rows, while the device
    computes the forward pass launched last."""
    if sequences.masks is None:
        return None
    constrained = [row_id for _, row_id in sequences.masks.constrained(row_ids)]
    sequences.pending.resolve(np.array(constrained, np.int64))
    rows = sequences.constrained_rows(row_ids)
    return sequences.masks.compute(rows) if rows else None
