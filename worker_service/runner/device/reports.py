"""What rows report besides their tokens: log probabilities, candidates, and those of prompts; and
the drafts that they verify.

`StepReports` says what a step's rows ask for, `sample` queues its computation on the device, and
`FetchedReports` is what the host reads once the device is done.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import (
    NO_CANDIDATES,
    NON_FINITE,
    NOT_SAMPLED,
    AdapterRows,
    SamplingRows,
)
from worker_service.array_types import Int32Array, Int64Array
from worker_service.models.interface import Model
from worker_service.pinned_memory import Column
from worker_service.plan import Candidates, TokenLogprobs
from worker_service.runner.batch.pooling import PooledRows
from worker_service.runner.batch.sampling import PromptSpan, prompt_spans
from worker_service.runner.batch.step_outcome import StepOutcome
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.device.buffers import StepBuffers
from worker_service.runner.device.sampler import DeviceSampler, LogprobTensors
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.logprobs import of_prompt, prompt_logits, table_of
from worker_service.sampling.sampler import NO_TOKEN, Samples
from worker_service.sampling.sampling_table import NO_LOGPROBS


class DevicePass(NamedTuple):
    """A forward pass that was queued on the device."""

    rows: SamplingRows
    logits: Callable[[], Tensor]
    """Queues the LM head. Returns float32 [n, vocab_size], which may be overwritten."""

    reported: list[Tensor]
    """`StepReports.columns` on the device."""

    hidden: Tensor | None = None
    """[num_tokens, hidden_size], of a pass that was computed eagerly."""

    captured: tuple[Tensor, ...] = ()
    """See `Computed`; valid until the next pass."""

    sample: Callable[[], None] | None = None
    """Replays the graph that samples after this pass; None if the pass was computed eagerly."""

    outcome: Tensor | None = None
    """int64 [n]: where that graph leaves a token or negative outcome per row."""


class VerifiedDrafts(NamedTuple):
    """The drafts of a step's rows that sample."""

    starts: Int64Array
    """[n]: the first of the places that are sampled at of each row."""

    counts: Int64Array
    """[n]: drafts of each row."""

    tokens: Int64Array
    """[num_sampling]: the draft that follows each place; any number after a row's last one."""

    @classmethod
    def of(cls, rows: StepRows, table: SequenceTable) -> "VerifiedDrafts":
        """Those of a step's rows, which are in the table after the sequences' last tokens."""
        assert rows.drafts is not None
        starts, row_ids = np.flatnonzero(rows.drafts.offsets == 0), rows.row_ids[rows.sampling]
        places = table.num_tokens[row_ids] + rows.drafts.offsets
        counts = rows.drafts.counts[rows.sampling[starts]].astype(np.int64)
        return cls(starts, counts, table.token_ids[row_ids, places].astype(np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReports:
    """What the rows of a step report, on the host."""

    with_logprobs: Int64Array
    """[m]: indices of the sampling rows that request log probabilities."""

    num_top: Int32Array
    """[m]: number of most probable tokens that each of these rows requests."""

    with_candidates: Int64Array
    """[k]: indices of the sampling rows whose tokens the core chooses."""

    num_candidates: Int32Array
    """[k]: number of candidates of each of these rows."""

    spans: Sequence[PromptSpan]
    """Prompt tokens whose log probabilities are reported."""

    targets: Int64Array
    """The tokens of all spans, concatenated."""

    adapters: Sequence[Sequence[AdapterRows]]
    """Of each span, the adapter of all of its tokens, or none."""

    reporting: Int64Array
    """The plan's rows with spans that do not sample."""

    reporting_ids: Int64Array
    """Their rows of the table."""

    verified: VerifiedDrafts | None
    """None if no row has drafts."""

    counted: Int64Array | None
    """[2, m]: indices of the sampling rows, and drafts before them that their penalties count;
    None unless rows have drafts and some have penalties."""

    @classmethod
    def of(cls, rows: StepRows, table: SequenceTable) -> "StepReports":
        """What these rows have requested."""
        row_ids = rows.row_ids[rows.sampling]
        spans = [*prompt_spans(rows, table)] if table.prompt_logprobs else []
        num_top = table.sampling.num_logprobs[row_ids]
        num_candidates = table.sampling.num_candidates[row_ids]
        with_logprobs = np.flatnonzero(num_top != NO_LOGPROBS)
        with_candidates = np.flatnonzero(num_candidates)
        reporting = np.setdiff1d([span.row for span in spans], rows.sampling).astype(np.int64)
        tokens = [table.token_ids[span.row_id, span.start : span.end] for span in spans]
        return cls(
            with_logprobs=with_logprobs,
            num_top=num_top[with_logprobs],
            with_candidates=with_candidates,
            num_candidates=num_candidates[with_candidates],
            spans=spans,
            adapters=[_adapter_of(span, table) for span in spans],
            targets=np.concatenate([*tokens, np.empty(0, np.int64)]).astype(np.int64),
            reporting=reporting,
            reporting_ids=rows.row_ids[reporting],
            verified=None if rows.drafts is None else VerifiedDrafts.of(rows, table),
            counted=_counted_drafts(rows, table),
        )

    @property
    def columns(self) -> list[Column]:
        """The columns that are sent to the device."""
        reported = [self.with_logprobs, self.with_candidates, self.targets, self.reporting_ids]
        return [
            *reported,
            *(self.verified or ()),
            *([] if self.counted is None else [self.counted]),
        ]

    @property
    def is_empty(self) -> bool:
        """Whether no row reports anything, or verifies drafts."""
        return self.verified is None and not any(map(len, self.columns))


def _counted_drafts(rows: StepRows, table: SequenceTable) -> Int64Array | None:
    """`StepReports.counted`."""
    if rows.drafts is None or not table.sampling.edits:
        return None
    row_ids, offsets = rows.row_ids[rows.sampling], rows.drafts.offsets
    counted = [
        np.stack([np.full(edited.num_drafts, edited.row), edited.drafts.astype(np.int64)])
        for edited in table.edited_rows(row_ids, table.num_tokens[row_ids] + offsets)
        if edited.edits.occurrences is not None
    ]
    return np.concatenate(counted, axis=1) if counted else None


def _adapter_of(span: PromptSpan, table: SequenceTable) -> Sequence[AdapterRows]:
    digest = table.adapters.get(span.row_id)
    return () if digest is None else (AdapterRows(digest, None),)


def logprob_entries(
    rows: Int64Array, num_top: Int32Array, columns: Sequence[Column]
) -> dict[int, TokenLogprobs]:
    """Log probabilities by row. num_top: that each of these rows requests; columns: those of
    `LogprobTensors`."""
    table, counts = table_of(*columns), zip(rows.tolist(), num_top.tolist(), strict=True)
    return {row: table.row(index, count) for index, (row, count) in enumerate(counts)}


class FetchedReports(NamedTuple):
    """Host memory that holds a step's reports once the device is done."""

    reports: StepReports | None = None
    logprobs: Sequence[Column] = ()
    """Of `LogprobTensors`; empty if no row has any."""

    candidates: Sequence[Column] = ()
    """Of `CandidateTensors`; empty if no row has any."""

    prompts: Sequence[Sequence[Sequence[Column]]] = ()
    """Of each span, of each of its pieces, those of `LogprobTensors`."""

    vectors: Sequence[tuple[PooledRows, Column]] = ()
    """What rows bring, with its values on the host."""

    num_accepted: Column | None = None
    """[n]: accepted drafts of each row that samples; None if none has drafts."""

    def kept(self, numbers: Int64Array) -> Iterator[tuple[int, Int64Array]]:
        """The rows with accepted drafts, by the place of their first token, and the tokens that
        were sampled after these. numbers: the outcome of each place."""
        if self.reports is None or self.reports.verified is None or self.num_accepted is None:
            return
        starts, _, _ = self.reports.verified
        for start, count in zip(starts.tolist(), self.num_accepted.tolist(), strict=True):
            if count:
                yield start, numbers[start + 1 : start + 1 + count]

    def add_to(
        self,
        outcome: StepOutcome,
        rows: Int64Array,
        offsets: Int64Array | None,
        numbers: Int64Array,
    ) -> None:
        """Add the reports of rows that have not failed. rows: the plan's row of each place that is
        sampled at; offsets: the drafts before each place, None if there are none; numbers: their
        tokens or negative outcomes."""
        reports = self.reports
        for pooled, values in self.vectors:
            outcome.add_vectors(pooled, values)
        if reports is None:
            return
        outcome.kept = {int(rows[start]): tokens for start, tokens in self.kept(numbers)}
        if reports.verified is not None:
            outcome.num_drafts = np.zeros(len(outcome.tokens), np.int32)
            outcome.num_drafts[rows[reports.verified.starts]] = reports.verified.counts
        samples = self._samples(numbers)
        outcome.add_logprobs(samples.logprobs, rows, offsets)
        outcome.candidates = {int(rows[i]): entry for i, entry in samples.candidates.items()}
        for span, pieces in zip(reports.spans, self.prompts, strict=True):
            if pieces and span.row not in outcome.errors:
                tables = [table_of(*piece) for piece in pieces]
                prompt = of_prompt(span.start, span.num_top, tables)
                if np.isfinite(prompt.logprobs).all():
                    outcome.prompt_logprobs[span.row] = prompt

    def _samples(self, numbers: Int64Array) -> Samples:
        """What was sampled; numbers: the token or negative outcome of each place."""
        reports = self.reports
        logprobs: dict[int, TokenLogprobs] = {}
        candidates: dict[int, Candidates] = {}
        if reports is not None and self.logprobs:
            found = logprob_entries(reports.with_logprobs, reports.num_top, self.logprobs)
            logprobs = {place: entry for place, entry in found.items() if numbers[place] >= 0}
        if reports is not None and self.candidates:
            candidates = self._candidates_of(numbers, reports)
        return Samples(
            tokens=np.maximum(numbers, NO_TOKEN),
            non_finite=np.flatnonzero(numbers == NON_FINITE),
            no_candidates=np.flatnonzero(numbers == NO_CANDIDATES),
            logprobs=logprobs,
            candidates=candidates,
        )

    def _candidates_of(self, numbers: Int64Array, reports: StepReports) -> dict[int, Candidates]:
        token_ids, logprobs = self.candidates[0].astype(np.int32), self.candidates[1].copy()
        counts = np.minimum(np.isfinite(logprobs).sum(axis=1), reports.num_candidates).tolist()
        places = zip(reports.with_candidates.tolist(), counts, strict=True)
        return {
            place: Candidates(token_ids=token_ids[at, :count], logprobs=logprobs[at, :count])
            for at, (place, count) in enumerate(places)
            if numbers[place] == NOT_SAMPLED
        }


class Sampled(NamedTuple):
    """Sampling that was queued on the device."""

    outcome: Tensor
    """int64 [n], on the device: a token or a negative outcome of each row that samples."""

    numbers: Int64Array
    """Host memory that will hold the same, then those of the rows that only report on their
    prompts."""

    reports: FetchedReports = FetchedReports()

    num_accepted: Tensor | None = None
    """`FetchedReports.num_accepted` on the device."""


def sample(
    queued: DevicePass,
    reports: StepReports,
    sampler: DeviceSampler,
    model: Model,
    buffers: StepBuffers,
    pooled: Sequence[PooledRows] = (),
) -> Sampled:
    """Queue sampling and reports, operation by operation, and their copy to the host. pooled: what
    else is copied."""
    rows, (with_logprobs, with_candidates, _, reporting) = queued.rows, queued.reported[:4]
    # A row whose prompt has an invalid log probability has failed before it samples.
    prompts = [[*pieces] for pieces in _prompt_pieces(queued, reports, sampler, model)]
    num_rows = len(rows.row_ids)
    numbers = torch.empty(num_rows + len(reporting), dtype=torch.int64, device=reporting.device)
    outcome = numbers[:num_rows]
    logprobs: Sequence[Tensor] = ()
    candidates: Sequence[Tensor] = ()
    accepted: Sequence[Tensor] = ()
    logits = queued.logits() if num_rows else None
    if logits is not None and sampler.samples:
        # Log probabilities and candidates need logits before they are edited in place below.
        raw = logits.index_select(0, with_logprobs) if len(with_logprobs) else None
        if len(with_candidates):
            offering = logits.index_select(0, with_candidates), rows.select(with_candidates)
            candidates = sampler.candidates(*offering, int(reports.num_candidates.max()))
        if reports.verified is not None:
            counted = next(iter(queued.reported[7:]), None)
            sampler.sample_apart(logits, rows, counted, outcome)
        else:
            sampler.sample(logits, rows, outcome)
        if raw is not None:
            chosen = outcome.index_select(0, with_logprobs)
            logprobs = sampler.logprobs(raw, chosen, int(reports.num_top.max()))
    if len(reporting) and sampler.samples:
        numbers[num_rows:] = sampler.failures(reporting)
    if len(numbers):
        sampler.share(rows, numbers)
    if reports.verified is not None:
        accepted = [sampler.accept(outcome, rows, queued.reported[4:7])]
    of_prompts = (tensor for pieces in prompts for piece in pieces for tensor in piece)
    vectors = (part.values for part in pooled)
    fetched = iter(
        buffers.fetch([numbers, *logprobs, *candidates, *of_prompts, *vectors, *accepted])
    )
    on_host = next(fetched)
    found = FetchedReports(
        reports,
        [*islice(fetched, len(logprobs))],
        [*islice(fetched, len(candidates))],
        [[[*islice(fetched, len(piece))] for piece in pieces] for pieces in prompts],
        [(rows, next(fetched)) for rows in pooled],
        next(fetched, None),
    )
    return Sampled(outcome, on_host, found, next(iter(accepted), None))


def _prompt_pieces(
    queued: DevicePass,
    reports: StepReports,
    sampler: DeviceSampler,
    model: Model,
) -> Iterator[Iterator[LogprobTensors]]:
    """Yield the log probabilities of each span's tokens, in pieces; none unless this rank
    samples."""
    start, targets = 0, queued.reported[2]
    for span, adapters in zip(reports.spans, reports.adapters, strict=True):
        assert queued.hidden is not None, "a step with prompts is computed eagerly"
        count = span.end - span.start
        hidden = queued.hidden[span.first_state : span.first_state + count]
        pieces = prompt_logits(model, hidden, targets[start : start + count], adapters)
        yield (
            sampler.prompt_logprobs(*piece, span.num_top, span.row_id)
            for piece in pieces
            if sampler.samples
        )
        start += count
