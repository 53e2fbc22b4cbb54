"""The interface of drafters, and the search for drafts in a sequence's own tokens (prompt lookup
decoding, Saxena 2023)."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from worker_service.array_types import Int32Array, Int64Array
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.state.sequence_table import SequenceTable

MAX_MATCH = 16
"""Maximum length of a matched suffix, in tokens; longer matches predict hardly better."""

_MAX_PAIRS = 1024
"""Latest occurrences of the last two tokens that are compared further: a text that repeats itself
has as many as tokens."""

_MIN_RESUMED = 3
"""Minimum length of a match before an edit, in tokens."""

_MAX_REPLACED, _MAX_SKIPPED = 2, 8
"""Maximum numbers of tokens that an edit replaces by as many, and that it leaves out."""


class Draft(NamedTuple):
    """Proposed tokens that may follow a sequence."""

    tokens: Int32Array
    num_matched: int = 0
    """Length of the sequence's suffix that these tokens followed elsewhere: the longer it is, the
    more likely they are right. 0 if the drafter compares none."""


class Drafter(ABC):
    """Proposes tokens that may follow a sequence. A wrong draft costs time, but no correctness.

    A drafter is notified of steps. What it knows of a sequence is in `SequenceTable.drafter_state`.
    """

    is_expensive = False
    """Whether proposing is expensive. If so, the number of drafts is chosen first, and only that
    many are requested; otherwise drafts are requested first, and some of them are chosen."""

    is_on_device = False
    """Whether drafts are made on the device, behind steps whose tokens the host has yet to read. If
    so, `propose` reads no tokens, and returns codes that stand for the drafts (`FIRST_DRAFT`)."""

    @abstractmethod
    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """Propose at most `counts` tokens for each of these sequences.

        The entries of the table after a sequence's last token may be overwritten.
        """

    def learn(self, row_ids: Int64Array, table: SequenceTable) -> None:  # noqa: B027
        """Called when all tokens of these sequences are in the table."""

    def observe(  # noqa: B027
        self, rows: StepRows, captured: Sequence[Tensor], table: SequenceTable
    ) -> None:
        """Called when a step has ended and its tokens are in the table.

        captured: see `Computed`; valid until the model's next forward pass.
        """


class SequenceDrafter(Drafter):
    """A drafter that proposes for each sequence separately, from its tokens and its tenant."""

    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """Propose drafts for each sequence."""
        return [
            self.follow(table.token_ids[row, : table.num_tokens[row]], count, table.salts[row])
            for row, count in zip(row_ids.tolist(), counts, strict=True)
        ]

    @abstractmethod
    def follow(self, tokens: Int32Array, num_drafts: int, salt: np.uint64) -> Draft:
        """Propose at most `num_drafts` tokens after `tokens`, the sequence's prompt and output."""


def most_frequent(tokens: Int32Array) -> np.int32:
    """Return the most frequent of some tokens, and the one that occurs last among equals."""
    last = tokens[-1]
    if (tokens == last).all():
        return last
    _, places, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    return tokens[np.flatnonzero(counts[places] == counts.max())[-1]]


def find_continued(tokens: Int32Array) -> tuple[Int64Array, int]:
    """Find where in `tokens` the sequence may continue: after the longest suffix that occurs
    earlier, or after an edit of a longer text.

    Returns positions, ascending, and the number of tokens before each that are those at the end of
    the sequence, from 0 (no position) to `MAX_MATCH`. It counts as 1 after an edit.
    """
    ends, num_matched = match_suffix(tokens)
    if num_matched <= 1:
        for num_replaced in range(1, min(_MAX_REPLACED, len(tokens) - 1) + 1):
            copied, num_copied = match_suffix(tokens[:-num_replaced])
            if num_copied >= _MIN_RESUMED:
                last = copied[-1]
                skipped = ends[(ends > last) & (ends <= last + _MAX_SKIPPED)]
                if len(skipped):
                    return skipped[:1], 1
                replaced = last + num_replaced
                if num_matched == 0 and replaced < len(tokens) - 1:
                    return np.array([replaced]), 1
                break
    return ends, num_matched


def match_suffix(tokens: Int32Array) -> tuple[Int64Array, int]:
    """Find the earlier occurrences of the longest suffix of `tokens` that has any.

    Returns the positions of their last tokens, ascending, and the length of the suffix, from 0 (no
    occurrence) to `MAX_MATCH`.
    """
    last = len(tokens) - 1
    is_last = tokens[:last] == tokens[last]
    pairs = np.flatnonzero(is_last[1:] & (tokens[: last - 1] == tokens[last - 1])) + 1
    if len(pairs) == 0:
        ends = np.flatnonzero(is_last)
        return ends, min(len(ends), 1)
    pairs = pairs[-_MAX_PAIRS:]
    back = np.arange(2, min(MAX_MATCH, last))
    places = pairs[:, None] - back
    is_same = (tokens[places] == tokens[last - back]) & (places >= 0)
    lengths = 2 + np.logical_and.accumulate(is_same, axis=1).sum(axis=1)
    num_matched = int(lengths.max())
    return pairs[lengths == num_matched], num_matched
