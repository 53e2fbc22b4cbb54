"""How far one sequence's output has come in what it must match."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from worker_service.array_types import Int32Array, UInt32Array
from worker_service.structured.constraint import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher


class OutputMatcher:
    """One sequence's constraint and the output tokens that it has taken in.

    Fails for good where a token does not follow the constraint, or where the constraint outgrows
    its limits.
    """

    def __init__(self, constraint: Constraint, min_tokens: int, matcher: "LLMatcher") -> None:
        self._constraint = constraint
        self._min_tokens = min_tokens
        self.matcher = matcher
        self._num_taken_in = 0
        self._has_ended = False
        self._ends = _bits(constraint.end_token_ids)
        self._lasts = _bits(constraint.last_token_ids)
        ending = (*constraint.end_token_ids.tolist(), *constraint.last_token_ids.tolist())
        self._ending = frozenset(ending)

    @property
    def has_failed(self) -> bool:
        """Whether nothing can be said any more."""
        return bool(self.matcher.is_error())

    @property
    def error(self) -> str:
        """Why it has failed, for people."""
        return str(self.matcher.get_error())

    def fork(self, constraint: Constraint, min_tokens: int) -> "OutputMatcher":
        """The same for a sequence that goes on from here by itself."""
        fork = OutputMatcher(constraint, min_tokens, self.matcher.deep_copy())
        fork._num_taken_in, fork._has_ended = self._num_taken_in, self._has_ended
        return fork

    def take_in(self, output: Int32Array) -> None:
        """Follow the output, which begins with what was taken in before."""
        for token in output[self._num_taken_in :].tolist():
            if self._has_ended or token in self._ending:
                self._has_ended = True  # what comes after does not matter
            else:
                self.matcher.consume_token(token)
        self._num_taken_in = len(output)

    def settle(self, allowed: UInt32Array) -> None:
        """Turn the tokens allowed as text into all that are allowed, in place.

        allowed: [num_words], a bit per token, the lowest first.
        """
        if self.has_failed:
            allowed[:] = 0
            return
        _clear(allowed, self._ends)
        _clear(allowed, self._lasts)
        if self._has_ended:
            allowed[:] = 0
        can_go_on = bool(allowed.any())
        if self._has_ended or self.matcher.is_accepting():
            if self._num_taken_in >= self._min_tokens or not can_go_on:
                _set(allowed, self._ends)
            if not can_go_on:
                _set(allowed, self._lasts)


Bits = tuple[npt.NDArray[np.int64], UInt32Array]


def _bits(token_ids: Int32Array) -> Bits:
    """Words, each once, and the bits of the tokens in them."""
    words, inverse = np.unique(token_ids.astype(np.int64) // 32, return_inverse=True)
    bits = np.zeros(len(words), np.uint32)
    ones = np.left_shift(np.uint32(1), (token_ids % 32).astype(np.uint32))
    np.bitwise_or.at(bits, inverse, ones)
    return words, bits


def _clear(allowed: UInt32Array, bits: Bits) -> None:
    words, ones = bits
    allowed[words] &= ~ones


def _set(allowed: UInt32Array, bits: Bits) -> None:
    words, ones = bits
    allowed[words] |= ones
