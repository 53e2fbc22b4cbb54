"""What a step produced, by row of its plan, before it is a `StepResult`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pagewire_kernels.batch import NOT_SAMPLED
from worker_service.array_types import Float32Array, Int32Array, Int64Array
from worker_service.plan import (
    Candidates,
    PromptLogprobs,
    RowErrorReason,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    monotonic_us,
)
from worker_service.runner.batch.pooling import PooledRows
from worker_service.runner.state.sequence_state import FAILURES
from worker_service.sampling.sampler import NO_TOKEN

_CODES = {reason: code for code, reason in FAILURES.items()}


class StepStart(NamedTuple):
    """When a step's first parts were done, on the monotonic clock."""

    started_us: int
    cache_done_us: int
    admitted_us: int
    cache_us: Callable[[], int]
    """Microseconds that the cache operations have taken the device so far."""

    def later(self, by_us: int) -> "StepStart":
        """The same times, `by_us` later."""
        times_us = self.started_us + by_us, self.cache_done_us + by_us, self.admitted_us + by_us
        return StepStart(*times_us, self.cache_us)

    def timings(self, plan: StepPlan, forward_us: int) -> StepTimings:
        """The timings of a step that the host has just computed. forward_us: input preparation and
        forward pass."""
        finished_us = monotonic_us()
        forward_us += self.admitted_us - self.cache_done_us
        return StepTimings(
            received_us=plan.received_us,
            started_us=self.started_us,
            finished_us=finished_us,
            cache_ops_us=self.cache_done_us - self.started_us + self.cache_us(),
            forward_us=forward_us,
            sample_us=finished_us - self.cache_done_us - forward_us,
        )


@dataclass(kw_only=True, slots=True)
class StepOutcome:
    """The outcome of a step so far, by row of the plan."""

    tokens: Int64Array
    """[num_rows]; NO_TOKEN where none was sampled."""

    kept: dict[int, Int64Array] = field(default_factory=dict)
    """Tokens after the first of rows whose drafts were right."""

    num_drafts: Int32Array | None = None
    """[num_rows]: drafts of each row; None: none."""

    next_drafts: dict[int, Int32Array] = field(default_factory=dict)
    """Drafts for the next rows of the sequences, where several ranks need them."""

    errors: dict[int, RowErrorReason] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    kept_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Those of `kept`."""

    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    vectors: dict[int, Float32Array] = field(default_factory=dict)

    forward_us: int = 0
    """Input preparation and forward pass, in microseconds."""

    @classmethod
    def of_failed(cls, num_rows: int, errors: dict[int, RowErrorReason]) -> "StepOutcome":
        """An outcome without tokens in which these rows have failed."""
        return cls(tokens=np.full(num_rows, NO_TOKEN, np.int64), errors=dict(errors))

    def encode(self, max_drafts: int = 0) -> Int64Array:
        """[num_rows, 1 + 2 * max_drafts]: each row's token, one of `FAILURES`, or NOT_SAMPLED; then
        the tokens of `kept` and those of `next_drafts`, with NO_TOKEN after the last."""
        numbers = np.full((len(self.tokens), 1 + 2 * max_drafts), NO_TOKEN, np.int64)
        numbers[:, 0] = np.where(self.tokens == NO_TOKEN, NOT_SAMPLED, self.tokens)
        for row, reason in self.errors.items():
            numbers[row, 0] = _CODES[reason]
        for start, entries in ((1, self.kept), (1 + max_drafts, self.next_drafts)):
            for row, tokens in entries.items():
                numbers[row, start : start + len(tokens)] = tokens
        return numbers

    def add_logprobs(
        self,
        logprobs: dict[int, TokenLogprobs],
        sampling: Int64Array,
        offsets: Int64Array | None,
    ) -> None:
        """Add the log probabilities of the tokens that rows have brought. logprobs: by place that
        was sampled at; sampling, offsets: of each place, its row and the drafts before it, None if
        no row has any."""
        for index, entry in logprobs.items():
            row, offset = int(sampling[index]), 0 if offsets is None else int(offsets[index])
            if row in self.errors:
                continue
            if offset == 0:
                self.logprobs[row] = entry
            elif offset <= len(self.kept.get(row, ())):
                self.kept_logprobs.setdefault(row, []).append(entry)

    def add_vectors(self, pooled: PooledRows, values: Float32Array) -> None:
        """Add vectors, or the errors of rows with numbers that are not finite. The sequences
        continue: the core ends them, on all ranks at the same step."""
        for row, vectors in pooled.vectors(values):
            if vectors is None:
                self.errors[row] = RowErrorReason.NON_FINITE_LOGITS
            else:
                self.vectors[row] = vectors

    def add_part(self, rows: Int64Array, part: "StepOutcome") -> None:
        """Merge the outcome of a micro-batch of these rows. A row that was cut has only prompt log
        probabilities before its last piece."""
        self.tokens[rows] = part.tokens
        for name in ("kept", "logprobs", "kept_logprobs", "candidates", "vectors", "errors"):
            entries = getattr(part, name)
            getattr(self, name).update((int(rows[row]), entry) for row, entry in entries.items())
        if part.num_drafts is not None:
            if self.num_drafts is None:
                self.num_drafts = np.zeros(len(self.tokens), np.int32)
            self.num_drafts[rows] += part.num_drafts
        for index, entry in part.prompt_logprobs.items():
            row = int(rows[index])
            before = self.prompt_logprobs.get(row)
            self.prompt_logprobs[row] = entry if before is None else before.followed_by(entry)
        self.forward_us += part.forward_us

    def result(self, plan: StepPlan, timings: StepTimings, *, samples: bool) -> StepResult:
        """The step's result, as the core receives it. samples: whether this rank does; the results
        of others have no tokens."""
        if not samples:
            none = np.empty(0, np.int32)
            return StepResult(
                epoch=plan.epoch, step_id=plan.step_id, token_ids=none, timings=timings
            )
        sampling_rows = plan.samples
        token_ids, num_sampled, num_drafts = self.tokens[sampling_rows], None, None
        if self.num_drafts is not None:
            sampling = np.flatnonzero(sampling_rows).tolist()
            parts = [np.append(self.tokens[row], self.kept.get(row, ())) for row in sampling]
            token_ids = np.concatenate(parts)
            num_sampled = np.array([len(part) for part in parts], np.int32)
            num_drafts = self.num_drafts[sampling_rows]
        return StepResult(
            epoch=plan.epoch,
            step_id=plan.step_id,
            token_ids=token_ids.astype(np.int32),
            num_sampled=num_sampled,
            num_drafts=num_drafts,
            logprobs=self.logprobs,
            kept_logprobs=self.kept_logprobs,
            prompt_logprobs=self.prompt_logprobs,
            candidates=self.candidates,
            vectors=dict(sorted(self.vectors.items())),
            errors=dict(sorted(self.errors.items())),
            timings=timings,
        )
