"""Sources of drafts: what they share, and the one that needs only a sequence's own tokens."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.plan import StepPlan
from worker_service.runner.batch import StepRows
from worker_service.runner.forward import ForwardPass
from worker_service.runner.sequence_table import SequenceTable

MAX_MATCH = 5
"""The most tokens at a sequence's end that are compared; longer matches predict hardly better."""


class Draft(NamedTuple):
    """Guesses of the tokens that follow a sequence."""

    tokens: Int32Array
    num_matched: int = 0
    """How many tokens at the sequence's end they followed elsewhere: the more these are, the more
    likely they are right. 0 where none are compared."""


class Drafter(ABC):
    """Guesses the tokens that follow. A bad guess costs time and changes nothing else.

    It is notified of steps, and of rows of the table that become free. Those that keep no state
    have nothing to do then.
    """

    takes_time = False
    """Whether drafts take time, so that it is asked for only as many as will be computed. Others
    are asked first, since where they have none there is nothing to choose."""

    @abstractmethod
    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """At most `counts` tokens that may follow each of these sequences. What lies behind a
        sequence's tokens in the table may be overwritten."""

    def begin(self, plan: StepPlan, table: SequenceTable) -> None:  # noqa: B027
        """A step begins: its cache operations and its changes of the table are done."""

    def observe(  # noqa: B027
        self, rows: StepRows, forward: ForwardPass, table: SequenceTable
    ) -> None:
        """A step is done: its tokens are in the table. forward: its hidden states, valid until the
        model's next pass."""

    def forget(self, row_ids: Int64Array) -> None:  # noqa: B027
        """The sequences with these rows have left."""

    def forget_all(self) -> None:  # noqa: B027
        """All sequences have left, and the table is replaced."""


class SequenceDrafter(Drafter):
    """Drafts that depend on the sequence's own tokens only."""

    def propose(self, row_ids: Int64Array, counts: list[int], table: SequenceTable) -> list[Draft]:
        """Each sequence for itself."""
        rows = zip(row_ids.tolist(), counts, strict=True)
        return [self.follow(table.token_ids[row, : table.num_tokens[row]], n) for row, n in rows]

    @abstractmethod
    def follow(self, tokens: Int32Array, num_drafts: int) -> Draft:
        """At most `num_drafts` tokens that may follow `tokens`, a sequence's prompt and output."""


class NgramDrafter(SequenceDrafter):
    """Proposes what followed the sequence's last tokens where they occurred before, as many of them
    as match somewhere (Saxena 2023, prompt lookup decoding). Of several places it takes the last
    one that goes on with the most frequent next token."""

    def follow(self, tokens: Int32Array, num_drafts: int) -> Draft:
        """Prompt and output are searched alike. Where the continuation ends, it begins again: the
        tokens between the two occurrences may be a loop."""
        ends, num_matched = match_suffix(tokens, MAX_MATCH)
        if num_matched == 0:
            return Draft(tokens[:0])
        next_tokens = tokens[ends + 1]
        start = int(ends[next_tokens == most_frequent(next_tokens)][-1]) + 1
        loop = start + np.arange(num_drafts) % (len(tokens) - start)
        return Draft(tokens[loop], num_matched)


def most_frequent(tokens: Int32Array) -> np.int32:
    """The most frequent of some tokens, the last of equals."""
    last = tokens[-1]
    if (tokens == last).all():
        return last
    _, places, counts = np.unique(tokens, return_inverse=True, return_counts=True)
    return tokens[np.flatnonzero(counts[places] == counts.max())[-1]]


def match_suffix(tokens: Int32Array, max_match: int) -> tuple[Int64Array, int]:
    """Where the longest match of the last tokens ends before the last token, at all places, and how
    many tokens match, at most `max_match`."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])
    num_matched = 1 if len(ends) else 0
    while 0 < num_matched < max_match:
        longer = ends[ends >= num_matched]
        longer = longer[tokens[longer - num_matched] == tokens[last - num_matched]]
        if len(longer) == 0:
            break
        ends = longer
        num_matched += 1
    return ends, num_matched
