"""Steps on a GPU, which are launched without waiting for the device.

A launch sends the changes of the plan and the inputs of the step in one copy from pinned memory;
state that is on the device already is gathered by row (`rows.py`). Sampled tokens stay on
the device for the next step, and are copied to the host in the background (`in_flight_step.py`). A
batch replays a CUDA graph if one was captured for its size (`cuda_graphs.py`): of decodes, or of
decodes and chunks of prompts. Large prefills, prefills with a long context, and prompts whose log
probabilities are reported run eagerly. Sampling is part of the graph, whatever the parameters; it
is eager for rows with log probabilities or candidates, which are copied to the host together with
the tokens. Bitmasks of constraints are sent in a separate copy, since they are computed while the
forward pass runs.

Ranks that share the layers of a model launch the same steps, in the same form, because each of
their collectives takes part of a batch's shape. One of them samples; the others receive the tokens
on their devices, in the graph if the step is replayed, and their hosts learn them later as that of
a single GPU does.

A launch waits until the host knows tokens only in these cases:

| a plan with | waits for |
| --- | --- |
| a fork | the tokens of its parent, which it inherits |
| bad words of several tokens | the tokens of the sequences that have them |
| constraints | the tokens of the sequences that have them, but only after its own forward pass is
  launched, which the device computes at the same time |
| more sequences, edits or penalties than `rows.py` has room for | every step launched
  before; the step itself is computed on the host, which waits for the device |
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import (
    LayerCaches,
    SamplingRows,
    StepInputs,
    mask_width,
)
from worker_service.array_types import Int32Array, Int64Array
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.pinned_memory import Column
from worker_service.plan import StepPlan
from worker_service.runner.batch.step_outcome import StepStart
from worker_service.runner.batch.step_rows import (
    HostInputs,
    PromptSpan,
    StepRows,
    lay_out,
    prompt_spans,
)
from worker_service.runner.device.cuda_graphs import StepGraphs
from worker_service.runner.device.in_flight_step import (
    CudaEvent,
    DeviceEvent,
    FetchedCandidates,
    FetchedLogprobs,
    FetchedPrompt,
    InFlightStep,
    LastFinishTime,
    StepBuffers,
)
from worker_service.runner.device.sampler import LogprobTensors
from worker_service.runner.device.state import DeviceState
from worker_service.runner.state.sequence_state import NO_PLACEHOLDER, PendingTokens, SequenceState
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.logprobs import prompt_logits
from worker_service.sampling.sampler import NO_LOGPROBS


class HostSampling(NamedTuple):
    """The rows that sample in a step, on the host."""

    row_ids: Int64Array
    """[n]."""

    positions: Int64Array
    """[n]: number of output tokens that the sequence of each row has so far."""

    mask_rows: Int64Array
    """[n]: as in `SamplingRows`."""

    with_logprobs: Int64Array
    """[m]: indices of the rows that request log probabilities."""

    num_top: Int32Array
    """[m]: number of most probable tokens that each of these rows requests."""

    with_candidates: Int64Array
    """[k]: indices of the rows whose tokens the core chooses."""

    num_candidates: Int32Array
    """[k]: number of candidates of each of these rows."""

    @classmethod
    def of(
        cls, row_ids: Int64Array, constrained: Int64Array, table: SequenceTable
    ) -> "HostSampling":
        """Describe these rows. constrained: indices of the rows with a constraint."""
        mask_rows = np.full(len(row_ids), -1)
        mask_rows[constrained] = np.arange(len(constrained))
        num_top = table.sampling.num_logprobs[row_ids]
        num_candidates = table.sampling.num_candidates[row_ids]
        with_logprobs = np.flatnonzero(num_top != NO_LOGPROBS)
        with_candidates = np.flatnonzero(num_candidates)
        return cls(
            row_ids=row_ids,
            positions=table.num_tokens[row_ids] - table.num_prompt_tokens[row_ids],
            mask_rows=mask_rows,
            with_logprobs=with_logprobs,
            num_top=num_top[with_logprobs],
            with_candidates=with_candidates,
            num_candidates=num_candidates[with_candidates],
        )


class Fetched(NamedTuple):
    """Host memory that holds the outcome of sampling once the device is done."""

    numbers: Int64Array
    """[n]: a token or a negative outcome of each row that samples, then those of the rows that only
    report on their prompts."""

    logprobs: FetchedLogprobs | None = None
    candidates: FetchedCandidates | None = None
    prompts: Sequence[FetchedPrompt] = ()


class StepLaunch:
    """The launch of one step: `forward` or a replay, then `sample`. None waits for the device."""

    def __init__(
        self,
        model: Model,
        caches: Sequence[LayerCaches],
        state: DeviceState,
        buffers: StepBuffers,
        sampling: HostSampling,
        spans: Sequence[PromptSpan],
        prompt_targets: Int64Array,
        reporting: Int64Array,
    ) -> None:
        """spans: of prompt tokens whose log probabilities are reported; prompt_targets: the tokens
        of all spans, concatenated; reporting: row ids of the spans' rows that do not sample."""
        self._model = model
        self._caches = caches
        self._device_rows = state.rows
        self._sampler = state.sampler
        self._graphs = state.graphs
        self._buffers = buffers
        self._sampling = sampling
        self._spans = spans
        self._prompt_targets = prompt_targets
        self._reporting = reporting
        self._reported: list[Tensor] = []
        """`with_logprobs`, `with_candidates`, `prompt_targets` and `reporting` on the device."""
        self._replayed_size = 0
        self._rows: SamplingRows | None = None
        self._logits: Callable[[], Tensor] | None = None
        self._hidden: Tensor | None = None

    def recorded_size(self, changes: list[Column]) -> int | None:
        """The padded size for which a batch of decodes that all sample can be replayed, if any."""
        if self._graphs is None or not self._graphs.have_room_for(self._columns(changes)):
            return None
        return self._graphs.size_for(len(self._sampling.row_ids))

    def recorded_tokens(self, inputs: HostInputs, changes: list[Column]) -> int | None:
        """The padded number of tokens for which any batch can be replayed, if any."""
        if self._graphs is None or len(self._spans):
            return None
        if not self._graphs.have_room_for(self._columns(changes)):
            return None
        return self._graphs.mixed_size_for(inputs, len(self._sampling.row_ids))

    def forward(self, inputs: HostInputs, last_states: Int64Array, changes: list[Column]) -> None:
        """Compute any batch eagerly. last_states: indices of the hidden states that are sampled
        from."""
        each = self._sampling
        columns = [
            inputs.token_ids,
            inputs.positions,
            inputs.slot_mapping,
            inputs.token_row_ids,
            inputs.row_ids,
            inputs.context_lens,
            inputs.query_start,
            each.row_ids,
            each.positions,
            each.mask_rows,
            last_states,
        ]
        int32 = [column.astype(np.int32) for column in columns]
        sent = self._buffers.staging.send([*int32, *self._columns(changes)])
        self._apply(sent[len(columns) :])
        *step_inputs, query_start, row_ids, positions, mask_rows, last = sent[: len(columns)]
        batch = self._sampler.prepare(
            StepInputs(*step_inputs),
            inputs.max_blocks,
            self._caches,
            query_start,
            max_query_len=inputs.max_query_len,
            max_context_len=inputs.max_context_len,
            num_decodes=inputs.num_decodes,
        )
        hidden = self._model.forward(batch)
        self._hidden = hidden
        self._rows = SamplingRows(row_ids, positions, mask_rows, self._sampler.no_masks)
        # Do not capture `self`: a reference cycle would hold GPU memory until the next collection.
        model = self._model
        self._logits = lambda: model.compute_logits(hidden.index_select(0, last))

    def replay(self, inputs: HostInputs, changes: list[Column], size: int) -> None:
        """Compute a batch of decodes that all sample, by the graph of a padded size."""
        graphs, each = self._graphs, self._sampling
        assert graphs is not None, "recorded_size gave a size"
        columns = graphs.columns(inputs, each.positions, each.mask_rows, size)
        self._send(graphs, columns, changes, size)
        graphs.replay_forward(size)

    def replay_mixed(
        self, inputs: HostInputs, last_states: Int64Array, changes: list[Column], num_tokens: int
    ) -> None:
        """Compute any batch by the graph of a padded number of tokens; arguments as for
        `forward`."""
        graphs, each = self._graphs, self._sampling
        assert graphs is not None, "recorded_tokens gave a size"
        sampling = each.row_ids, each.positions, each.mask_rows
        columns = graphs.mixed_columns(inputs, sampling, last_states, num_tokens)
        size = graphs.size_for(len(last_states))
        assert size is not None, "recorded_tokens gave a size"
        self._send(graphs, columns, changes, size)
        graphs.replay_mixed(num_tokens)

    def _send(
        self, graphs: StepGraphs, columns: Int32Array, changes: list[Column], size: int
    ) -> None:
        """Send the inputs of a graph, and prepare to sample by the graph of a padded number of
        rows."""
        sent = self._buffers.staging.send([columns, *self._columns(changes)], graphs.static_inputs)
        self._apply(sent[1:])
        num_rows = len(self._sampling.row_ids)
        self._replayed_size = size
        self._rows = graphs.rows(size, num_rows)
        self._logits = lambda: graphs.logits(num_rows)

    def sample(self, bitmask: Int32Array | None) -> Fetched:
        """Sample. bitmask: as in `SamplingRows`; None if no row has a constraint."""
        each, rows = self._sampling, self._rows
        assert rows is not None, "computed before"
        assert self._logits is not None, "computed before"
        if bitmask is not None:
            target = self._graphs.bitmask if self._graphs and self._replayed_size else None
            rows = rows._replace(bitmask=self._buffers.send_bitmask(bitmask, target))
        if self._graphs and self._replayed_size and not any(map(len, self._reported)):
            if len(each.row_ids):
                self._graphs.replay_sampling(self._replayed_size)
            return Fetched(self._buffers.fetch([self._graphs.outcome[: len(each.row_ids)]])[0])
        with_logprobs, with_candidates, _, reporting = self._reported
        # A row whose prompt has an invalid log probability has failed before it samples.
        prompts = [[*self._prompt_pieces(span, at)] for span, at in self._spans_and_targets()]
        num_rows, num_numbers = len(each.row_ids), len(each.row_ids) + len(reporting)
        numbers = torch.empty(num_numbers, dtype=torch.int64, device=reporting.device)
        outcome = numbers[:num_rows]
        logprobs: Sequence[Tensor] = ()
        candidates: Sequence[Tensor] = ()
        logits = self._logits() if num_rows else None
        if logits is not None and self._sampler.samples:
            # Log probabilities and candidates need logits before they are edited in place below.
            raw = logits.index_select(0, with_logprobs) if len(with_logprobs) else None
            if len(with_candidates):
                offering = logits.index_select(0, with_candidates), rows.select(with_candidates)
                candidates = self._sampler.candidates(*offering, int(each.num_candidates.max()))
            self._sampler.sample(logits, rows, outcome)
            if raw is not None:
                chosen = outcome.index_select(0, with_logprobs)
                logprobs = self._sampler.logprobs(raw, chosen, int(each.num_top.max()))
        if len(reporting) and self._sampler.samples:
            numbers[num_rows:] = self._sampler.failures(reporting)
        if num_numbers:
            self._sampler.share(rows, numbers)
        of_prompts = (tensor for pieces in prompts for piece in pieces for tensor in piece)
        fetched = iter(self._buffers.fetch([numbers, *logprobs, *candidates, *of_prompts]))
        return Fetched(
            next(fetched),
            FetchedLogprobs(
                rows=each.with_logprobs,
                num_top=each.num_top,
                columns=[*islice(fetched, len(logprobs))],
            )
            if logprobs
            else None,
            FetchedCandidates(
                rows=each.with_candidates,
                counts=each.num_candidates,
                columns=[*islice(fetched, len(candidates))],
            )
            if candidates
            else None,
            [
                FetchedPrompt(span, [[*islice(fetched, len(piece))] for piece in pieces])
                for span, pieces in zip(self._spans, prompts, strict=True)
                if pieces
            ],
        )

    def _spans_and_targets(self) -> Iterator[tuple[PromptSpan, int]]:
        """Yield each span, and the index of its first token in `prompt_targets`."""
        at = 0
        for span in self._spans:
            yield span, at
            at += span.end - span.start

    def _prompt_pieces(self, span: PromptSpan, at: int) -> Iterator[LogprobTensors]:
        """Yield the log probabilities of a span's tokens, in pieces; none unless this rank
        samples."""
        assert self._hidden is not None, "a step with prompts is computed eagerly"
        count = span.end - span.start
        hidden = self._hidden[span.first_state : span.first_state + count]
        for piece in prompt_logits(self._model, hidden, self._reported[2][at : at + count]):
            if self._sampler.samples:
                yield self._sampler.prompt_logprobs(*piece, span.num_top, span.row_id)

    def _columns(self, changes: list[Column]) -> list[Column]:
        """The columns that are sent after the inputs of a step."""
        each = self._sampling
        reports = each.with_logprobs, each.with_candidates, self._prompt_targets, self._reporting
        return [*reports, *changes]

    def _apply(self, sent: list[Tensor]) -> None:
        """Apply these columns, which are on the device now."""
        self._reported, changes = sent[:4], sent[4:]
        self._device_rows.apply(changes)


