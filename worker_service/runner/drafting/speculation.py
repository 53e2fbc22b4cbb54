"""Speculative decoding: proposed tokens, called drafts, are verified by the model in one step.

A step computes a row's last token and its drafts together, reading the weights once, and samples at
each of these positions with the position's own random number, as if the drafts before it had been
output. Drafts are accepted up to the first one that differs from the token sampled in its place.
The tokens sampled up to and including that position are those that the sequence would have sampled
without drafts: the context is the same and, if the model is batch-invariant, so are the logits. A
stream's tokens are therefore bitwise those of decoding without speculation, whatever the drafts
are. The KV of a rejected draft lies after the sequence's last computed token, and is overwritten by
its next row.

`DraftLengths` chooses how many drafts each row computes: the numbers that maximize the expected
tokens per microsecond of the step. Two quantities are measured while sequences decode: how often
drafts are accepted, and the time that one more token adds to a step.

A draft that followed a long suffix of the sequence elsewhere is more likely to be accepted than one
that followed a short suffix, and each accepted draft makes the suffix of the next one longer. So a
probability of acceptance is kept for each length: a decaying average of the sequence's recent
drafts, with that of all sequences as its prior.

Other processes may double the time of a step, while sixteen tokens often take hardly longer than
one. So the time per token is estimated from consecutive steps with different numbers of tokens: the
median of their time differences per token, weighted by the number of tokens (Theil 1950, Sen 1968).

Old measurements lose weight, even in steps that compute no drafts, so that drafts that were not
worth their time are tried again later.

Looking for drafts takes time as well. A sequence for which nothing was found several times repeats
neither its prompt nor itself, and is searched less often until some of its drafts are computed.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from torch import Tensor

from worker_service.array_types import Int32Array, Int64Array
from worker_service.plan import StepPlan
from worker_service.runner.batch.step_rows import Drafts, StepRows
from worker_service.runner.drafting.draft_states import DraftStates
from worker_service.runner.drafting.drafter import Draft, Drafter
from worker_service.runner.drafting.rank_drafts import ChosenDrafts, RankDrafts
from worker_service.runner.state.sequence_state import SequenceState
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.sampler import NO_TOKEN

_NUM_PAIRS = 48
"""Pairs of consecutive steps from which the time per token is estimated."""

_NUM_STEPS = 8
"""Last steps from which the fixed time of a step is estimated."""

_LENGTHS = (0, 1, 2, 3, 4, 5, 8, 16)
"""Least lengths of the suffixes whose drafts share one probability of acceptance. The first is of
all drafts that followed none."""

_FIRST_CHANCES = (0.5, 0.3, 0.55, 0.65, 0.75, 0.8, 0.9, 0.97)
"""Probabilities of acceptance that are assumed at first, by suffix length: about those of n-gram
drafts for SmolLM2."""

_ROW_DECAY = 0.95
"""Weight of a sequence's earlier drafts relative to those of the next step."""

_ROW_SKIP_DECAY = 0.97
"""The same for a step in which the sequence computes none of its drafts."""

_SHARED_DECAY, _SHARED_SKIP_DECAY = 0.995, 0.99
"""The same for the drafts of all sequences."""

_PRIOR_TRIALS = 4.0
"""Weight of the prior of a probability of acceptance, in drafts."""

_MIN_GAIN = 1.03
"""Minimum gain in expected tokens per microsecond for which drafts are computed, as a margin for
errors of the estimates."""

_EMPTY_SEARCHES, _MAX_DOUBLED = 4, 4
"""Searches without a draft after which the number of tokens between searches doubles, and how often
it does."""

_EQUAL_STEPS, _MAX_EQUAL_STEPS = 2, 256
"""While all steps have the same number of tokens, some steps compute no drafts, to measure their
cost: first after two steps, then after twice as many each time, up to the second number."""

_NO_ROWS = np.empty(0, np.int64)

