"""Speculation: guessed tokens, called drafts, are computed with a row and kept while right.

The step computes a row's last token and its drafts together, reading the weights once, and samples
at each of these positions with the position's own random number, as if the drafts before it had
been output. A sampled token that equals the draft in its place is what the sequence would have
sampled there without drafts, and so is the one token after those: the context is the same, and on
a batch-invariant model so are the logits. So a stream's tokens are bitwise those of no speculation,
whatever the drafts are. Nothing is computed from a refused draft: its keys and values lie after
the sequence's last computed token and are overwritten by its next row.
"""

from dataclasses import replace

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.runner.batch import Drafts, StepRows
from worker_service.runner.draft_lengths import DraftLengths, Proposal
from worker_service.runner.drafter import Drafter
from worker_service.runner.sequence_state import SequenceState
from worker_service.runner.sequence_table import SequenceTable
from worker_service.sampling.sampler import NO_TOKEN
from worker_service.sampling.sampling_table import NO_LOGPROBS


def add_drafts(
    rows: StepRows,
    lookahead: Int32Array,
    sequences: SequenceState,
    drafter: Drafter,
    lengths: DraftLengths,
) -> StepRows:
    """The rows with the drafts that the plan allows, the drafter proposes and `lengths` chooses,
    which are written behind their sequences' last tokens."""
    table = sequences.table
    may_draft = np.flatnonzero((lookahead > 0) & rows.computes).tolist()
    asked = [row for row in may_draft if _may_draft(int(rows.row_ids[row]), sequences)]
    row_ids = rows.row_ids[asked]
    most = lookahead[asked].tolist()
    if not drafter.takes_time:
        found = drafter.propose(row_ids, most, table)
        most = [len(drafts) for drafts in found]
    proposals = [Proposal(*each) for each in zip(row_ids.tolist(), most, strict=True)]
    num_tokens = int(rows.num_tokens.sum())
    chosen = lengths.choose(proposals, num_tokens, len(rows.sampling)) if asked else []
    if drafter.takes_time:
        found = drafter.propose(row_ids, chosen, table)
    counts = np.zeros(len(rows.row_ids), np.int32)
    for row, row_id, drafts, count in zip(asked, row_ids.tolist(), found, chosen, strict=True):
        counts[row] = len(drafts[:count])
        end = int(table.num_tokens[row_id])
        table.token_ids[row_id, end : end + counts[row]] = drafts[:count]
    if not counts.any():
        return rows
    places = 1 + counts[rows.sampling].astype(np.int64)
    firsts = np.repeat(np.cumsum(places) - places, places)
    return replace(
        rows,
        num_tokens=rows.num_tokens + counts,
        are_decodes=False,
        sampling=np.repeat(rows.sampling, places),
        drafts=Drafts(counts, np.arange(len(firsts)) - firsts),
    )


def _may_draft(row_id: int, sequences: SequenceState) -> bool:
    """Whether each position of a sequence can be sampled before the tokens before it are known:
    grammars advance token by token, and a result has room for the log probabilities of one token
    of a row."""
    table = sequences.table
    sampling = table.sampling
    if sampling.num_logprobs[row_id] != NO_LOGPROBS or sampling.num_candidates[row_id] > 0:
        return False
    if row_id in table.prompt_logprobs:
        return False
    return sequences.masks is None or not sequences.masks.constrained(np.array([row_id]))


def kept_drafts(rows: StepRows, tokens: Int64Array, table: SequenceTable) -> dict[int, Int64Array]:
    """By row, the tokens sampled after drafts that are right, before any of them is appended.

    tokens: [num_sampling]; NO_TOKEN where none could be sampled, which ends what is kept.
    """
    kept = {}
    assert rows.drafts is not None
    for start in np.flatnonzero(rows.drafts.offsets == 0).tolist():
        row = int(rows.sampling[start])
        num_drafts = int(rows.drafts.counts[row])
        row_id = int(rows.row_ids[row])
        end = int(table.num_tokens[row_id])
        drafts = table.token_ids[row_id, end : end + num_drafts]
        sampled = tokens[start : start + 1 + num_drafts]
        num_right = int(np.argmin(np.append(drafts == sampled[:-1], False)))
        further = sampled[1 : 1 + num_right]
        if num_right and further[-1] == NO_TOKEN:
            further = further[:-1]
        if len(further):
            kept[row] = further
    return kept
