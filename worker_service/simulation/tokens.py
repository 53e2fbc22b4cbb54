"""The model that is simulated: a distribution over next tokens, made of integer hashes.

What a real KV cache holds at a position depends on all tokens up to it; here that is a `History`,
a 64-bit hash chained over them. A history puts the vocabulary into an order of its own (an affine
permutation), and the token of rank r in it has the probability 2^-(r+1). So tokens, ranks and log
probabilities fit each other, as with a real model, and any mistake in what a sequence is made of
changes what is sampled.

Everything is plain 64-bit integer arithmetic: the same on every machine, and within a microsecond.
"""

import math

History = int
"""Hash of all tokens up to and including one position."""

START: History = 0x243F6A8885A308D3
"""The history before the first token."""

_WORD = 2**64 - 1
_LN2 = math.log(2.0)


def extend(history: History, token: int) -> History:
    """The history one token later."""
    mixed = ((history ^ token) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _WORD
    return mixed ^ (mixed >> 29)


def draw_key(seed: int, choice_index: int) -> int:
    """What stands for a choice in all its draws."""
    return scramble(scramble(seed) ^ choice_index)


def draw(key: int, position: int) -> int:
    """The rank drawn at an output position: r with the probability 2^-(r+1)."""
    word = scramble(key ^ position)
    return (word & -word).bit_length() - 1 if word else 63


def scramble(word: int) -> int:
    """A bijection of 64-bit words that leaves no pattern (Steele et al. 2014, SplitMix64)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


class NextToken:
    """The distribution of the token after a history."""

    def __init__(self, history: History, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._word = scramble(history)
        self._first = self._word % vocab_size

    def token(self, rank: int) -> int:
        """The token of a rank; 0 is the most probable. Ranks beyond the last begin anew."""
        if rank == 0:
            return self._first
        return (self._first + rank * self._step()) % self._vocab_size

    def rank(self, token: int) -> int:
        """The rank of a token."""
        inverse = pow(self._step(), -1, self._vocab_size)
        return (token - self._first) * inverse % self._vocab_size

    def logprob(self, rank: int) -> float:
        """Log probability of the token of a rank; all together have the probability 1."""
        return -(rank + 1) * _LN2 - math.log1p(-(2.0**-self._vocab_size))

    def pick(self, rank: int, excluded: frozenset[int]) -> int | None:
        """The token of a rank or, if it is excluded, the next that is not; None if all are."""
        if not excluded:
            return self.token(rank)
        for candidate in range(rank, rank + min(len(excluded) + 1, self._vocab_size)):
            token = self.token(candidate)
            if token not in excluded:
                return token
        return None

    def _step(self) -> int:
        """Distance between the tokens of neighbouring ranks, without a factor in common with the
        vocabulary's size, so that all tokens are reached."""
        step = 1 + (self._word >> 32) % self._vocab_size
        while math.gcd(step, self._vocab_size) != 1:
            step += 1
        return step
