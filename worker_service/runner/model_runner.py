"""One step from plan to result: cache operations, forward pass, sampling.

The runner belongs to the engine's model thread; nothing here is safe to call from another.
"""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.interface import Computed, HeadOutput
from worker_service.array_types import Int64Array
from worker_service.engine.executor import FinishedStep, Step
from worker_service.errors import InvalidPlan
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import ComputesLogits, Model
from worker_service.plan import (
    Candidates,
    NewSequence,
    PromptLogprobs,
    RowErrorReason,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    monotonic_us,
)
from worker_service.runner.batch import (
    DecodeInputs,
    ForwardInputs,
    StepRows,
    build_inputs,
    lay_out,
    resolve_rows,
)
from worker_service.runner.sequence_table import SequenceTable
from worker_service.sampling.logprobs import prompt_logprobs
from worker_service.sampling.sampler import NO_TOKEN, Largest, Samples, SamplingBatch, sample
from worker_service.structured.masks import ConstrainedRow, MaskedRows, TokenMasks

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPass:
    """The hidden states of a batch and where each of the plan's rows lies in them."""

    hidden: Tensor
    """[num_tokens, hidden_size]."""

    starts: Int64Array
    """[num_rows]: first hidden state of each row."""

    ends: Int64Array
    """[num_rows]: one past the last; equal to the start where a row computed nothing."""

    head: HeadOutput | None
    """Of the sampling rows, where it was a part of the pass."""


class LastLogits(NamedTuple):
    """Logits of the sampling rows' last tokens."""

    values: Tensor
    """float32 [num_sampling, vocab_size]."""

    largest: Largest | None = None
    """Where it is known."""


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    """What a step brought so far, by row of the plan."""

    tokens: Int64Array
    """[num_rows]; -1 where none was sampled."""

    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, PromptLogprobs]
    candidates: dict[int, Candidates]
    errors: dict[int, RowErrorReason]

    forward_us: int = 0
    """Input preparation and forward pass, in microseconds."""


class StepStart(NamedTuple):
    """When a step's first parts were done, on the monotonic clock."""

    started_us: int
    cache_done_us: int
    admitted_us: int

    def later(self, by_us: int) -> "StepStart":
        """The same, had it happened that much later."""
        return StepStart(*(time_us + by_us for time_us in self))


