"""The simulated model: a distribution over next tokens, made of integer hashes.

The content of a real KV cache at a position depends on all tokens up to it; here it is a
`History`, a 64-bit hash chained over them. A history determines a permutation of the vocabulary
(an affine one), in which the token of rank r has the probability 2^-(r+1). Tokens, ranks and log
probabilities are therefore consistent, as with a real model, and any mistake in a sequence's
content changes the sampled tokens.

All of it is plain 64-bit integer arithmetic: the same on every machine, and a matter of
microseconds.
"""

import math
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from worker_service.plan import PromptLogprobs, TokenLogprobs

History = int
"""Hash of all tokens up to and including one position."""

START: History = 0x243F6A8885A308D3
"""The history before the first token."""

LN2 = math.log(2.0)

NUM_LIKELY = 64
"""The total probability of all further ranks is below the resolution of a draw."""

_WORD = 2**64 - 1


def extend(history: History, token: int) -> History:
    """The history one token later."""
    mixed = ((history ^ token) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _WORD
    return mixed ^ (mixed >> 29)


def scramble(word: int) -> int:
    """A bijection of 64-bit words that leaves no pattern (Steele et al. 2014, SplitMix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


class NextToken:
    """The distribution of the token after a history."""

    def __init__(self, history: History, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._word = scramble(history)
        self._first = self._word % vocab_size

    def token(self, rank: int) -> int:
        """The token of a rank; 0 is the most probable. Ranks repeat after the last."""
        if rank == 0:
            return self._first
        return (self._first + rank * self._step()) % self.vocab_size

    def rank(self, token: int) -> int:
        """The rank of a token."""
        inverse = pow(self._step(), -1, self.vocab_size)
        return (token - self._first) * inverse % self.vocab_size

    def logprob(self, rank: int) -> float:
        """Log probability of the token of a rank; all together have the probability 1."""
        return -(rank + 1) * LN2 - math.log1p(-(2.0**-self.vocab_size))

    def drawn(self, draw: int) -> int:
        """The token at a draw, of 53 bits, when cumulating in the order of token ids.

        For vocabularies of at least `NUM_LIKELY` tokens. Ranks are placed among the tokens one by
        one, until the remaining ranks, whatever their tokens, cannot change the result; that takes
        about four.
        """
        target, step = draw << 11, self._step()
        placed: list[tuple[int, int]] = []
        token, remaining = self._first, 1 << NUM_LIKELY
        for _ in range(NUM_LIKELY):
            remaining >>= 1
            insort(placed, (token, remaining))
            below = 0
            for candidate, weight in placed:
                if target < below + remaining:
                    break
                if target < below + weight:
                    return candidate
                below += weight
            token = (token + step) % self.vocab_size
        return placed[-1][0]

    def _step(self) -> int:
        """Distance between the tokens of neighbouring ranks, without a factor in common with the
        vocabulary's size, so that all tokens are reached."""
        step = 1 + (self._word >> 32) % self.vocab_size
        while math.gcd(step, self.vocab_size) != 1:
            step += 1
        return step


@dataclass(kw_only=True, slots=True, eq=False)
class SimulatedSequence:
    """Tokens, their histories, and the blocks of their KV.

    Invariants: one history per token; num_checked <= num_computed <= len(tokens).
    """

    seq_id: int
    num_prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    histories: list[History] = field(default_factory=list)
    """The required content of each position's slot."""

    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose KV is in the blocks."""

    num_checked: int = 0
    """Tokens whose slots were checked to hold this sequence's own KV. A slot cannot change while a
    sequence holds its block without a check, so none is checked twice."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        history = self.histories[-1] if self.histories else START
        for token in tokens:
            history = extend(history, token)
            self.tokens.append(token)
            self.histories.append(history)

    def truncate(self, num_tokens: int) -> None:
        """Remove the tokens after the first ones, which drafts have overwritten."""
        del self.tokens[num_tokens:], self.histories[num_tokens:]
        self.num_computed = self.num_checked = num_tokens


def is_misguessed(history: History) -> bool:
    """Whether the draft after a history is wrong: about every fourth."""
    return scramble(history ^ 0x5851F42D4C957F2D) % 4 == 0


def token_logprobs(distribution: NextToken, token: int, num_top: int) -> TokenLogprobs:
    """A token's log probability and those of the most probable ones."""
    own = distribution.rank(token)
    ranks = [own, *range(num_top)]
    return TokenLogprobs(
        token_ids=np.array([token, *map(distribution.token, range(num_top))], np.int32),
        logprobs=np.array([distribution.logprob(rank) for rank in ranks], np.float32),
        rank=own + 1,
    )


def prompt_logprobs(
    sequence: SimulatedSequence, start: int, end: int, vocab_size: int, num_top: int
) -> PromptLogprobs:
    """Log probabilities of the prompt tokens from position `start`, at least 1, to `end`."""
    num_top = min(num_top, vocab_size)
    entries = [
        token_logprobs(
            NextToken(sequence.histories[position - 1], vocab_size),
            sequence.tokens[position],
            num_top,
        )
        for position in range(start, end)
    ]
    return PromptLogprobs(
        start=start,
        token_ids=np.stack([entry.token_ids for entry in entries]),
        logprobs=np.stack([entry.logprobs for entry in entries]),
        ranks=np.array([entry.rank for entry in entries], np.int32),
    )
