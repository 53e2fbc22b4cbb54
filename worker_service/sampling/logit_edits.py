"""Changes to single logits that a sequence's parameters and tokens ask for, before temperature.

The order is vLLM's: bad words and suppressed tokens are excluded, then biases are added, then
penalties applied. Each kind is one gather and one scatter over all rows that have it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker_service.array_types import Int32Array
from worker_service.sampler.bad_words import BadWords
from worker_service.sampler.occurrences import Occurrences
from worker_service.sampler.upload import upload
from worker_service.sampling_params import SamplerParams


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """What one sequence's logits need before a token is chosen."""

    params: SamplerParams
    bad_words: BadWords | None
    occurrences: Occurrences | None

    @classmethod
    def of(cls, params: SamplerParams, prompt: Int32Array, output: Int32Array) -> "LogitEdits":
        """The edits for a sequence with these tokens so far."""
        occurrences = None
        if params.has_penalties:
            with_prompt = params.repetition_penalty != 1.0
            occurrences = Occurrences(prompt, output, with_prompt=with_prompt)
        bad_words = BadWords(params.bad_words) if params.bad_words else None
        return cls(params, bad_words, occurrences)

    @property
    def reads_last_tokens(self) -> bool:
        """Whether what is excluded depends on the last tokens, and not on their number alone."""
        return self.bad_words is not None and self.bad_words.has_prefixes

    def has_bans(self, output: Int32Array) -> bool:
        """Whether tokens may be excluded after this output."""
        return self.bad_words is not None or len(output) < self.params.min_tokens

    def banned(self, output: Int32Array) -> Int32Array:
        """Tokens excluded after this output."""
        banned = [] if self.bad_words is None else [self.bad_words.banned_after(output)]
        if len(output) < self.params.min_tokens:
            banned.append(self.params.suppressed_token_ids)
        return np.concatenate(banned) if banned else np.empty(0, np.int32)


class EditedRow(NamedTuple):
    """A row of the batch whose logits are edited."""

    row: int
    edits: LogitEdits
    output: Int32Array
    """Its output tokens so far."""


def apply_edits(logits: Tensor, rows: list[EditedRow]) -> None:
    """Edits the rows' logits in place. logits: float32 [n, vocab_size]."""
    apply_constraints(logits, rows)
    apply_penalties(logits, [row for row in rows if row.edits.occurrences is not None])


def apply_constraints(logits: Tensor, rows: list[EditedRow]) -> None:
    """Excludes tokens and adds biases, which come before penalties."""
    _ban(logits, rows)
    _add_biases(logits, [row for row in rows if len(row.edits.params.bias_token_ids)])


def _ban(logits: Tensor, rows: list[EditedRow]) -> None:
    rows = [row for row in rows if row.edits.has_bans(row.output)]
    if rows:
        banned = [row.edits.banned(row.output) for row in rows]
        index = _indices(logits, [row.row for row in rows], banned)
        # Not assigned as a number: torch takes that to a GPU by a copy that the host waits for.
        logits.index_put_(index, logits.new_full((), -torch.inf))


def _add_biases(logits: Tensor, rows: list[EditedRow]) -> None:
    if not rows:
        return
    params = [row.edits.params for row in rows]
    index = _indices(logits, [row.row for row in rows], [each.bias_token_ids for each in params])
    values = np.concatenate([each.bias_values for each in params])
    logits[index] += upload(values, logits.device)


def apply_penalties(logits: Tensor, rows: list[EditedRow]) -> None:
    """Repetition (Keskar et al. 2019), then frequency, then presence penalties, from counts of
    tokens that these rows have."""
    occurrences = [row.edits.occurrences for row in rows if row.edits.occurrences is not None]
    if not occurrences:
        return
    index = _indices(logits, [row.row for row in rows], [each.token_ids for each in occurrences])
    counts = np.concatenate([each.output_counts for each in occurrences])
    repeats = [len(each) for each in occurrences]

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
    """Row and column of each entry named, as index tensors on the logits' device."""
    row_index = np.repeat(np.array(rows, np.int64), [len(each) for each in columns])
    column_index = np.concatenate(columns)
    return (
        upload(row_index, logits.device),
        upload(column_index.astype(np.int64), logits.device),
    )
