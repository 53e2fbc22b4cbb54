"""One step from plan to result: cache operations, forward pass, sampling.

The runner belongs to the engine's model thread; nothing here is safe to call from another. What
differs between workers is supplied to it:

| | one CPU | one GPU | a rank of several |
| --- | --- | --- | --- |
| forward pass | `HostForward` | `DeviceSteps` | `HostForward`, in `micro_batches` |
| sampling | on the host | on the device | on the host of one rank |
| tokens | known at once | pending until the device is done | broadcast; pending elsewhere |

A rank on a GPU that shares layers, but is no stage of a pipeline, works as one GPU does; its device
receives the tokens. On a GPU, the host computes the few steps that `DeviceSteps` cannot launch.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from worker_service.distributed.communicator import Communicator
from worker_service.distributed.layout import Layout
from worker_service.engine.executor import FinishedStep, Step
from worker_service.kv_cache.cache_engine import CacheEngine
from worker_service.models.interface import Model
from worker_service.plan import (
    RowErrorReason,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    monotonic_us,
)
from worker_service.runner.batch.micro_batches import micro_batches
from worker_service.runner.batch.step_outcome import StepOutcome, StepStart, nothing_sampled
from worker_service.runner.batch.step_rows import (
    StepRows,
    prompt_spans,
    resolve_rows,
    sampling_batch,
)
from worker_service.runner.device.steps import DeviceSteps
from worker_service.runner.drafting.speculation import Speculation
from worker_service.runner.host.forward import ForwardPass, HostForward
from worker_service.runner.state.sequence_state import RankOutcomes, SequenceState
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.logprobs import prompt_logprobs
from worker_service.sampling.sampler import NO_TOKEN, Largest, sample
from worker_service.structured.masks import MaskedRows

if TYPE_CHECKING:
    from worker_service.structured.grammars import Grammars


class ModelRunner:
    """A model, or a rank's share of one, its KV caches, and the sequences in them.

    `launch` and `reset` belong to the model thread; what `launch` returns may be collected by
    another.
    """

    def __init__(
        self,
        model: Model,
        cache: CacheEngine,
        block_size: int,
        grammars: "Grammars | None" = None,
        *,
        communicator: Communicator | None = None,
        device: DeviceSteps | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """grammars: for sequences with a constraint; None refuses those. communicator: of the ranks
        that share the model, which have joined for an epoch: then the runner is for that epoch.
        device: launches steps ahead; None computes each step when it is launched. speculation: of a
        runner that computes each step at once; None adds no drafts."""
        self._model = model
        self._cache = cache
        self._block_size = block_size
        self._grammars = grammars
        self._forward = HostForward(model, cache.caches)
        self._ranks = RankOutcomes(communicator or Communicator(Layout()))
        self._device = device
        self._speculation = speculation or Speculation()
        self._sequences = self._no_sequences()

    def reset(self) -> None:
        """Forget all sequences and leave the other ranks; the caches' contents become meaningless.
        Steps in flight may still be collected."""
        self._sequences = self._no_sequences()
        self._speculation.reset()
        if self._device is not None:
            self._device.forget_all()
            if self._ranks.layout.world_size > 1:
                self._device.finish()
        self._ranks.leave()

    def _no_sequences(self) -> SequenceState:
        table = SequenceTable(
            vocab_size=self._model.vocab_size,
            max_model_len=self._model.max_model_len,
            block_size=self._block_size,
            num_gpu_blocks=len(self._cache.device_cache),
            num_parts=self._ranks.layout.pipeline_parallel_size,
        )
        return SequenceState(table, self._grammars)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Step:
        """Begin what the plan says. With several ranks only the sampling rank's result has tokens.

        Raises InvalidPlan, as every rank does, after which the state of the sequences may be half
        the plan's: the caller resets the runner. Raises GroupBroken if another rank is lost.
        """
        self._ranks.check()
        self._sequences.pending.resolve_available()
        start = self._begin(plan)
        if self._device is None:
            return FinishedStep(self._compute(plan, start))
        rows = resolve_rows(plan, self._sequences.table)
        if self._device.can_launch(rows, self._sequences.table):
            return self._device.launch(plan, rows, self._sequences, start)
        waiting_since_us = monotonic_us()
        self._sequences.pending.resolve_all()
        start = start.later(monotonic_us() - waiting_since_us)
        result = self._compute(plan, start)
        self._sequences.pending.resolve_all()  # sampled by another rank, and not on the device
        self._device.note_sampled(rows.row_ids)
        return FinishedStep(result)

    def _begin(self, plan: StepPlan) -> StepStart:
        """Everything before the forward pass: cache operations, and changes of the sequences."""
        started_us = monotonic_us()
        forgotten = self._sequences.forget(plan)
        self._cache.execute(plan)
        cache_done_us = monotonic_us()
        self._sequences.admit(plan)
        self._speculation.begin(plan, forgotten, self._sequences.table)
        if self._device is not None:
            self._device.admit(plan, self._sequences)
        return StepStart(started_us, cache_done_us, monotonic_us())

    def _compute(self, plan: StepPlan, start: StepStart) -> StepResult:
        """Compute and sample on the host, until the tokens are there."""
        table = self._sequences.table
        if table.num_parts == 1:
            outcome = self._compute_part(plan)
        else:
            outcome = StepOutcome.of_failed(len(plan.seq_ids), {})
            for rows, part in micro_batches(plan, table):
                outcome.add_part(rows, self._compute_part(part))
        self._ranks.check()
        forward_us = start.admitted_us - start.cache_done_us + outcome.forward_us
        if len(plan.seq_ids) == 0:
            self._cache.finish()  # no forward pass overlaps the operations
        finished_us = monotonic_us()
        timings = StepTimings(
            received_us=plan.received_us,
            started_us=start.started_us,
            finished_us=finished_us,
            cache_ops_us=start.cache_done_us - start.started_us + self._cache.device_us(),
            forward_us=forward_us,
            sample_us=finished_us - start.cache_done_us - forward_us,
        )
        if self._ranks.layout.samples:
            return outcome.result(plan, timings)
        return nothing_sampled(plan, timings)

    def _compute_part(self, plan: StepPlan) -> StepOutcome:
        """Compute the plan's rows, and sample if this rank does."""
        sequences, layout = self._sequences, self._ranks.layout
        table = sequences.table
        if not layout.samples:
            sequences.pending.resolve(table.row_ids(plan.seq_ids, "seq_ids"))
        started_us = monotonic_us()
        rows = resolve_rows(plan, table)
        are_decodes = rows.are_decodes
        if plan.lookahead.any():
            is_shared = layout.world_size > 1
            rows = self._speculation.add(rows, plan.lookahead, sequences, is_shared)
        outcome = StepOutcome.of_failed(len(rows.row_ids), rows.errors)
        masks = self._begin_masks(rows) if layout.samples else None
        forward = self._forward.run(rows, table)
        logits = None
        if forward is not None and layout.is_last_stage:
            logits = self._forward.last_logits(rows, forward)
        outcome.forward_us = monotonic_us() - started_us
        if forward is not None and layout.is_last_stage:
            self._add_prompt_logprobs(outcome, rows, forward)
        rows.advance(table)
        if logits is not None and layout.samples:
            self._sample(outcome, *logits, rows, masks)
        if forward is not None:
            self._speculation.observe(rows, forward, table)
        self._exchange(plan, rows, outcome)
        if are_decodes:
            self._speculation.note_decodes(rows, monotonic_us() - started_us)
        return outcome

    def _exchange(self, plan: StepPlan, rows: StepRows, outcome: StepOutcome) -> None:
        """Give the other ranks the outcome, or expect it. Where the core allows drafts, it holds
        those of the next step."""
        table, pending = self._sequences.table, self._sequences.pending
        num_drafts = self._speculation.max_drafts if plan.lookahead.any() else 0
        if num_drafts and self._ranks.layout.world_size > 1:
            outcome.next_drafts = self._speculation.choose_next(rows, self._sequences)
        self._ranks.exchange(plan.step_id, rows, outcome, table, pending, num_drafts)

    def _begin_masks(self, rows: StepRows) -> "Future[MaskedRows] | None":
        """Begin to compute which tokens constraints allow, concurrently with the forward pass."""
        num_drafts = None if rows.drafts is None else rows.drafts.offsets
        row_ids = rows.row_ids[rows.sampling]
        constrained = self._sequences.constrained_rows(row_ids, num_drafts)
        masks = self._sequences.masks
        return masks.begin(constrained) if constrained and masks is not None else None

    def _add_prompt_logprobs(
        self, outcome: StepOutcome, rows: StepRows, forward: ForwardPass
    ) -> None:
        """Log probabilities of the prompt tokens that the rows' hidden states predict."""
        table = self._sequences.table
        for span in prompt_spans(rows, table):
            num_tokens = span.end - span.start
            entry = prompt_logprobs(
                self._model,
                forward.hidden[span.first_state : span.first_state + num_tokens],
                table.token_ids[span.row_id, span.start : span.end],
                span.start,
                span.num_top,
            )
            if np.isfinite(entry.logprobs).all():
                outcome.prompt_logprobs[span.row] = entry
            elif self._ranks.layout.samples:
                self._fail(outcome, rows, [span.row], RowErrorReason.NON_FINITE_LOGITS)

    def _sample(
        self,
        outcome: StepOutcome,
        logits: Tensor,
        largest: Largest | None,
        rows: StepRows,
        masks: "Future[MaskedRows] | None",
    ) -> None:
        table, sampling = self._sequences.table, rows.sampling
        masked = masks.result() if masks is not None else None
        offsets = None if rows.drafts is None else rows.drafts.offsets
        batch = sampling_batch(rows.row_ids[sampling], table, masked, offsets)
        samples = sample(logits, batch, table.sampling, largest)
        errors, tokens = outcome.errors, samples.tokens
        is_first = np.ones(len(sampling), np.bool_)
        if rows.drafts is not None:
            outcome.num_drafts = rows.drafts.counts
            outcome.kept = self._speculation.accepted(rows, tokens, table)
            is_first = rows.drafts.offsets == 0
        failed = [(samples.no_candidates, RowErrorReason.NO_CANDIDATES)]
        if masked is not None:
            failed.append((masked.rows[masked.failed], RowErrorReason.CONSTRAINT))
        failed.append((samples.non_finite, RowErrorReason.NON_FINITE_LOGITS))
        for places, reason in failed:  # a row's last reason counts
            self._fail(outcome, rows, sampling[places[is_first[places]]].tolist(), reason)
        sampling, tokens = sampling[is_first], tokens[is_first]
        outcome.tokens[sampling] = tokens
        outcome.tokens[list(errors)] = NO_TOKEN
        self._add_logprobs(outcome, rows, samples.logprobs)
        for index, offered in samples.candidates.items():
            if (row := int(rows.sampling[index])) not in errors:
                outcome.candidates[row] = offered
        sampled = sampling
        if errors or outcome.candidates:
            sampled = sampling[outcome.tokens[sampling] != NO_TOKEN]
        table.append_tokens(rows.row_ids[sampled], outcome.tokens[sampled])
        for row, further in outcome.kept.items():
            table.append_kept(int(rows.row_ids[row]), further)

    def _add_logprobs(
        self, outcome: StepOutcome, rows: StepRows, logprobs: dict[int, TokenLogprobs]
    ) -> None:
        """Log probabilities of the tokens that rows have brought. logprobs: by place in
        `rows.sampling`."""
        for index, entry in logprobs.items():
            row = int(rows.sampling[index])
            offset = 0 if rows.drafts is None else int(rows.drafts.offsets[index])
            if row in outcome.errors:
                continue
            if offset == 0:
                outcome.logprobs[row] = entry
            elif offset <= len(outcome.kept.get(row, ())):
                outcome.kept_logprobs.setdefault(row, []).append(entry)

    def _fail(
        self, outcome: StepOutcome, rows: StepRows, failed: Iterable[int], reason: RowErrorReason
    ) -> None:
        """Fail some rows; their sequences compute nothing more until they are forgotten."""
        for row in failed:
            outcome.errors[row] = reason
            self._sequences.table.fail(int(rows.row_ids[row]), reason)
