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


def choose_drafts(
    rows: StepRows,
    lookahead: Int32Array,
    sequences: SequenceState,
    drafter: Drafter,
    lengths: DraftLengths,
) -> dict[int, Int32Array]:
    """By row, the drafts that the plan allows, the drafter proposes and `lengths` chooses."""
    asked = np.flatnonzero((lookahead > 0) & rows.computes)
    asked = asked[sequences.table.may_draft(rows.row_ids[asked])]
    row_ids = rows.row_ids[asked]
    most = lookahead[asked].tolist()
    if not drafter.takes_time:
        found = _propose(row_ids, most, sequences, drafter)
        most = [len(drafts) for drafts in found]
    proposals = [Proposal(*each) for each in zip(row_ids.tolist(), most, strict=True)]
    num_tokens = int(rows.num_tokens.sum())
    chosen = lengths.choose(proposals, num_tokens, len(rows.sampling)) if len(asked) else []
    if drafter.takes_time:
        found = _propose(row_ids, chosen, sequences, drafter)
    triples = zip(asked.tolist(), found, chosen, strict=True)
    return {row: drafts[:count] for row, drafts, count in triples}


def choose_next_drafts(
    rows: StepRows,
    max_drafts: int,
    sequences: SequenceState,
    drafter: Drafter,
    lengths: DraftLengths,
) -> dict[int, Int32Array]:
    """By row, drafts for the sequence's next row, whose step is not known yet: it is assumed to be
    this one again. They end where the sequence has no blocks so far."""
    table, row_ids = sequences.table, rows.row_ids
    ends = np.minimum(table.num_blocks[row_ids] * table.block_size, table.max_model_len)
    lookahead = np.clip(ends - table.num_tokens[row_ids], 0, max_drafts).astype(np.int32)
    is_over = np.isin(row_ids, list(table.failures))
    lookahead[~rows.sample | is_over] = 0
    own = replace(rows, num_tokens=np.ones_like(rows.num_tokens), sampling=np.unique(rows.sampling))
    return choose_drafts(own, lookahead, sequences, drafter, lengths)


def take_next_drafts(
    rows: StepRows, lookahead: Int32Array, table: SequenceTable
) -> dict[int, Int32Array]:
    """By row, the drafts that were chosen for it in the step before, as many as the plan allows."""
    row_ids = rows.row_ids.tolist()
    return {
        row: table.next_drafts.pop(row_ids[row])[: lookahead[row]]
        for row in np.flatnonzero(rows.computes & rows.sample).tolist()
        if row_ids[row] in table.next_drafts
    }


def add_drafts(rows: StepRows, drafts: dict[int, Int32Array], table: SequenceTable) -> StepRows:
    """The rows with drafts, which are written behind their sequences' last tokens."""
    counts = np.zeros(len(rows.row_ids), np.int32)
    for row, tokens in drafts.items():
        counts[row] = len(tokens)
        row_id = int(rows.row_ids[row])
        end = int(table.num_tokens[row_id])
        table.token_ids[row_id, end : end + counts[row]] = tokens
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


def _propose(
    row_ids: Int64Array, counts: list[int], sequences: SequenceState, drafter: Drafter
) -> list[Int32Array]:
    """Drafts of these sequences, up to the first that a constraint does not allow."""
    found = drafter.propose(row_ids, counts, sequences.table)
    for row in sequences.constrained_rows(row_ids):
        assert sequences.masks is not None
        found[row.row] = found[row.row][: sequences.masks.num_allowed(row, found[row.row])]
    return found


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
