"""Token sequences that must not be completed."""

from collections.abc import Iterable

import numpy as np

from worker_service.array_types import Int32Array


class BadWords:
    """One sequence's bad words, indexed so that a step looks only at those about to be completed.

    Words are matched against the output alone, as vLLM does: a prompt may end with the beginning of
    a bad word and the output complete it.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        words = tuple(words)
        self._single = np.array([word[0] for word in words if len(word) == 1], np.int32)
        self._by_prefix_end: dict[int, list[tuple[Int32Array, int]]] = {}
        for word in words:
            if len(word) > 1:
                prefix = np.array(word[:-1], np.int32)
                self._by_prefix_end.setdefault(word[-2], []).append((prefix, word[-1]))

    @property
    def has_prefixes(self) -> bool:
        """Whether there are words of several tokens."""
        return bool(self._by_prefix_end)

    def banned_after(self, output: Int32Array) -> Int32Array:
        """Tokens that would complete a bad word after this output."""
        if not self._by_prefix_end or len(output) == 0:
            return self._single
        completing = [
            last
            for prefix, last in self._by_prefix_end.get(int(output[-1]), ())
            if len(prefix) <= len(output) and np.array_equal(output[-len(prefix) :], prefix)
        ]
        return np.concatenate([self._single, np.array(completing, np.int32)])
