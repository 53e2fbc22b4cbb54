"""Samples one token for each sampling row of a batch, or finds the candidates for one.

The order of operations is that of vLLM:

1. Requested log probabilities are computed from the model's own logits. For rows whose token the
   core chooses, they replace the logits in all following operations (`logprobs.py`).
2. Bad words and suppressed tokens are excluded, biases added and penalties applied; then the tokens
   that the sequence's constraint does not allow are excluded (`logit_edits.py`).
3. Temperature 0 selects the largest logit, and the lowest token id among equals. Any other
   temperature divides the logits.
4. min-p and top-k are applied, then top-p. The draw (`draw.py`) uses a uniform number that depends
   only on the sequence's seed, choice index and output position (`pagewire_kernels.philox`).

The outcome of a row is bitwise independent of the other rows of the batch.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagewire_kernels.philox import uniform
from worker_service.array_types import Float32Array, Int32Array, Int64Array
from worker_service.pinned_memory import upload
from worker_service.plan import Candidates, TokenLogprobs
from worker_service.sampling.draw import Filters, draw
from worker_service.sampling.logit_edits import EditedRow, apply_edits, apply_masks
from worker_service.sampling.logprobs import logprob_table, offer, to_logprobs
from worker_service.sampling.sampling_table import NO_LOGPROBS, SamplingTable
from worker_service.structured.masks import MaskedRows

NO_TOKEN = -1

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """The rows that sample in a step; all arrays are [n]."""

    row_ids: Int64Array
    """Rows of the `SamplingTable`."""

    positions: Int64Array
    """Number of output tokens that the sequence of each row has so far."""

    edited: list[EditedRow] = field(default_factory=list)
    masked: MaskedRows | None = None
    """Rows with a constraint, if there are any; the token of a row whose constraint has failed is
    ignored."""

    @property
    def is_changed(self) -> bool:
        """Whether the logits of any row are edited or masked before a token is chosen."""
        return bool(self.edited) or self.masked is not None

    @property
    def changed_rows(self) -> Int64Array:
        """The rows of the batch whose logits are edited or masked."""
        edited = np.array([edit.row for edit in self.edited], np.int64)
        return edited if self.masked is None else np.union1d(edited, self.masked.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """One token per row, and the rows that have none."""

    tokens: Int64Array
    """[n]; -1 for rows that failed, and for rows whose token the core chooses."""

    non_finite: Int64Array
    """Rows whose largest logit is NaN or infinite, or becomes so by edits or the temperature."""

    no_candidates: Int64Array
    """Rows in which every token is excluded."""

    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, for rows that request them and did not fail."""

    candidates: dict[int, Candidates] = field(default_factory=dict)
    """By row, for rows whose token the core chooses and that did not fail."""


class Largest(NamedTuple):
    """The largest logit of each row."""

    columns: Int64Array
    """[n]: the column of the largest logit, the lowest among equals."""

    values: Float32Array
    """[n]; a NaN counts as larger than any number."""


def sample(
    logits: Tensor, batch: SamplingBatch, table: SamplingTable, largest: Largest | None = None
) -> Samples:
    """Sample one token per row.

    logits: float32 [n, vocab_size]; largest: the largest logit of each row, computed here if it is
    None. Both are overwritten.
    """
    best, largest_values = largest or _largest(logits)
    is_plain = not batch.is_changed and table.is_plain[batch.row_ids].all()
    if is_plain and np.isfinite(largest_values).all():
        return Samples(tokens=best, non_finite=_NO_ROWS, no_candidates=_NO_ROWS)
    num_logprobs = table.num_logprobs[batch.row_ids]
    non_finite = np.flatnonzero(~np.isfinite(largest_values))
    _neutralise(logits, non_finite)
    largest_values[non_finite] = 0.0
    reporting = np.flatnonzero(num_logprobs != NO_LOGPROBS)
    raw = logits[_tensor(reporting, logits)] if len(reporting) else None
    num_candidates = table.num_candidates[batch.row_ids]
    offering = np.flatnonzero(num_candidates)
    if len(offering):
        to_logprobs(logits, offering)
    apply_edits(logits, batch.edited)
    apply_masks(logits, batch.masked)
    offered = offer(logits, offering, num_candidates[offering]) if len(offering) else {}
    no_candidates = _update_best(logits, batch.changed_rows, best, largest_values)
    no_candidates = no_candidates[num_candidates[no_candidates] == 0]
    overflowing = _overflowing(largest_values, table.temperature[batch.row_ids])
    non_finite = np.union1d(non_finite, overflowing)
    _neutralise(logits, np.union1d(no_candidates, overflowing))
    tokens = _choose(logits, best, batch, table)
    tokens[non_finite] = NO_TOKEN
    tokens[no_candidates] = NO_TOKEN
    tokens[offering] = NO_TOKEN
    logprobs = {} if raw is None else _logprobs(raw, reporting, tokens, num_logprobs)
    for row in non_finite.tolist():
        offered.pop(row, None)
    return Samples(
        tokens=tokens,
        logprobs=logprobs,
        candidates=offered,
        non_finite=non_finite,
        no_candidates=no_candidates,
    )


