"""Suffix decoding (Oliaro et al. 2024): drafts are the most frequent continuation of the longest
suffix of a sequence that occurs in other outputs of the same tenant.

The suffix is searched for in the sequence's own prompt and output, and in a history of the outputs
of all sequences of its tenant, finished and running. The paper keeps suffix trees. Here a search
compares the 16-bit hashes of all pairs of consecutive tokens in the history with the hash of the
sequence's last pair, which takes about 20 microseconds, and then compares tokens where hashes are
equal. Tokens are therefore added in constant time, and the oldest ones are dropped by moving
arrays.

Without a history, this is prompt lookup decoding (`--speculative ngram`).
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from worker_service.array_types import Int32Array, Int64Array
from worker_service.runner.drafting.drafter import (
    MAX_MATCH,
    Draft,
    SequenceDrafter,
    find_continued,
    most_frequent,
)
from worker_service.runner.state.sequence_table import SequenceTable

HISTORY_TOKENS = 1 << 17
"""Capacity of the history, in output tokens of all tenants: about 130 outputs of 1000 tokens, in
5 MB. The oldest half is dropped when it is full."""

HashPairs = Callable[
    [npt.NDArray[np.uint64] | np.uint64, Int32Array, Int32Array], npt.NDArray[np.uint16]
]
"""Hashes of salts, previous tokens and tokens."""

_NONE = -1
_PAIR = 2
_LENGTH, _NEXT = 0, 1
"""Columns of a sequence: length up to which its output is in the history, 0 if it is new; and the
position after its last token there, 0 if there is none."""


class SuffixDrafter(SequenceDrafter):
    """Proposes continuations from the sequence's own tokens or from its tenant's history, whichever
    contains the longer suffix of the sequence."""

    def __init__(self, history_tokens: int = HISTORY_TOKENS) -> None:
        """history_tokens: capacity of the history; 0 for none, so that drafts come from the
        sequence's own tokens only."""
        self.history = OutputHistory(history_tokens)

    def follow(self, tokens: Int32Array, num_drafts: int, salt: np.uint64) -> Draft:
        """Search prompt and output, and the history."""
        ends, num_matched = find_continued(tokens)
        found, num_found = self.history.match(salt, tokens)
        if num_found > num_matched:
            continuations = self.history.continuations(found, num_drafts)
        else:
            starts = ends[:, None] + 1
            # A continuation that is too short is repeated: its tokens may be a loop.
            continuations = tokens[starts + np.arange(num_drafts) % (len(tokens) - starts)]
        return Draft(likeliest_path(continuations), max(num_found, num_matched))

    def learn(self, row_ids: Int64Array, table: SequenceTable) -> None:
        """Add their new output tokens to the history."""
        if self.history.capacity == 0:
            return
        row_ids = row_ids[table.sampling.num_candidates[row_ids] == 0]  # the core chooses a beam's
        ends, starts = table.num_tokens[row_ids], table.drafter_state[row_ids, _LENGTH]
        # The earlier output of a sequence that was preempted is in the history already.
        starts = np.where(starts > 0, starts, ends - 1)
        starts = np.maximum(starts, table.num_prompt_tokens[row_ids])
        counts = ends - starts
        row_ids, starts, counts = (column[counts > 0] for column in (row_ids, starts, counts))
        firsts = np.cumsum(counts) - counts
        all_rows = np.repeat(row_ids, counts)
        places = np.repeat(starts - firsts, counts) + np.arange(len(all_rows))
        positions = self.history.num_added + np.arange(len(all_rows))
        before = positions - 1
        before[firsts] = table.drafter_state[row_ids, _NEXT] - 1
        self.history.add(
            table.salts[all_rows],
            table.token_ids[all_rows, places - 1],
            table.token_ids[all_rows, places],
            before,
        )
        table.drafter_state[row_ids, _LENGTH] = starts + counts
        table.drafter_state[row_ids, _NEXT] = positions[firsts + counts - 1] + 1


