"""Sources of drafts: what they share, and the one that needs only a sequence's own tokens."""

from abc import ABC, abstractmethod

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.runner.sequence_table import SequenceTable

MIN_MATCH, MAX_MATCH = 2, 5
"""Tokens at a sequence's end that must have occurred before, and the most that are compared."""


class Drafter(ABC):
    """Guesses the tokens that follow. A bad guess costs time and changes nothing else.

    It is notified of what happens to the rows of the table. Those that keep no state of rows have
    nothing to do then.
    """

    takes_time = False
    """Whether drafts take time, so that it is asked for only as many as will be computed. Others
    are asked first, since where they have none there is nothing to choose."""

    @abstractmethod
    def propose(
        self, row_ids: Int64Array, counts: list[int], table: SequenceTable
    ) -> list[Int32Array]:
        """At most `counts` tokens that may follow each of these sequences. What lies behind a
        sequence's tokens in the table may be overwritten."""

    def forget(self, row_ids: Int64Array) -> None:  # noqa: B027
        """The sequences with these rows have left."""

    def forget_all(self) -> None:  # noqa: B027
        """All sequences have left, and the table is replaced."""

    def note_blocks(  # noqa: B027
        self, row_ids: Int64Array, indices: Int32Array, block_size: int
    ) -> None:
        """Entries of block tables were set, at `indices` of the tables of `row_ids`."""


class SequenceDrafter(Drafter):
    """Drafts that depend on the sequence's own tokens only."""

    def propose(
        self, row_ids: Int64Array, counts: list[int], table: SequenceTable
    ) -> list[Int32Array]:
        """Each sequence for itself."""
        rows = zip(row_ids.tolist(), counts, strict=True)
        return [self.follow(table.token_ids[row, : table.num_tokens[row]], n) for row, n in rows]

    @abstractmethod
    def follow(self, tokens: Int32Array, num_drafts: int) -> Int32Array:
        """At most `num_drafts` tokens that may follow `tokens`, a sequence's prompt and output."""


class NgramDrafter(SequenceDrafter):
    """Proposes what followed the last occurrence of the sequence's last tokens, of those that match
    longest (Saxena 2023, prompt lookup decoding)."""

    def follow(self, tokens: Int32Array, num_drafts: int) -> Int32Array:
        """Prompt and output are searched alike. Where the continuation ends, it begins again: the
        tokens between the two occurrences may be a loop."""
        last = len(tokens) - 1
        ends = np.flatnonzero(tokens[:last] == tokens[last])
        num_matched = 1 if len(ends) else 0
        while 0 < num_matched < MAX_MATCH:
            longer = ends[ends >= num_matched]
            longer = longer[tokens[longer - num_matched] == tokens[last - num_matched]]
            if len(longer) == 0:
                break
            ends = longer
            num_matched += 1
        if num_matched < MIN_MATCH:
            return tokens[:0]
        start = int(ends[-1]) + 1
        return tokens[start + np.arange(num_drafts) % (len(tokens) - start)]
