"""Edits of single logits that a sequence's parameters and tokens require, before temperature.

The order is that of vLLM: bad words and suppressed tokens are excluded, then biases are added, then
penalties are applied. Each kind is one gather and one scatter over all rows that have it. Last, the
tokens that a constraint does not allow are excluded, by a bitmask.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagewire_kernels import reference
from worker_service.array_types import Float32Array, Int32Array
from worker_service.pinned_memory import upload
from worker_service.plan import SamplerParams
from worker_service.structured.masks import MaskedRows

_ALWAYS = np.iinfo(np.int32).max


class BadWords:
    """The bad words of one sequence, indexed by the token before the last one of each.

    As in vLLM, words are matched against the output alone: the output may complete a bad word that
    begins in the prompt.
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


class Occurrences:
    """The distinct tokens of one sequence, and the number of times each is in its output.

    Sparse, because a sequence uses a small part of the vocabulary. Columns grow by doubling; their
    first `len(self)` entries are valid. Invariant: `_index[token_ids[i]] == i`, and no token occurs
    twice.
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
        """The number of times each token is in the output; 0 if it is only in the prompt."""
        return self._counts[: len(self)]

    def append(self, token: int) -> None:
        """Count one more output token."""
        index = self._index.setdefault(token, len(self))
        if index == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.empty_like(self._token_ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._token_ids[index] = token
        self._counts[index] += 1

    def with_drafts(self, drafts: Int32Array) -> tuple[Int32Array, Int32Array]:
        """Distinct tokens and their counts, as if these drafts were part of the output."""
        if len(drafts) == 0:
            return self.token_ids, self.output_counts
        added, times = np.unique(drafts, return_counts=True)
        index = np.array([self._index.get(token, -1) for token in added.tolist()])
        is_new = index < 0
        counts = self.output_counts.copy()
        counts[index[~is_new]] += times[~is_new].astype(np.int32)
        return (
            np.concatenate([self.token_ids, added[is_new]]),
            np.concatenate([counts, times[is_new].astype(np.int32)]),
        )


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits that one sequence's logits need before a token is chosen."""

    params: SamplerParams
    bad_words: BadWords | None
    occurrences: Occurrences | None

    @classmethod
    def of(cls, params: SamplerParams, prompt: Int32Array, output: Int32Array) -> "LogitEdits":
        """Make the edits for a sequence. prompt, output: its tokens so far."""
        occurrences = None
        if params.has_penalties:
            with_prompt = params.repetition_penalty != 1.0
            occurrences = Occurrences(prompt, output, with_prompt=with_prompt)
        bad_words = BadWords(params.bad_words) if params.bad_words else None
        return cls(params, bad_words, occurrences)

    @property
    def max_entries(self) -> int:
        """An upper bound of the number of entries that `entries` returns."""
        params = self.params
        num_excluded = len(params.bad_words) + len(params.suppressed_token_ids)
        return len(params.bias_token_ids) + num_excluded

    def entries(self, output: Int32Array) -> tuple[Int32Array, Float32Array, Int32Array]:
        """The numbers that are added to logits after this output, as three columns.

        Returns token ids; the numbers, of which minus infinity excludes a token; and for each entry
        the number of output tokens from which it no longer applies. Entries that exclude come last.
        output: its content matters only if `reads_last_tokens`.
        """
        params = self.params
        banned = np.empty(0, np.int32)
        if self.bad_words is not None:
            banned = self.bad_words.banned_after(output)
        suppressed = params.suppressed_token_ids if params.min_tokens else banned[:0]
        num_lasting, end = len(params.bias_token_ids) + len(banned), min(params.min_tokens, _ALWAYS)
        return (
            np.concatenate([params.bias_token_ids, banned, suppressed]),
            np.concatenate([params.bias_values, _excluding(banned), _excluding(suppressed)]),
            np.repeat(np.array([_ALWAYS, end], np.int32), [num_lasting, len(suppressed)]),
        )

    @property
    def reads_last_tokens(self) -> bool:
        """Whether excluded tokens depend on the last output tokens, not only on their number."""
        return self.bad_words is not None and self.bad_words.has_prefixes


