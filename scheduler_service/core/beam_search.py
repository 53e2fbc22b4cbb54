"""Beam search: which beams continue with which tokens, which have ended, and when the search ends.

The semantics are those of `GenerationMixin._beam_search` in transformers 5, for one prompt, in the
same float32 arithmetic: the same candidates give the same beams, scores and results, bit by bit.
In its terms, with k beams:

- A candidate's score is its beam's score plus its log probability. At first there are k beams that
  consist of the prompt alone, the first with score 0 and the others with -1e9, so that all
  continuations are of the first.
- A candidate ends if its token is a stop token or brings it to the greatest length. Those that end
  among the best k of all candidates are kept as finished, with their scores divided by
  length ** length_penalty (length: output tokens), if they are among the k best finished.
- The best k that do not end continue.
- The search ends when all candidates end, when `early_stopping` is WHEN_FULL and k have finished,
  or when the best beam, were it to end with its present score, would not beat the worst of k
  finished: at its present length, or, with NEVER and a positive length penalty, at the greatest.

Among equal scores the beam that comes first wins, then the more probable token; torch does not
define which. Two differences: a token whose log probability is minus infinity is no candidate,
where transformers would continue with it if nothing else were left; and a finished sequence is
preferred to none, where transformers prefers none to a score below -1e9.
"""

from collections.abc import Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass
from enum import Enum
from heapq import merge

from scheduler_service.core.step_plan import RowCandidates

MAX_LENGTH_PENALTY = 5.0
"""Bound of its absolute value, so that any length to this power is a float32 number."""

_NO_SCORE = -1e9
"""The initial score of all beams but the first; as in transformers."""


class EarlyStopping(Enum):
    """The condition that ends the search."""

    WHEN_FULL = "when full"
    """There are as many finished candidates as beams (`True` in transformers)."""
    WHEN_HOPELESS = "when hopeless"
    """No running beam is likely to beat a finished one (`False`)."""
    NEVER = "never"
    """No running beam can beat a finished one (`"never"`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BeamParams:
    """A request's parameters of its search."""

    width: int
    """Number of beams, k."""
    length_penalty: float
    early_stopping: EarlyStopping
    num_logprobs: int | None = None
    """Number of most probable tokens reported with each token; None: no log probabilities."""


@dataclass(frozen=True, slots=True)
class Path:
    """A beam's output, from its last token backwards; beams share their common prefixes."""

    before: "Path | None"
    token: int
    """The last token."""
    logprob: float
    """The log probability with which it was scored."""
    place: int
    """Index of the token among the candidates."""
    row: RowCandidates | None
    """All candidates for its position; kept only if they are reported."""

    def steps(self) -> list["Path"]:
        """One entry per token, the first one first."""
        steps = []
        step: Path | None = self
        while step is not None:
            steps.append(step)
            step = step.before
        return steps[::-1]


@dataclass(frozen=True, slots=True)
class Beam:
    """A beam that continues."""

    score: float
    parent: int
    """Index of the beam that it continues."""
    path: Path | None
    """None: the prompt alone."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A beam that has ended."""

    score: float
    """Log probability divided by length to the power of the length penalty."""
    path: Path


class BeamSearch:
    """The search of one request, from its prompt to its end.

    `beams` continue, the best first; `finished` are the best that ended, the best first. Each step
    is one `advance` with the candidates of every beam, until `is_done`.
    """

    def __init__(self, params: BeamParams, stop_token_ids: frozenset[int], max_tokens: int) -> None:
        self.beams = [Beam(0.0, 0, None)]
        self.beams += [Beam(_NO_SCORE, 0, None)] * (params.width - 1)
        self.num_tokens = 0
        """Output tokens of each beam."""
        self.max_tokens = max_tokens
        self.is_done = False
        self._params = params
        self._stop_token_ids = stop_token_ids
        self.finished: list[Finished] = []

    @property
    def has_begun(self) -> bool:
        """Whether its beams differ."""
        return self.num_tokens > 0

    def advance(self, candidates: Sequence[RowCandidates]) -> None:
        """Add one token to each beam: `candidates` are those of each beam, in order."""
        assert not self.is_done
        assert len(candidates) == len(self.beams)
        self.num_tokens += 1
        continuing, ended = self._choose(candidates)
        self._keep(ended)
        self.beams = continuing
        self.is_done = not continuing or self._is_decided()

    def limit(self, max_tokens: int) -> None:
        """Limit the number of output tokens; a search that has reached the limit ends with its
        current beams."""
        self.max_tokens = max_tokens
        if self.has_begun and self.num_tokens >= max_tokens:
            self._keep(self.beams)
            self.is_done = True

    def _choose(self, candidates: Sequence[RowCandidates]) -> tuple[list[Beam], list[Beam]]:
        """The beams that continue, and those of the best k that end."""
        width = self._params.width
        is_last = self.num_tokens >= self.max_tokens
        continuing: list[Beam] = []
        ended: list[Beam] = []
        scored = [self._scored(index, row) for index, row in enumerate(candidates)]
        for rank, (score, parent, place) in enumerate(merge(*scored)):
            row = candidates[parent]
            ends = is_last or row.token_ids[place] in self._stop_token_ids
            if ends and rank >= width:
                continue
            (ended if ends else continuing).append(self._continued(-score, parent, row, place))
            if len(continuing) == width:
                break  # the candidates that are left are not among the best k
        return continuing, ended

    def _scored(self, index: int, row: RowCandidates) -> Iterator[tuple[float, int, int]]:
        """A beam's candidates, best first: score with its sign changed, beam, place."""
        score = self.beams[index].score
        for place, logprob in enumerate(row.logprobs):
            yield -_float32(score + logprob), index, place

    def _continued(self, score: float, parent: int, row: RowCandidates, place: int) -> Beam:
        is_reported = self._params.num_logprobs is not None
        token, logprob = row.token_ids[place], row.logprobs[place]
        before = self.beams[parent].path
        return Beam(
            score, parent, Path(before, token, logprob, place, row if is_reported else None)
        )

    def _keep(self, ended: Sequence[Beam]) -> None:
        """Keep beams that ended if they are among the best finished."""
        divisor = self._divisor(self.num_tokens)
        for beam in ended:
            assert beam.path is not None
            self.finished.append(Finished(_float32(beam.score / divisor), beam.path))
        self.finished.sort(key=lambda finished: -finished.score)
        del self.finished[self._params.width :]

    def _is_decided(self) -> bool:
        """Whether further steps cannot change the result, by the rule of `early_stopping`."""
        params = self._params
        if len(self.finished) < params.width:
            return False
        if params.early_stopping is EarlyStopping.WHEN_FULL:
            return True
        is_greatest = params.early_stopping is EarlyStopping.NEVER and params.length_penalty > 0
        length = self.max_tokens if is_greatest else self.num_tokens
        hope = _float32(self.beams[0].score / self._divisor(length))
        return hope <= self.finished[-1].score

    def _divisor(self, length: int) -> float:
        return _float32(length**self._params.length_penalty)


def _float32(number: float) -> float:
    """Round to float32."""
    return c_float(number).value
