"""What a step samples, and what it reports of prompts."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from worker_service.array_types import Int64Array
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.sampler import SamplingBatch
from worker_service.structured.masks import MaskedRows


def sampling_batch(
    row_ids: Int64Array,
    table: SequenceTable,
    masked: MaskedRows | None = None,
    num_drafts: Int64Array | None = None,
) -> SamplingBatch:
    """The rows of the table that sample in a step, as a sampler takes them. num_drafts: tokens
    after each one's last that count as output."""
    ends = table.num_tokens[row_ids]
    if num_drafts is not None:
        ends = ends + num_drafts
    edits = table.sampling.edits
    return SamplingBatch(
        row_ids=row_ids,
        positions=ends - table.num_prompt_tokens[row_ids],
        edited=table.edited_rows(row_ids, ends) if edits else [],
        masked=masked,
    )


class PromptSpan(NamedTuple):
    """Consecutive prompt tokens of a row whose log probabilities are reported."""

    row: int
    """Of the plan."""

    row_id: int
    start: int
    """Position of the first."""

    end: int
    first_state: int
    """The hidden state in the forward pass that predicts the first; the others follow."""

    num_top: int


def prompt_spans(rows: StepRows, table: SequenceTable) -> Iterator[PromptSpan]:
    """The spans that a step's hidden states predict, of the sequences that ask for them."""
    ends = rows.ends()
    for row in np.flatnonzero(rows.computes).tolist():
        row_id, num_tokens = int(rows.row_ids[row]), int(rows.num_tokens[row])
        request = table.prompt_logprobs.get(row_id)
        if request is None:
            continue
        # The hidden state at position p predicts the token at p + 1.
        first = int(rows.firsts[row]) + 1
        start = max(first, request.start)
        end = min(first + num_tokens, int(table.num_prompt_tokens[row_id]))
        if start < end:
            state = int(ends[row]) - num_tokens + start - first
            yield PromptSpan(row, row_id, start, end, state, request.num_top)
