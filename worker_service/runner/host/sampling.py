"""Sampling of a batch's rows on the host: tokens, log probabilities and failures by row."""

from collections.abc import Iterable, Mapping

import numpy as np

from pagewire_kernels.batch import AdapterRows
from worker_service.array_types import Int64Array
from worker_service.models.interface import Model
from worker_service.plan import RowErrorReason
from worker_service.runner.batch.forward import ForwardPass
from worker_service.runner.batch.sampling import prompt_spans, sampling_batch
from worker_service.runner.batch.step_outcome import StepOutcome
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.drafting.speculation import Speculation
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.logprobs import prompt_logprobs
from worker_service.sampling.sampler import NO_TOKEN, Samples, sample
from worker_service.structured.masks import MaskedRows


def sample_rows(
    outcome: StepOutcome,
    rows: StepRows,
    forward: ForwardPass,
    masked: MaskedRows | None,
    table: SequenceTable,
    speculation: Speculation | None,
) -> None:
    """Sample a token of each row that samples, and append it to its sequence."""
    assert forward.logits is not None
    offsets = None if rows.drafts is None else rows.drafts.offsets
    batch = sampling_batch(rows.row_ids[rows.sampling], table, masked, offsets)
    samples = sample(forward.logits, batch, table.sampling, forward.largest)
    failed = {RowErrorReason.NO_CANDIDATES: samples.no_candidates}
    if masked is not None:
        failed[RowErrorReason.CONSTRAINT] = masked.rows[masked.failed]
    failed[RowErrorReason.NON_FINITE_LOGITS] = samples.non_finite
    settle(outcome, rows, samples, failed, table, speculation)


def settle(
    outcome: StepOutcome,
    rows: StepRows,
    samples: Samples,
    failed: Mapping[RowErrorReason, Int64Array],
    table: SequenceTable,
    speculation: Speculation | None,
) -> None:
    """Append to the sequences what was sampled up to the first draft that was wrong. failed: the
    places in `rows.sampling` that have failed; a row's last reason counts."""
    errors, tokens, sampling = outcome.errors, samples.tokens, rows.sampling
    is_first = np.ones(len(sampling), np.bool_)
    if rows.drafts is not None and speculation is not None:
        outcome.num_drafts = rows.drafts.counts
        outcome.kept = speculation.accepted(rows, tokens, table)
        is_first = rows.drafts.offsets == 0
    for reason, places in failed.items():
        if len(places):
            _fail(outcome, rows, sampling[places[is_first[places]]].tolist(), reason, table)
    sampling, tokens = sampling[is_first], tokens[is_first]
    outcome.tokens[sampling] = tokens
    outcome.tokens[list(errors)] = NO_TOKEN
    if samples.logprobs:
        offsets = None if rows.drafts is None else rows.drafts.offsets
        outcome.add_logprobs(samples.logprobs, rows.sampling, offsets)
    for index, offered in samples.candidates.items():
        if (row := int(rows.sampling[index])) not in errors:
            outcome.candidates[row] = offered
    sampled = sampling
    if errors or outcome.candidates:
        sampled = sampling[outcome.tokens[sampling] != NO_TOKEN]
    table.append_tokens(rows.row_ids[sampled], outcome.tokens[sampled])
    for row, further in outcome.kept.items():
        row_id = int(rows.row_ids[row])
        table.insert_kept(row_id, int(table.num_tokens[row_id]), further)


def report_prompts(
    outcome: StepOutcome,
    rows: StepRows,
    forward: ForwardPass,
    model: Model,
    table: SequenceTable,
    *,
    samples: bool,
) -> None:
    """Add the log probabilities of the prompt tokens that the rows' hidden states predict. samples:
    whether this rank does, which fails a row whose log probabilities are not finite."""
    for span in prompt_spans(rows, table):
        num_tokens = span.end - span.start
        digest = table.adapters.get(span.row_id)
        entry = prompt_logprobs(
            model,
            forward.hidden[span.first_state : span.first_state + num_tokens],
            table.token_ids[span.row_id, span.start : span.end],
            span.start,
            span.num_top,
            () if digest is None else [AdapterRows(digest, None)],
        )
        if np.isfinite(entry.logprobs).all():
            outcome.prompt_logprobs[span.row] = entry
        elif samples:
            _fail(outcome, rows, [span.row], RowErrorReason.NON_FINITE_LOGITS, table)


def _fail(
    outcome: StepOutcome,
    rows: StepRows,
    failed: Iterable[int],
    reason: RowErrorReason,
    table: SequenceTable,
) -> None:
    """Fail some rows; their sequences compute nothing more until they are forgotten."""
    for row in failed:
        outcome.errors[row] = reason
        table.failures[int(rows.row_ids[row])] = reason
