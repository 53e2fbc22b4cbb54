"""Which tokens occurred in a sequence, kept up to date token by token."""

import numpy as np

from worker_service.array_types import Int32Array


class Occurrences:
    """The distinct tokens of one sequence and how often each is in its output.

    Sparse, because a sequence uses a small part of a vocabulary. Columns grow by doubling; the
    first `len(self)` entries count. Invariant: `_index[token_ids[i]] == i`, no token twice.
    """

    def __init__(self, prompt: Int32Array, output: Int32Array, *, with_prompt: bool) -> None:
        distinct = np.unique(np.concatenate([prompt, output]) if with_prompt else output)
        self._token_ids = np.empty(max(64, 2 * len(distinct)), np.int32)
        self._counts = np.zeros(len(self._token_ids), np.int32)
        self._token_ids[: len(distinct)] = distinct
        self._index = {token: i for i, token in enumerate(distinct.tolist())}
        for token in output.tolist():
            self._counts[self._index[token]] += 1

    def __len__(self) -> int:
        return len(self._index)

    @property
    def token_ids(self) -> Int32Array:
        """The distinct tokens."""
        return self._token_ids[: len(self)]

    @property
    def output_counts(self) -> Int32Array:
        """How often each is in the output; 0 for those of the prompt alone."""
        return self._counts[: len(self)]

    def append(self, token: int) -> None:
        """Take note of one more output token."""
        index = self._index.setdefault(token, len(self))
        if index == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[index] = token
        self._counts[index] += 1
