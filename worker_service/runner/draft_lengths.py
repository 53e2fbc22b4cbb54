"""How many drafts each row of a step computes: as many as make its tokens per microsecond largest.

Two things are measured while sequences decode: how often a sequence's drafts are right, and what
one more token adds to the time of a step. The first is an average of the sequence's last drafts.
The second is the slope of a line through the last decode steps, their times over their tokens. Old
measurements lose weight with each step, also with one that computes no drafts, so what was not
worth its time is tried again later.
"""

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from worker_service.array_types import Float64Array, Int64Array

_STEP_DECAY = 0.98
"""Weight of a step against that of the one after it: some 50 steps count."""

_MOST_SURPRISE = 2.0
"""A step counts as at most this many times as long as it was expected to be."""

_DRAFT_DECAY = 0.9
"""The same, of drafts that a sequence has computed."""

_SKIP_DECAY = 0.97
"""The same, of a step in which a sequence computed none of the drafts that there were."""

_PRIOR_RIGHT, _PRIOR_TRIALS = 1.0, 2.0
"""Drafts that every sequence is assumed to have had before."""

_LEAST_VARIANCE = 1e-3
"""Of the tokens of steps that are not alike."""

_ALIKE_STEPS = 16
"""While steps with drafts are alike, every 16th has none, to show what drafts cost."""


class _Acceptance:
    """Drafts that were compared with what was sampled, and how many of them were right."""

    def __init__(self) -> None:
        self.num_right = self.num_trials = 0.0

    def note(self, num_drafts: int, num_right: int) -> None:
        """The first wrong draft is compared, those behind it are not."""
        self._decay(_DRAFT_DECAY)
        self.num_right += num_right
        self.num_trials += min(num_right + 1, num_drafts)

    def skip(self) -> None:
        """Drafts were not worth their time."""
        self._decay(_SKIP_DECAY)

    @property
    def chance(self) -> float:
        """Of a draft to be right if those before it are."""
        return (self.num_right + _PRIOR_RIGHT) / (self.num_trials + _PRIOR_TRIALS)

    def _decay(self, factor: float) -> None:
        self.num_right *= factor
        self.num_trials *= factor


class _StepTimes:
    """A line through the times of the last decode steps, over their tokens."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        """Weights, tokens, times, squares of tokens, tokens times times."""

    def note(self, num_tokens: int, time_us: int) -> None:
        if self._sums[0] > 0:  # other processes may have had the processor
            time_us = min(time_us, int(_MOST_SURPRISE * self.of(np.array([num_tokens]))[0]))
        self._sums *= _STEP_DECAY
        self._sums += (1, num_tokens, time_us, num_tokens**2, num_tokens * time_us)

    @property
    def are_alike(self) -> bool:
        """Whether all of them had the same number of tokens, which shows no slope."""
        weight, tokens, _, squares, _ = self._sums.tolist()
        return weight * squares - tokens**2 <= _LEAST_VARIANCE * weight**2

    def of(self, num_tokens: Int64Array) -> Float64Array:
        """Expected times of steps; without a slope they are all the same."""
        weight, tokens, times, squares, products = self._sums.tolist()
        if weight == 0:
            return np.ones(len(num_tokens))
        mean, mean_us = tokens / weight, times / weight
        slope = 0.0
        if not self.are_alike:
            variance = squares / weight - mean**2
            slope = max(0.0, (products / weight - mean * mean_us) / variance)
        return np.maximum(mean_us + slope * (num_tokens - mean), 0.1 * mean_us)


class Proposal(NamedTuple):
    """A row that may compute drafts."""

    row_id: int
    num_drafts: int
    """Drafts that there are for it."""


class DraftLengths:
    """Chooses numbers of drafts, which change the time of a step and never its tokens."""

    def __init__(self) -> None:
        self._of_row = defaultdict[int, _Acceptance](_Acceptance)
        self._times = _StepTimes()
        self._num_alike = 0

    def forget(self, row_ids: Int64Array) -> None:
        """Drop what is known of the sequences that had these rows of the table."""
        for row_id in row_ids.tolist():
            self._of_row.pop(row_id, None)

    def forget_all(self) -> None:
        """Drop what is known of all sequences, but not how long steps take."""
        self._of_row.clear()

    def choose(self, proposals: list[Proposal], num_tokens: int, num_sampling: int) -> list[int]:
        """The drafts to be computed of each proposal, in a step that computes `num_tokens` tokens
        and samples `num_sampling` without them."""
        self._num_alike = self._num_alike + 1 if self._times.are_alike else 0
        if self._num_alike == _ALIKE_STEPS:
            self._num_alike = 0
            return [0] * len(proposals)
        gains = []
        for index, (row_id, num_drafts) in enumerate(proposals):
            right = 1.0
            chance = self._of_row[row_id].chance
            for _ in range(num_drafts):
                right *= chance
                gains.append((right, index))
        gains.sort(key=lambda gain: -gain[0])  # stable: a row's first drafts come first
        expected = num_sampling + np.cumsum([0.0, *(right for right, _ in gains)])
        rates = expected / self._times.of(num_tokens + np.arange(len(expected)))
        counts = [0] * len(proposals)
        for _, index in gains[: int(np.argmax(rates))]:
            counts[index] += 1
        for (row_id, _), count in zip(proposals, counts, strict=True):
            if count == 0:
                self._of_row[row_id].skip()
        return counts

    def note_drafts(self, row_id: int, num_drafts: int, num_right: int) -> None:
        """How many of a sequence's drafts were right."""
        self._of_row[row_id].note(num_drafts, num_right)

    def note_step(self, num_tokens: int, time_us: int) -> None:
        """How long a step of decodes took, drafts included."""
        self._times.note(num_tokens, time_us)