def _excluding(token_ids: Int32Array) -> Float32Array:
    return np.full(len(token_ids), -np.inf, np.float32)


class EditedRow(NamedTuple):
    """A row of the batch whose logits are edited."""

    row: int
    edits: LogitEdits
    output: Int32Array
    """Output tokens so far, drafts included."""
    num_drafts: int = 0
    """Number of drafts at the end of `output`, which `edits.occurrences` does not count."""

    @property
    def drafts(self) -> Int32Array:
        """The drafts at the end of `output`."""
        return self.output[len(self.output) - self.num_drafts :]


def apply_edits(logits: Tensor, rows: list[EditedRow]) -> None:
    """Edit the logits of these rows in place. logits: float32 [n, vocab_size]."""
    _add_entries(logits, [row for row in rows if row.edits.max_entries])
    apply_penalties(logits, [row for row in rows if row.edits.occurrences is not None])


def _add_entries(logits: Tensor, rows: list[EditedRow]) -> None:
    """Exclude tokens and add biases, in place; both precede penalties."""
    if not rows:
        return
    tokens, values = [], []
    for row in rows:
        token_ids, added, ends = row.edits.entries(row.output)
        applies = ends > len(row.output)
        tokens.append(token_ids[applies])
        values.append(added[applies])
    index = _indices(logits, [row.row for row in rows], tokens)
    added_values = upload(np.concatenate(values), logits.device)
    logits.index_put_(index, added_values, accumulate=True)


def apply_penalties(logits: Tensor, rows: list[EditedRow]) -> None:
    """Apply repetition (Keskar et al. 2019), frequency and presence penalties, in place.

    rows: rows with `edits.occurrences`.
    """
    found = [
        row.edits.occurrences.with_drafts(row.drafts)
        for row in rows
        if row.edits.occurrences is not None
    ]
    if not found:
        return
    index = _indices(logits, [row.row for row in rows], [token_ids for token_ids, _ in found])
    counts = np.concatenate([counts for _, counts in found])
    repeats = [len(token_ids) for token_ids, _ in found]

    def per_token(name: str) -> Tensor:
        values = np.array([getattr(row.edits.params, name) for row in rows], np.float32)
        return upload(np.repeat(values, repeats), logits.device)

    output_counts = upload(counts, logits.device)
    repetition = per_token("repetition_penalty")
    values = logits[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= per_token("frequency_penalty") * output_counts
    values -= per_token("presence_penalty") * (output_counts > 0)
    logits[index] = values


def _indices(logits: Tensor, rows: list[int], columns: list[Int32Array]) -> tuple[Tensor, Tensor]:
    """Index tensors, on the device of the logits, for these columns of each of these rows."""
    row_index = np.repeat(np.array(rows, np.int64), [len(column) for column in columns])
    column_index = np.concatenate(columns)
    return (
        upload(row_index, logits.device),
        upload(column_index.astype(np.int64), logits.device),
    )


def apply_masks(logits: Tensor, masked: MaskedRows | None) -> None:
    """Set logits that a row's bitmask excludes to minus infinity, in place.

    logits: float32 [n, vocab_size].
    """
    if masked is None:
        return
    if not logits.is_cpu:
        rows, bitmask = upload(masked.rows, logits.device), upload(masked.bitmask, logits.device)
        reference.apply_bitmask(logits, rows, bitmask)
        return
    # numpy unpacks bits with vector instructions; torch has no such function.
    excluded = torch.from_numpy(_excluded(masked, logits.shape[1]))
    if len(masked.rows) == len(logits):
        logits.masked_fill_(excluded, -torch.inf)
        return
    for row, columns in zip(masked.rows.tolist(), excluded, strict=True):
        logits[row].masked_fill_(columns, -torch.inf)


def _excluded(masked: MaskedRows, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Whether each token is excluded: [m, vocab_size]."""
    packed = (~masked.bitmask).view(np.uint8)
    return np.unpackbits(packed, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
