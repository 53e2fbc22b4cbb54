"""The beams of one request: the search, and which sequences stand for its beams.

A request has as many sequences as beams, for its whole life. Each beam that goes on is *held* by
one of them; the others are idle. When a step's candidates are in, the search chooses: a beam that
goes on in one way keeps its sequence; where it goes on in several, all but the first fork from it,
into sequences whose beams do not go on. So the worker is told of tokens to append and of forks,
and of sequences to forget.

Nothing of it is told to the frontend before the search has ended.
"""

from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scheduler_service.core.beam_search import BeamParams, BeamSearch
from scheduler_service.core.step_plan import RowCandidates

if TYPE_CHECKING:
    from scheduler_service.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam that has gone on by one token, of which the worker is still to be told."""

    seq: "Sequence"
    token: int
    parent: "Sequence | None"
    """The sequence that it forks from; None: it goes on in place."""


class BeamGroup:
    """A request's beams, the best first.

    All that concerns one step (`source_of`, `continuations`, candidates) is forgotten when the
    group leaves the batch: the tokens it has are known by then, candidates are computed again.
    """

    def __init__(
        self,
        params: BeamParams,
        stop_token_ids: frozenset[int],
        max_tokens: int,
        sequences: Sequences["Sequence"],
    ) -> None:
        self.search = BeamSearch(params, stop_token_ids, max_tokens)
        self.held = list(sequences[:1])
        """The sequences of the beams that go on, in the search's order."""
        self.continuations: list[Continuation] = []
        """What the next plan tells the worker; forks come last."""
        self.source_of: dict[Sequence, Sequence] = {}
        """While it is computed again: sequences whose first blocks others compute before."""
        self.num_prefilling = 0
        """Held sequences that have not been computed up to their last token."""
        self._candidates: dict[Sequence, RowCandidates] = {}

    @property
    def is_due(self) -> bool:
        """Whether all beams may compute their last tokens."""
        return self.num_prefilling == 0 and not any(seq.num_in_flight for seq in self.held)

    def has_candidates(self, seq: "Sequence") -> bool:
        """Whether the result is in of a step that computed all of a sequence's tokens."""
        return seq in self._candidates

    def collect(self, seq: "Sequence", candidates: RowCandidates) -> bool:
        """Take in what may follow one beam; whether all have been heard of."""
        self._candidates[seq] = candidates
        return len(self._candidates) == len(self.held)

    def leave(self) -> None:
        """The group leaves the batch."""
        self.continuations = []
        self.source_of = {}
        self.num_prefilling = 0
        self._candidates = {}

    def advance(self) -> list[tuple["Sequence", int]]:
        """Let the search choose; per beam that goes on, in order, the sequence it comes of and its
        next token. Who is to hold it is told by `hold`, unless the search is done."""
        holders = self.held
        if not self.search.has_begun:
            holders = holders * len(self.search.beams)  # all are the prompt alone
        self.search.advance([self._candidates[seq] for seq in holders])
        self._candidates = {}
        beams = [(holders[beam.parent], beam.path) for beam in self.search.beams]
        return [(seq, path.token) for seq, path in beams if path is not None]

    def hold(self, continuations: list[Continuation]) -> None:
        """The beams that go on, in order, are held by these sequences."""
        self.held = [continuation.seq for continuation in continuations]
        self.continuations = sorted(continuations, key=_forks_last)


def _forks_last(continuation: Continuation) -> tuple[bool, tuple[tuple[int, ...], int]]:
    return continuation.parent is not None, continuation.seq.order