class ModelRunner:
    """A model, its KV caches and the sequences in them."""

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        grammars: "Grammars | None" = None,
    ) -> None:
        """grammars: for sequences with a constraint; None: there may be none."""
        self._model = model
        self._to_logits = model.forward_to_logits if isinstance(model, ComputesLogits) else None
        self._cache = cache
        self._block_size = block_size
        self._grammars = grammars
        self._device = cache.device_cache.device
        self._decode_inputs = DecodeInputs() if self._device.type == "cpu" else None
        self._sequences = self._no_sequences()
        self._masks = TokenMasks(grammars) if grammars is not None else None

    def reset(self) -> None:
        """Forget all sequences; the caches' contents become meaningless."""
        self._sequences = self._no_sequences()
        self._masks = TokenMasks(self._grammars) if self._grammars is not None else None

    def _no_sequences(self) -> SequenceTable:
        return SequenceTable(
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
            block_size=self._block_size,
            num_gpu_blocks=len(self._cache.device_cache),
            num_parts=self._num_parts,
        )

    @property
    def _num_parts(self) -> int:
        """Parts in which a step's rows are computed."""
        return 1

    @property
    def num_sequences(self) -> int:
        """Number of sequences known."""
        return len(self._sequences)

    def launch(self, plan: StepPlan) -> Step:
        """Do what the plan says, at once; see `execute`."""
        return FinishedStep(self.execute(plan))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Do what the plan says.

        Raises InvalidPlan, after which what is remembered of the sequences may be half the plan's:
        the caller resets the runner.
        """
        return self._finish(plan, self._begin(plan))

    def _begin(self, plan: StepPlan) -> StepStart:
        """Everything before the forward pass: cache operations, and what changed."""
        started_us = monotonic_us()
        self._forget(plan)
        self._cache.execute(plan)
        cache_done_us = monotonic_us()
        self._admit(plan)
        return StepStart(started_us, cache_done_us, monotonic_us())

    def _finish(self, plan: StepPlan, begun: StepStart) -> StepResult:
        """Compute and sample, until the tokens are there."""
        outcome = self._compute(plan)
        forward_us = begun.admitted_us - begun.cache_done_us + outcome.forward_us
        if len(plan.seq_ids) == 0:
            self._cache.finish()  # there is nothing that could run beside
        finished_us = monotonic_us()
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=outcome.tokens[plan.sample].astype(np.int32),
            logprobs=outcome.logprobs,
            prompt_logprobs=outcome.prompt_logprobs,
            candidates=outcome.candidates,
            errors=outcome.errors,
            timings=StepTimings(
                received_us=plan.received_us,
                started_us=begun.started_us,
                finished_us=finished_us,
                cache_ops_us=begun.cache_done_us - begun.started_us + self._cache.device_us(),
                forward_us=forward_us,
                sample_us=finished_us - begun.cache_done_us - forward_us,
            ),
        )

    def _forget(self, plan: StepPlan) -> None:
        if self._masks is not None:
            self._masks.remove(self._sequences.row_ids(plan.forget_seq_ids, "forget_seq_ids"))
        self._sequences.forget(plan.forget_seq_ids)

    def _compute(self, plan: StepPlan) -> StepOutcome:
        """Compute the plan's rows, and sample."""
        started_us = monotonic_us()
        rows = resolve_rows(plan, self._sequences)
        outcome = self._start(rows)
        sampling = self._sampling_rows(rows)
        masks = self._begin_masks(rows.row_ids[sampling])
        forward = self._forward(rows, sampling)
        logits = self._last_logits(sampling, rows, forward)
        outcome.forward_us = monotonic_us() - started_us
        if forward is not None:
            self._add_prompt_logprobs(outcome, rows, forward)
        self._advance(rows)
        if logits is not None:
            self._sample(outcome, logits, sampling, rows, masks)
        return outcome

    def _admit(self, plan: StepPlan) -> None:
        for index, new in enumerate(plan.new_sequences):
            self._sequences.add(new, f"new_sequences[{index}]")
            self._take_in_constraint(new, f"new_sequences[{index}]")
        self._sequences.append_chosen(plan.appended_tokens)
        self._sequences.update_blocks(plan.block_updates)

    def _take_in_constraint(self, new: NewSequence, field: str) -> None:
        params, table = new.sampling, self._sequences
        if params.constraint is None:
            return
        if self._masks is None:
            raise InvalidPlan(f"{field}.sampling.constraint", "expected none: not supported here")
        parent = None if new.parent_seq_id is None else table.row_id(new.parent_seq_id)
        try:
            self._masks.add(table.row_id(new.seq_id), params.constraint, params.min_tokens, parent)
        except ValueError as error:
            raise InvalidPlan(f"{field}.sampling.constraint", str(error)) from error

    def _constrained_rows(self, row_ids: Int64Array) -> list[ConstrainedRow]:
        """Those of a batch's rows that have a constraint, and have not failed."""
        if self._masks is None:
            return []
        table = self._sequences
        return [
            ConstrainedRow(row, row_id, table.output(row_id))
            for row, row_id in self._masks.constrained(row_ids)
            if row_id not in table.failures
        ]

    def _begin_masks(self, row_ids: Int64Array) -> "Future[MaskedRows] | None":
        """What constraints allow in a batch's rows, to be computed beside the forward pass."""
        rows = self._constrained_rows(row_ids)
        return self._masks.begin(rows) if rows and self._masks is not None else None

    def _start(self, rows: StepRows) -> StepOutcome:
        """An outcome in which sequences that failed in an earlier step fail again."""
        errors = {}
        if failures := self._sequences.failures:
            row_ids = enumerate(rows.row_ids.tolist())
            errors = {row: failures[row_id] for row, row_id in row_ids if row_id in failures}
        tokens = np.full(len(rows.row_ids), NO_TOKEN, np.int64)
        return StepOutcome(
            tokens=tokens, logprobs={}, prompt_logprobs={}, candidates={}, errors=errors
        )

    def _forward(self, rows: StepRows, sampling: Int64Array) -> ForwardPass | None:
        """Compute the rows that have something to compute; None if there are none."""
        if rows.are_decodes and self._decode_inputs is not None and len(rows.row_ids):
            return self._decode(rows, self._decode_inputs)
        num_tokens = np.where(rows.computes, rows.num_tokens, 0)
        ends = np.cumsum(num_tokens)
        if len(ends) == 0 or ends[-1] == 0:
            return None
        table = self._sequences
        row_ids, lengths = rows.row_ids[rows.computes], rows.num_tokens[rows.computes]
        inputs = build_inputs(lay_out(row_ids, lengths, table), table, self._device)
        # A fork samples from its parent's last state, which is then named twice.
        is_plain = len(sampling) > 0 and len(rows.forks) == 0
        last = self._index(ends[sampling] - 1) if is_plain else None
        return self._pass(inputs, last, ends - num_tokens, ends)

    def _decode(self, rows: StepRows, decode_inputs: DecodeInputs) -> ForwardPass:
        """Compute rows of one token each, which all sample."""
        inputs = decode_inputs.build(rows.row_ids, self._sequences)
        numbers = decode_inputs.numbers(len(rows.row_ids))
        starts = numbers.numpy()
        return self._pass(inputs, numbers, starts, starts + 1)

    def _pass(
        self, inputs: ForwardInputs, last: Tensor | None, starts: Int64Array, ends: Int64Array
    ) -> ForwardPass:
        """Through the model; last: which hidden states are sampled from."""
        batch = inputs.token_ids, inputs.positions, self._cache.device_cache, inputs.metadata
        if self._to_logits is None:
            computed = Computed(self._model.forward(*batch))
        else:
            computed = self._to_logits(*batch, last)
        return ForwardPass(hidden=computed.hidden, starts=starts, ends=ends, head=computed.head)

    def _sampling_rows(self, rows: StepRows) -> Int64Array:
        """Rows that sample now: not those of sequences that failed before."""
        samples = rows.sample & rows.computes
        samples[rows.forks] = True
        return np.flatnonzero(samples)

    def _last_logits(
        self, sampling: Int64Array, rows: StepRows, forward: ForwardPass | None
    ) -> LastLogits | None:
        if forward is None or len(sampling) == 0:
            return None
        if (head := forward.head) is not None:
            return LastLogits(head.logits, Largest(head.best.numpy(), head.largest.numpy()))
        ends = forward.ends
        if len(rows.forks) == 0:
            return LastLogits(self._logits_at(ends[sampling] - 1, forward.hidden))
        ends = ends.copy()
        ends[rows.forks] = ends[rows.parents]
        distinct, inverse = np.unique(ends[sampling] - 1, return_inverse=True)
        return LastLogits(self._logits_at(distinct, forward.hidden)[self._index(inverse)])

    def _logits_at(self, positions: Int64Array, hidden: Tensor) -> Tensor:
        """Logits of some of the hidden states, named in rising order."""
        if len(positions) < len(hidden):
            hidden = hidden[self._index(positions)]
        return self._model.compute_logits(hidden)

    def _add_prompt_logprobs(
        self, outcome: StepOutcome, rows: StepRows, forward: ForwardPass
    ) -> None:
        """Log probabilities of the prompt tokens that the rows' hidden states predict."""
        table = self._sequences
        if not table.prompt_logprobs:
            return
        for row in np.flatnonzero(rows.computes).tolist():
            row_id = int(rows.row_ids[row])
            asked = table.prompt_logprobs.get(row_id)
            if asked is None:
                continue
            first = int(table.num_computed_tokens[row_id])
            start = max(first + 1, asked.start)
            end = min(first + 1 + int(rows.num_tokens[row]), int(table.num_prompt_tokens[row_id]))
            if start >= end:
                continue
            # The hidden state at position p predicts the token at p + 1.
            offset = int(forward.starts[row]) - first - 1
            entry = prompt_logprobs(
                self._model,
                forward.hidden[offset + start : offset + end],
                table.token_ids[row_id, start:end],
                start,
                asked.num_top,
            )
            if np.isfinite(entry.logprobs).all():
                outcome.prompt_logprobs[row] = entry
            else:
                self._fail(outcome, rows, row, RowErrorReason.NON_FINITE_LOGITS)

    def _advance(self, rows: StepRows) -> None:
        """The rows' tokens are computed now, and those of a parent also in its new forks."""
        computed = self._sequences.num_computed_tokens
        computed[rows.row_ids[rows.computes]] += rows.num_tokens[rows.computes]
        computed[rows.row_ids[rows.forks]] = computed[rows.row_ids[rows.parents]]

    def _sample(
        self,
        outcome: StepOutcome,
        logits: LastLogits,
        sampling: Int64Array,
        rows: StepRows,
        masks: "Future[MaskedRows] | None",
    ) -> None:
        table = self._sequences
        row_ids = rows.row_ids[sampling]
        masked = masks.result() if masks is not None else None
        batch = SamplingBatch(
            row_ids=row_ids,
            positions=table.num_tokens[row_ids] - table.num_prompt_tokens[row_ids],
            edited=table.edited_rows(row_ids),
            masked=masked,
        )
        samples = sample(logits.values, batch, table.sampling, logits.largest)
        if masked is not None:
            for row in sampling[masked.rows[masked.failed]].tolist():
                self._fail(outcome, rows, row, RowErrorReason.CONSTRAINT)
        self._note_failures(outcome, samples, sampling, rows)
        outcome.tokens[sampling] = samples.tokens
        outcome.tokens[list(outcome.errors)] = NO_TOKEN
        for index, entry in samples.logprobs.items():
            row = int(sampling[index])
            if row not in outcome.errors:
                outcome.logprobs[row] = entry
        for index, offered in samples.candidates.items():
            row = int(sampling[index])
            if row not in outcome.errors:
                outcome.candidates[row] = offered
        sampled = sampling
        if outcome.errors or outcome.candidates:
            sampled = sampling[outcome.tokens[sampling] != NO_TOKEN]
        table.append_tokens(rows.row_ids[sampled], outcome.tokens[sampled])

    def _note_failures(
        self, outcome: StepOutcome, samples: Samples, sampling: Int64Array, rows: StepRows
    ) -> None:
        for row in sampling[samples.non_finite].tolist():
            self._fail(outcome, rows, row, RowErrorReason.NON_FINITE_LOGITS)
        for row in sampling[samples.no_candidates].tolist():
            if row not in outcome.errors:
                self._fail(outcome, rows, row, RowErrorReason.NO_CANDIDATES)

    def _fail(self, outcome: StepOutcome, rows: StepRows, row: int, reason: RowErrorReason) -> None:
        """End a row; its sequence stands still until it is forgotten."""
        outcome.errors[row] = reason
        self._sequences.failures[int(rows.row_ids[row])] = reason

    def _index(self, rows: Int64Array) -> Tensor:
        return torch.from_numpy(rows).to(self._device)