_KINDS = [bisect_right(_LENGTHS, length) - 1 for length in range(_LENGTHS[-1] + 1)]
"""By suffix length, up to the last of `_LENGTHS`: the index of its probability."""


def _kind(num_matched: int, place: int) -> int:
    """The kind of a proposal's draft with `place` drafts before it, all accepted."""
    return _KINDS[min(num_matched + place, _LENGTHS[-1])] if num_matched else 0


class _Acceptance:
    """Numbers of drafts that were verified, and of those that were accepted, with decay, by kind:
    the index in `_LENGTHS` of the suffix that they followed."""

    def __init__(self) -> None:
        self._right = [0.0] * len(_LENGTHS)
        self._verified = [0.0] * len(_LENGTHS)

    def record(self, kinds: list[int], num_right: int, decay: float) -> None:
        """Add the verified drafts of a step, of which the first `num_right` were accepted."""
        for kind in set(kinds):
            self.decay(kind, decay)
        for place, kind in enumerate(kinds):
            self._verified[kind] += 1
            self._right[kind] += place < num_right

    def decay(self, kind: int, factor: float) -> None:
        """Multiply the weight of all drafts of a kind so far by `factor`."""
        self._right[kind] *= factor
        self._verified[kind] *= factor

    def chance(self, kind: int, prior: float) -> float:
        """Estimate the probability of acceptance. prior: the estimate without any draft."""
        trials = self._verified[kind] + _PRIOR_TRIALS
        return (self._right[kind] + _PRIOR_TRIALS * prior) / trials