class DeviceSteps:
    """Launches steps on one KV cache before the results of earlier ones are known."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        state: DeviceState,
        make_event: Callable[[], DeviceEvent] = CudaEvent,
        check: Callable[[], None] | None = None,
    ) -> None:
        """make_event: records an event on the current stream; check: raises GroupBroken if the
        ranks that share the model were interrupted, None for one rank."""
        self._model = model
        self._cache = cache
        self._caches = cache.caches
        self._state = state
        self._device = cache.device_cache.device
        self._make_event = make_event
        self._check = check
        self._last_finish = LastFinishTime()
        self._steps: deque[InFlightStep] = deque()
        """Steps whose buffers may still be written to or read."""
        self._spare: list[StepBuffers] = []
        state.rows.forget()

    def forget_all(self) -> None:
        """Forget all sequences; steps in flight may still be collected."""
        self._state.rows.forget()

    def finish(self) -> None:
        """Wait until the device has done what was launched, or was interrupted, and destroy the
        graphs, before the ranks that share the model part."""
        if self._steps:
            self._steps[-1].end.wait()
        self._state.graphs = None

    def admit(self, plan: StepPlan, sequences: SequenceState) -> None:
        """Note the changes that a plan made to the table, to be sent with the next step."""
        table = sequences.table
        for new in plan.new_sequences:
            self._state.rows.note_new(table.row_id(new.seq_id))
        if len(plan.block_updates):
            changed = table.row_ids(plan.block_updates[:, 0], "block_updates")
            self._state.rows.note_blocks(changed, plan.block_updates[:, 2])
        if len(plan.appended_tokens):
            chosen = table.row_ids(plan.appended_tokens[:, 0], "appended_tokens")
            self._state.rows.note_tokens(chosen)

    def note_sampled(self, row_ids: Int64Array) -> None:
        """Note that the host has sampled for these sequences."""
        self._state.rows.note_tokens(row_ids)

    def can_launch(self, rows: StepRows, table: SequenceTable) -> bool:
        """Whether a step can be launched here; if not, the host computes it."""
        return bool(rows.computes.any()) and self._state.rows.hold(rows.row_ids, table.sampling)

    def launch(
        self, plan: StepPlan, rows: StepRows, sequences: SequenceState, start: StepStart
    ) -> InFlightStep:
        """Launch a step. Waits for the device only if edits or bitmasks need pending tokens."""
        table, pending = sequences.table, sequences.pending
        row_ids = rows.row_ids[rows.sampling]
        reading = _reading_last_tokens(row_ids, table)
        pending.resolve(reading)
        self._state.rows.note_edits(reading)
        constrained = _constrained(row_ids, sequences)
        sampling = HostSampling.of(row_ids, constrained, table)
        spans = [*prompt_spans(rows, table)]
        reporting = np.setdiff1d([span.row for span in spans], rows.sampling).astype(np.int64)
        buffers = self._buffers(pending)
        begin = self._make_event()
        launch = StepLaunch(
            self._model,
            self._caches,
            self._state,
            buffers,
            sampling,
            spans,
            _prompt_targets(spans, table),
            rows.row_ids[reporting],
        )
        inputs = lay_out(rows.row_ids[rows.computes], rows.num_tokens[rows.computes], table)
        changes = self._state.rows.changes(table)
        size = None
        all_sample = len(row_ids) == len(inputs.row_ids) and not len(rows.forks)
        if inputs.max_query_len == 1 and all_sample:
            size = launch.recorded_size(changes)
        if size is not None:
            launch.replay(inputs, changes, size)
        else:
            last_states = rows.last_states(rows.ends())
            num_tokens = launch.recorded_tokens(inputs, changes)
            if num_tokens is None:
                launch.forward(inputs, last_states, changes)
            else:
                launch.replay_mixed(inputs, last_states, changes, num_tokens)
        computed = self._make_event()
        samples = self._state.sampler.samples
        fetched = launch.sample(_bitmask(row_ids, constrained, sequences, samples))
        rows.advance(table)
        step = InFlightStep(
            plan=plan,
            rows=np.concatenate([rows.sampling, reporting]),
            errors=rows.errors,
            numbers=fetched.numbers,
            logprobs=fetched.logprobs,
            candidates=fetched.candidates,
            prompts=fetched.prompts,
            buffers=buffers,
            begin=begin,
            computed=computed,
            end=self._make_event(),
            start=start,
            cache_device_us=self._cache.timer(),
            last_finish=self._last_finish,
            samples=samples,
            check=self._check,
        )
        positions = table.expect_tokens(row_ids)
        if len(reporting):
            row_ids = np.concatenate([row_ids, rows.row_ids[reporting]])
            positions = np.append(positions, np.full(len(reporting), NO_PLACEHOLDER))
        pending.add(step, row_ids, positions)
        self._steps.append(step)
        return step

    def _buffers(self, pending: PendingTokens) -> StepBuffers:
        """Host memory for one more in-flight step."""
        steps = self._steps
        while steps and steps[0].is_collected and not pending.contains(steps[0]):
            self._spare.append(steps.popleft().buffers)
        return self._spare.pop() if self._spare else StepBuffers(self._device)


def _reading_last_tokens(row_ids: Int64Array, table: SequenceTable) -> Int64Array:
    """The sequences whose edits depend on their last tokens, which the host must know."""
    edits = table.sampling.edits
    found = ((row_id, edits.get(row_id)) for row_id in (row_ids.tolist() if edits else ()))
    reading = [row_id for row_id, each in found if each is not None and each.reads_last_tokens]
    return np.array(reading, np.int64)


def _prompt_targets(spans: Sequence[PromptSpan], table: SequenceTable) -> Int64Array:
    """The prompt tokens of these spans, concatenated."""
    parts = [table.token_ids[span.row_id, span.start : span.end] for span in spans]
    return np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int64)


def _constrained(row_ids: Int64Array, sequences: SequenceState) -> Int64Array:
    """The indices of the rows with a constraint."""
    masks = sequences.masks
    rows = [] if masks is None else [row for row, _ in masks.constrained(row_ids)]
    return np.array(rows, np.int64)


def _bitmask(
    row_ids: Int64Array, constrained: Int64Array, sequences: SequenceState, samples: bool
) -> Int32Array | None:
    """Compute the bitmask of these constrained rows, if this rank samples. All ranks wait for the
    rows' pending tokens, while the device computes the forward pass launched last."""
    if sequences.masks is None or len(constrained) == 0:
        return None
    sequences.pending.resolve(row_ids[constrained])
    if not samples:
        return None
    bitmask = np.zeros((len(constrained), mask_width(sequences.table.vocab_size)), np.int32)
    if rows := sequences.constrained_rows(row_ids):
        masked = sequences.masks.compute(rows)
        known = np.searchsorted(constrained, masked.rows)
        bitmask[known, :-1] = masked.bitmask
        bitmask[known, -1] = masked.failed
    return bitmask