def _choose(
    logits: Tensor, tokens: Int64Array, batch: SamplingBatch, table: SamplingTable
) -> Int64Array:
    """Draw the tokens of the rows that are not greedy into `tokens`, and return it."""
    is_random = table.temperature[batch.row_ids] > 0
    if not is_random.any():
        return tokens
    is_filtered = table.is_filtered[batch.row_ids]
    for has_filters, kind in ((False, ~is_filtered), (True, is_filtered)):
        rows = np.flatnonzero(is_random & kind)
        if len(rows) == 0:
            continue
        part = logits if len(rows) == len(logits) else logits[_tensor(rows, logits)]
        ids = batch.row_ids[rows]
        part = part / _tensor(table.temperature[ids], logits).unsqueeze(1)
        numbers = uniform(table.seed[ids], table.choice_index[ids], batch.positions[rows])
        uniforms = _tensor(numbers, logits)
        filters = Filters.of_rows(table.filters, ids, logits.device) if has_filters else None
        tokens[rows] = draw(part, filters, uniforms).cpu().numpy()
    return tokens


def _tensor(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    """Copy values to the device of another tensor."""
    return upload(values, like.device)


def _largest(logits: Tensor) -> Largest:
    """Find the largest logit of each row, which also shows whether one is NaN, in one pass."""
    if not logits.is_cpu:
        largest, best = logits.max(dim=-1)
        return Largest(best.cpu().numpy(), largest.cpu().numpy())
    # numpy's argmax is vectorized, torch's is not.
    values = logits.numpy()
    best = values.argmax(axis=-1)
    return Largest(best, values[np.arange(len(values)), best])


def _update_best(
    logits: Tensor, rows: Int64Array, best: Int64Array, largest: Float32Array
) -> Int64Array:
    """Update the largest logits of changed rows. Returns the rows in which every token is
    excluded."""
    if len(rows) == 0:
        return rows
    best[rows], largest[rows] = _largest(logits[_tensor(rows, logits)])
    return rows[largest[rows] == -np.inf]


def _overflowing(largest: Float32Array, temperature: Float32Array) -> Int64Array:
    """The rows with a token whose largest logit, divided by the temperature, is not finite."""
    with np.errstate(over="ignore"):
        scaled = largest / np.where(temperature > 0, temperature, np.float32(1))
    return np.flatnonzero(~np.isfinite(scaled) & (largest != -np.inf))


def _neutralise(logits: Tensor, rows: Int64Array) -> None:
    """Set the logits of failed rows to 0, so that the rest of the batch can be sampled."""
    if len(rows):
        logits[_tensor(rows, logits)] = 0.0


def _logprobs(
    raw: Tensor, rows: Int64Array, tokens: Int64Array, num_logprobs: Int32Array
) -> dict[int, TokenLogprobs]:
    chosen = _tensor(tokens[rows].clip(min=0), raw)
    result = logprob_table(raw, chosen, int(num_logprobs[rows].max()))
    return {
        row: result.row(index, int(num_logprobs[row]))
        for index, row in enumerate(rows.tolist())
        if tokens[row] != NO_TOKEN
    }