class _StepTimes:
    """A linear model of the time of decode steps: a fixed time, and a time per token."""

    def __init__(self) -> None:
        self._pairs = deque[tuple[float, int]](maxlen=_NUM_PAIRS)
        """Differences of consecutive steps: (microseconds per token, number of tokens)."""
        self._steps = deque[tuple[int, int]](maxlen=_NUM_STEPS)
        """(number of tokens, microseconds) of the last steps."""
        self._token_us = 0.0
        self._base_us = 1.0
        self.num_equal = 0
        """Last steps that had the same number of tokens as the step before."""

    def record(self, num_tokens: int, time_us: int) -> None:
        """Add a measured step."""
        self.num_equal += 1
        if self._steps:
            last_tokens, last_us = self._steps[-1]
            if num_tokens != last_tokens:
                difference = num_tokens - last_tokens
                self._pairs.append(((time_us - last_us) / difference, abs(difference)))
                self.num_equal = 0
                self._token_us = max(0.0, _weighted_median(self._pairs))
        self._steps.append((num_tokens, time_us))
        times = sorted(time_us - self._token_us * num_tokens for num_tokens, time_us in self._steps)
        self._base_us = max(1.0, times[len(times) // 2])

    @property
    def last_tokens(self) -> int:
        """Number of tokens of the last step; 0 before the first."""
        return self._steps[-1][0] if self._steps else 0

    def of(self, num_tokens: int) -> float:
        """Expected time of a step, in microseconds. All are equal until two steps with different
        numbers of tokens were measured."""
        return self._base_us + self._token_us * num_tokens


def _weighted_median(values: "deque[tuple[float, int]]") -> float:
    """Return the weighted median. values: (value, weight), not empty."""
    ordered = sorted(values)
    weights = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(weights, weights[-1] / 2)][0]


class Proposal(NamedTuple):
    """The drafts that a row may compute."""

    row_id: int
    num_drafts: int
    """Number of drafts that are available."""
    num_matched: int = 0
    """See `Draft.num_matched`."""


@dataclass(slots=True)
class _Row:
    """What is known of a sequence's drafts."""

    acceptance: _Acceptance = field(default_factory=_Acceptance)
    num_matched: int = 0
    """`num_matched` of the last drafts."""

    num_empty: int = 0
    """Last searches that found no drafts; half as many after one that did."""


class DraftLengths:
    """Chooses how many drafts rows compute, which affects the time of steps, but not tokens."""

    def __init__(self) -> None:
        self._rows = defaultdict[int, _Row](_Row)
        self._shared = _Acceptance()
        self._times = _StepTimes()
        self._equal_steps = _EQUAL_STEPS

    def forget(self, row_ids: Int64Array) -> None:
        """Drop the statistics of the sequences in these rows of the table."""
        for row_id in row_ids.tolist():
            self._rows.pop(row_id, None)

    def forget_all(self) -> None:
        """Drop the statistics of all sequences, but keep the times of steps."""
        self._rows.clear()

    def is_due(self, row_id: int, num_tokens: int) -> bool:
        """Whether to search for drafts of a sequence that has this number of tokens."""
        num_doubled = min(self._rows[row_id].num_empty // _EMPTY_SEARCHES, _MAX_DOUBLED)
        return num_tokens % (1 << num_doubled) == 0

    def choose(self, proposals: list[Proposal], num_tokens: int, num_sampling: int) -> list[int]:
        """Return the number of drafts to compute of each proposal.

        num_tokens, num_sampling: tokens that the step computes, and samples, without drafts.
        """
        counts, times = [0] * len(proposals), self._times
        available = [index for index, proposal in enumerate(proposals) if proposal.num_drafts]
        rows = [self._rows[proposal.row_id] for proposal in proposals]
        for row, proposal in zip(rows, proposals, strict=True):
            row.num_empty = row.num_empty // 2 if proposal.num_drafts else row.num_empty + 1
        if not available:
            return counts
        if times.num_equal >= self._equal_steps and times.last_tokens > num_tokens:
            self._equal_steps = min(2 * self._equal_steps, _MAX_EQUAL_STEPS)
            return counts
        priors = [self._shared.chance(kind, first) for kind, first in enumerate(_FIRST_CHANCES)]

        def chance(index: int) -> float:
            """That a proposal's next draft is accepted, if those that are chosen are."""
            kind = _kind(proposals[index].num_matched, counts[index])
            return rows[index].acceptance.chance(kind, priors[kind])

        # The next draft of each proposal, the most likely first. Probabilities do not increase from
        # one draft of a proposal to the next, so once the rate falls, it does not rise again.
        further = [(-chance(index), index) for index in available]
        heapify(further)
        expected = float(num_sampling)
        rate = min_rate = expected / times.of(num_tokens)
        while further:
            negated, index = further[0]
            next_rate = (expected - negated) / times.of(num_tokens + 1)
            if next_rate <= rate:
                break
            rate, expected, num_tokens = next_rate, expected - negated, num_tokens + 1
            counts[index] += 1
            if counts[index] < proposals[index].num_drafts:
                heapreplace(further, (negated * chance(index), index))
            else:
                heappop(further)
        if rate <= _MIN_GAIN * min_rate:
            counts = [0] * len(proposals)
        for index in available:
            row = rows[index]
            row.num_matched = proposals[index].num_matched
            if counts[index]:
                row.num_empty = 0
            else:
                row.acceptance.decay(_kind(row.num_matched, 0), _ROW_SKIP_DECAY)
        if not any(counts):
            for kind in {_kind(proposals[index].num_matched, 0) for index in available}:
                self._shared.decay(kind, _SHARED_SKIP_DECAY)
        return counts

    def record_drafts(self, row_id: int, num_drafts: int, num_right: int) -> None:
        """Record the number of drafts that a sequence computed, and of those that were accepted."""
        row = self._rows[row_id]
        # Drafts after the first rejected one were not verified.
        num_verified = min(num_right + 1, num_drafts)
        kinds = [_kind(row.num_matched, place) for place in range(num_verified)]
        row.acceptance.record(kinds, num_right, _ROW_DECAY)
        self._shared.record(kinds, num_right, _SHARED_DECAY)

    def record_step(self, num_tokens: int, time_us: int) -> None:
        """Record the time of a decode step. num_tokens: drafts included."""
        self._times.record(num_tokens, time_us)


class Speculation:
    """The drafts of a runner's rows: those that a step computes, and those that are accepted.

    If several ranks share the model, the one that samples chooses, and all ranks compute the
    drafts. Hosts that sample choose a sequence's next drafts as soon as they have sampled, and
    broadcast them with the tokens. Where steps are launched ahead, drafts are chosen and broadcast
    when a step is launched.
    """

    def __init__(
        self,
        drafter: Drafter | None = None,
        lengths: DraftLengths | None = None,
        max_drafts: int = 0,
        *,
        edits_see_drafts: bool = True,
        states: DraftStates | None = None,
        ranks: RankDrafts | None = None,
    ) -> None:
        """drafter: None on a rank that does not sample. lengths: of an earlier runner, whose times
        of steps are still valid. max_drafts: of a row, the same on all ranks that share a model.
        edits_see_drafts: False where edits that depend on the last tokens are made before the step:
        sequences that have some get no drafts. states: of a model with states. ranks: that launch
        steps ahead together; None for a single rank, and for hosts that sample."""
        self.max_drafts = max_drafts
        self._edits_see_drafts = edits_see_drafts
        self._drafter = drafter
        self._states = states
        self._ranks = ranks
        self._lengths = lengths or DraftLengths()
        self._lengths.forget_all()

    @property
    def drafter(self) -> Drafter | None:
        """None on a rank that does not sample."""
        return self._drafter

    @property
    def is_on_host_alone(self) -> bool:
        """Whether this host chooses and makes all drafts, without its device and other ranks."""
        on_device = self._drafter is not None and self._drafter.is_on_device
        return self._ranks is None and not on_device

    @property
    def has_states(self) -> bool:
        """Whether the model has states, which a step with drafts leaves to `restore_states`."""
        return self._states is not None

    def reset(self) -> None:
        """Drop the statistics of all sequences."""
        self._lengths.forget_all()

    def forget(self, row_ids: Int64Array) -> None:
        """Drop the statistics of the sequences that had these rows of the table."""
        self._lengths.forget(row_ids)

    def observe(self, rows: StepRows, captured: Sequence[Tensor], table: SequenceTable) -> None:
        """Observe that the tokens of a step are in the table. captured: see `Computed`."""
        if self._drafter is not None:
            self._drafter.learn(np.unique(rows.row_ids[rows.sampling]), table)
            self._drafter.observe(rows, captured, table)

    def record_drafts(
        self, row_ids: Int64Array, num_drafts: Int64Array, num_accepted: Int64Array
    ) -> None:
        """Record the number of drafts that each of some sequences computed, and of those that were
        accepted."""
        columns = row_ids.tolist(), num_drafts.tolist(), num_accepted.tolist()
        for row in zip(*columns, strict=True):
            self._lengths.record_drafts(*row)

    def record_step(self, rows: StepRows, time_us: int) -> None:
        """Record the time of a step whose rows were decodes before drafts were added to them."""
        if self._drafter is not None:
            self._lengths.record_step(int(rows.num_tokens.sum()), time_us)

    def add(self, rows: StepRows, plan: StepPlan, sequences: SequenceState) -> StepRows:
        """Return the rows of a plan with drafts that are chosen now, by this rank or by the one
        that samples. They are written to the table after the sequences' last tokens. Raises
        GroupBroken."""
        if self._ranks is not None and self._drafter is None:
            chosen = self._ranks.receive(plan)
            sequences.pending.resolve(rows.row_ids[chosen.resolved])
        else:
            chosen = self._choose(rows, plan.lookahead, sequences)
            if self._ranks is not None:
                self._ranks.send(plan, chosen)
        return self._with_drafts(rows, chosen.tokens, sequences.table)

    def add_next(self, rows: StepRows, plan: StepPlan, table: SequenceTable) -> StepRows:
        """As `add`, with the drafts that were broadcast with the tokens before. Drops those that
        the plan does not allow."""
        row_ids, lookahead = rows.row_ids.tolist(), plan.lookahead
        drafts = {
            row: table.next_drafts.pop(row_ids[row])[: lookahead[row]]
            for row in np.flatnonzero(rows.computes & rows.sample).tolist()
            if row_ids[row] in table.next_drafts
        }
        sizes = self._limited([len(tokens) for tokens in drafts.values()])
        limited = zip(drafts.items(), sizes, strict=True)
        return self._with_drafts(rows, {row: drafts[:n] for (row, drafts), n in limited}, table)

    def _with_drafts(
        self, rows: StepRows, drafts: dict[int, Int32Array], table: SequenceTable
    ) -> StepRows:
        if not drafts:
            return rows
        counts = np.zeros(len(rows.row_ids), np.int32)
        for row, tokens in drafts.items():
            counts[row] = len(tokens)
            row_id = int(rows.row_ids[row])
            end = int(table.num_tokens[row_id])
            table.token_ids[row_id, end : end + len(tokens)] = tokens
        if not counts.any():
            return rows
        places = 1 + counts[rows.sampling].astype(np.int64)
        firsts = np.repeat(np.cumsum(places) - places, places)
        drafting = replace(
            rows,
            num_tokens=rows.num_tokens + counts,
            are_decodes=False,
            sampling=np.repeat(rows.sampling, places),
            drafts=Drafts(counts, np.arange(len(firsts)) - firsts),
        )
        return drafting if self._states is None else self._states.save(drafting)

    def _choose(
        self, rows: StepRows, lookahead: Int32Array, sequences: SequenceState
    ) -> ChosenDrafts:
        """Return the drafts that `lookahead` allows, the drafter proposes and the lengths choose.
        Waits for the pending tokens of the sequences that are due, unless drafts are made on the
        device; then those with a constraint, whose masks depend on drafts, have none."""
        if self._drafter is None:
            return ChosenDrafts(_NO_ROWS, {})
        table, lengths, due = sequences.table, self._lengths, self._due(rows, lookahead, sequences)
        resolved = _NO_ROWS
        if due and not self._drafter.is_on_device:
            resolved = np.array(due, np.int64)
            sequences.pending.resolve(rows.row_ids[due])
            self._drafter.learn(rows.row_ids[due], table)
        if table.failures:  # of a token that was pending
            due = [row for row in due if int(rows.row_ids[row]) not in table.failures]
        if not due:
            return ChosenDrafts(resolved, {})
        row_ids, limits = rows.row_ids[due], lookahead[due].tolist()
        if self._drafter.is_expensive:
            sizes = [(num_drafts, 0) for num_drafts in limits]
        else:
            found = self._propose(row_ids, limits, sequences)
            sizes = [(len(draft.tokens), draft.num_matched) for draft in found]
        proposals = [
            Proposal(row_id, *size) for row_id, size in zip(row_ids.tolist(), sizes, strict=True)
        ]
        chosen = lengths.choose(proposals, int(rows.num_tokens.sum()), len(rows.sampling))
        chosen = self._limited(chosen)
        if self._drafter.is_expensive:
            found = self._propose(row_ids, chosen, sequences)
        triples = zip(due, found, chosen, strict=True)
        drafts = {row: draft.tokens[:count] for row, draft, count in triples if count}
        return ChosenDrafts(resolved, drafts)

    def _due(self, rows: StepRows, lookahead: Int32Array, sequences: SequenceState) -> list[int]:
        """The rows for which the drafter is to look for drafts."""
        table, excluded = sequences.table, set[int]()
        assert self._drafter is not None
        if self._drafter.is_on_device and sequences.masks is not None:
            excluded = {row for row, _ in sequences.masks.constrained(rows.row_ids)}
        columns = (lookahead, rows.computes, rows.row_ids, table.num_tokens[rows.row_ids])
        return [
            row
            for row, (max_drafts, computes, row_id, num_tokens) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
            if max_drafts > 0
            and computes
            and row not in excluded
            and self._may_draft(row_id, table)
            and self._lengths.is_due(row_id, num_tokens)
        ]

    def _limited(self, counts: list[int]) -> list[int]:
        """The numbers of drafts of some rows, without those that have no room for a state."""
        if self._states is None:
            return counts
        ends = np.minimum(np.cumsum(counts), self._states.max_drafts)
        limited: list[int] = np.diff(ends, prepend=0).tolist()
        return limited

    def _may_draft(self, row_id: int, table: SequenceTable) -> bool:
        edits = table.sampling.edits.get(row_id)
        reads_drafts = edits is not None and edits.reads_last_tokens
        return table.may_draft(row_id) and (self._edits_see_drafts or not reads_drafts)

    def _propose(
        self, row_ids: Int64Array, counts: list[int], sequences: SequenceState
    ) -> list[Draft]:
        """Propose drafts for sequences, up to the first one that a constraint does not allow."""
        assert self._drafter is not None
        found = self._drafter.propose(row_ids, counts, sequences.table)
        if self._drafter.is_on_device:
            return found
        for row in sequences.constrained_rows(row_ids):
            assert sequences.masks is not None
            draft = found[row.row]
            num_allowed = sequences.masks.num_allowed(row, draft.tokens)
            found[row.row] = draft._replace(tokens=draft.tokens[:num_allowed])
        return found

    def choose_next(self, rows: StepRows, sequences: SequenceState) -> dict[int, Int32Array]:
        """Return by row the drafts for the sequence's next step, whose plan is not known yet, and
        put them into the table.

        The next step is assumed to have the same rows. A sequence has no drafts beyond the last
        slot of its current blocks.
        """
        table, row_ids = sequences.table, rows.row_ids
        num_free = table.capacity[row_ids] - table.num_tokens[row_ids]
        lookahead = np.clip(num_free, 0, self.max_drafts).astype(np.int32)
        is_over = np.isin(row_ids, list(table.failures))
        lookahead[~rows.sample | is_over] = 0
        sampling = np.unique(rows.sampling)
        next_rows = replace(rows, num_tokens=np.ones_like(rows.num_tokens), sampling=sampling)
        drafts = self._choose(next_rows, lookahead, sequences).tokens
        table.next_drafts |= {int(row_ids[row]): tokens for row, tokens in drafts.items()}
        return drafts

    def accepted(
        self, rows: StepRows, tokens: Int64Array, table: SequenceTable
    ) -> dict[int, Int64Array]:
        """Return by row the tokens sampled after accepted drafts, before any of them is appended,
        and let states be those after them.

        tokens: [num_sampling]; NO_TOKEN where none could be sampled, which ends a row's tokens.
        """
        kept = {}
        assert rows.drafts is not None
        sampled = tokens.tolist()
        for start in np.flatnonzero(rows.drafts.offsets == 0).tolist():
            row = int(rows.sampling[start])
            row_id, num_drafts = int(rows.row_ids[row]), int(rows.drafts.counts[row])
            if num_drafts == 0:
                continue
            end = int(table.num_tokens[row_id])
            drafts = table.token_ids[row_id, end : end + num_drafts].tolist()
            # Each accepted draft brings the token that was sampled after it.
            stop = start
            while stop < start + num_drafts and sampled[stop] == drafts[stop - start]:
                stop += 1
            if sampled[stop] == NO_TOKEN:
                stop -= 1
            if stop > start:
                kept[row] = tokens[start + 1 : stop + 1]
            self._lengths.record_drafts(row_id, num_drafts, max(stop - start, 0))
        num_accepted = np.zeros(len(rows.row_ids), np.int64)
        num_accepted[list(kept)] = [len(further) for further in kept.values()]
        self.restore_states(rows, num_accepted, table)
        return kept

    def restore_states(
        self, rows: StepRows, num_accepted: Int64Array, table: SequenceTable
    ) -> None:
        """Let states be those after the accepted drafts of a step, if the model has any; on the
        rank that samples, `accepted` does so. num_accepted: [num_rows]."""
        if self._states is not None and rows.drafts is not None:
            self._states.restore(rows, num_accepted, table)