def hash_pairs(
    salts: npt.NDArray[np.uint64] | np.uint64, previous: Int32Array, tokens: Int32Array
) -> npt.NDArray[np.uint16]:
    """Multiplicative hashes of pairs of tokens (Knuth 1973)."""
    pairs = (previous.astype(np.uint64) << np.uint64(32)) ^ tokens.astype(np.uint64) ^ salts
    return ((pairs * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(48)).astype(np.uint16)


class OutputHistory:
    """Output tokens in the order in which they were sampled, each linked to its successor.

    The position of a token is the number of tokens that were added before it; the last `_size`
    tokens are kept.
    """

    def __init__(self, capacity: int, hash_pairs: HashPairs = hash_pairs) -> None:
        """capacity: maximum number of tokens, at least 2; 0 if none are ever added. hash_pairs:
        what is compared first; equal hashes need not mean equal tokens."""
        self.capacity = capacity
        self._hash_pairs = hash_pairs
        self.num_added = 0
        """The position of the next token."""
        self._size = 0
        self._hashes = np.zeros(capacity, np.uint16)
        """Hash of salt, previous token and token."""
        self._salts = np.zeros(capacity, np.uint64)
        self._previous = np.zeros(capacity, np.int32)
        """The previous token; for the first token of an output the last token of the prompt."""
        self._tokens = np.zeros(capacity, np.int32)
        self._to_before = np.zeros(capacity, np.int64)
        """Distance to the previous token of the same output; 0 if it is not kept."""
        self._to_after = np.zeros(capacity, np.int64)
        """Distance to the next token of the same output; 0 if there is none yet."""

    def add(
        self,
        salts: npt.NDArray[np.uint64],
        previous: Int32Array,
        tokens: Int32Array,
        before: Int64Array,
    ) -> None:
        """Add tokens.

        salts, previous, tokens: as in the columns of the same names; before: position of the
        previous token of the same output, or _NONE. All are [num_tokens].
        """
        half = self.capacity // 2
        if len(tokens) > half:
            for part in (slice(half), slice(half, None)):
                self.add(salts[part], previous[part], tokens[part], before[part])
            return
        if self._size + len(tokens) > self.capacity:
            self._drop_oldest()
        new = slice(self._size, self._size + len(tokens))
        self._hashes[new] = self._hash_pairs(salts, previous, tokens)
        self._salts[new], self._previous[new], self._tokens[new] = salts, previous, tokens
        gaps = self.num_added + np.arange(len(tokens)) - before
        first = self.num_added - self._size
        is_here = before >= first
        self._to_before[new] = np.where(is_here, gaps, 0)
        self._to_after[new] = 0
        self._to_after[before[is_here] - first] = gaps[is_here]
        self._size = new.stop
        self.num_added += len(tokens)

    def _drop_oldest(self) -> None:
        """Drop all but the last `capacity // 2` tokens."""
        kept = self.capacity // 2
        columns = self._hashes, self._salts, self._previous, self._tokens
        for column in (*columns, self._to_before, self._to_after):
            column[:kept] = column[self._size - kept : self._size].copy()
        self._to_before[:kept][self._to_before[:kept] > np.arange(kept)] = 0
        self._size = kept

    def match(self, salt: np.uint64, tokens: Int32Array) -> tuple[Int64Array, int]:
        """Find the longest suffix of `tokens` that occurs and continues in outputs of the tenant.

        Returns the indices of the last tokens of its occurrences, oldest first, and its length: 0,
        or from 2 to MAX_MATCH.
        """
        if len(tokens) < _PAIR or self._size == 0:
            return np.empty(0, np.int64), 0
        wanted = tokens[: -MAX_MATCH - 1 : -1]
        is_equal = self._hashes[: self._size] == self._hash_pairs(salt, wanted[1:2], wanted[:1])
        ends = np.flatnonzero(is_equal)
        ends = ends[
            (self._tokens[ends] == wanted[0])
            & (self._previous[ends] == wanted[1])
            & (self._salts[ends] == salt)
            & (self._to_after[ends] > 0)
        ]
        if len(ends) == 0:
            return ends, 0
        num_matched, at = _PAIR, ends
        while num_matched < len(wanted):
            gaps = self._to_before[at]
            at = at - gaps
            longer = (gaps > 0) & (self._previous[at] == wanted[num_matched])
            if not longer.any():
                break
            ends, at = ends[longer], at[longer]
            num_matched += 1
        return ends, num_matched

    def continuations(self, ends: Int64Array, num_tokens: int) -> Int32Array:
        """The tokens that followed each of these occurrences: [len(ends), num_tokens]; _NONE after
        the end of an output."""
        found = np.full((len(ends), num_tokens), _NONE, np.int32)
        rows, at = np.arange(len(ends)), ends
        for column in range(num_tokens):
            gaps = self._to_after[at]
            rows, at = rows[gaps > 0], at[gaps > 0] + gaps[gaps > 0]
            found[rows, column] = self._tokens[at]
        return found


def likeliest_path(continuations: Int32Array) -> Int32Array:
    """Follow the most frequent next token, the latest among equals, until no continuation is left.

    continuations: [n, num_tokens], oldest first; _NONE after the end of one.
    """
    path = []
    for column in range(continuations.shape[1]):
        tokens = continuations[:, column]
        continuations, tokens = continuations[tokens != _NONE], tokens[tokens != _NONE]
        if len(tokens) == 0:
            break
        path.append(most_frequent(tokens))
        continuations = continuations[tokens == path[-1]]
    return np.array(path, np.int32)
