"""One token for each sampling row of a batch, or the candidates for one.

The order of operations is vLLM's:

1. log probabilities, where asked for, are of the model's own logits; where the core chooses the
   token, they take the logits' place from here on (`logprobs.py`);
2. bad words and suppressed tokens are excluded, biases added, penalties applied, then what
   the sequence's constraint does not allow is excluded (`logit_edits.py`);
3. temperature 0 takes the largest logit, the lowest token id among equals; any other temperature
   divides the logits;
4. min-p and top-k, then top-p, and the draw (`draw.py`) with a uniform number that depends on the
   sequence's seed, choice index and output position alone (`pagewire_kernels.philox`).

A row's outcome is bitwise the same whatever other rows are in the batch.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagewire_kernels.philox import uniform
from worker_service.array_types import Float32Array, Int32Array, Int64Array
from worker_service.pinned_memory import upload
from worker_service.plan import FILTERS, Candidates, SamplerParams, TokenLogprobs
from worker_service.sampling.draw import Filters, draw, draw_unfiltered
from worker_service.sampling.logit_edits import EditedRow, LogitEdits, apply_edits, apply_masks
from worker_service.sampling.logprobs import logprob_table, offer, to_logprobs
from worker_service.structured.masks import MaskedRows

NO_LOGPROBS = -1


class SamplingTable:
    """One row per sequence; parameters are columns, so that a batch gathers each one at once.

    Most sequences need no edits of single logits; those that do have a `LogitEdits` in `edits`.
    """

    def __init__(self, num_rows: int) -> None:
        self.temperature = np.zeros(num_rows, np.float32)
        self.filters = {name: np.full(num_rows, neutral) for name, neutral in FILTERS.items()}
        """Columns of float64 or int64, by parameter."""
        self.is_filtered = np.zeros(num_rows, np.bool_)
        """Whether any filter excludes anything."""
        self.seed = np.zeros(num_rows, np.uint64)
        self.choice_index = np.zeros(num_rows, np.uint32)
        self.num_logprobs = np.full(num_rows, NO_LOGPROBS, np.int32)
        self.num_candidates = np.zeros(num_rows, np.int32)
        """0: the worker chooses the token."""
        self.is_plain = np.zeros(num_rows, np.bool_)
        """Greedy without log probabilities: argmax decides, edits aside."""
        self.edits: dict[int, LogitEdits] = {}

    def resize(self, num_rows: int) -> None:
        """Make room for more rows."""
        for columns in (vars(self), self.filters):
            for name, column in columns.items():
                if isinstance(column, np.ndarray):
                    columns[name] = np.pad(column, (0, num_rows - len(column)))

    def put(
        self,
        row_id: int,
        params: SamplerParams,
        choice_index: int,
        prompt: Int32Array,
        output: Int32Array,
    ) -> None:
        """Add a sequence with its tokens so far."""
        for name, column in self.filters.items():
            column[row_id] = getattr(params, name)
        self.is_filtered[row_id] = params.has_filters
        self.seed[row_id] = params.seed
        self.choice_index[row_id] = choice_index
        reports = params.num_candidates is not None
        self.num_candidates[row_id] = params.num_candidates or 0
        self.temperature[row_id] = 0.0 if reports else params.temperature
        self.num_logprobs[row_id] = (
            NO_LOGPROBS if reports or params.num_logprobs is None else params.num_logprobs
        )
        self.is_plain[row_id] = (
            not reports and params.temperature == 0.0 and params.num_logprobs is None
        )
        if params.has_penalties or params.has_constraints:
            self.edits[row_id] = LogitEdits.of(params, prompt, output)

    def append(self, row_ids: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> None:
        """Record one more output token of each of these rows, which may be named repeatedly."""
        if not self.edits:
            return
        for row_id, token in zip(row_ids.tolist(), tokens.tolist(), strict=True):
            edits = self.edits.get(row_id)
            if edits is not None and edits.occurrences is not None:
                edits.occurrences.append(token)

    def remove(self, row_id: int) -> None:
        """Forget the sequence in this row."""
        self.edits.pop(row_id, None)


NO_TOKEN = -1

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingBatch:
    """The rows that sample in this step; all arrays are [n]."""

    row_ids: Int64Array
    positions: Int64Array
    """Output tokens each row's sequence has so far."""

    edited: list[EditedRow] = field(default_factory=list)
    masked: MaskedRows | None = None
    """Rows that have a constraint, if there are any; the token of a failed one is ignored."""

    @property
    def is_changed(self) -> bool:
        """Whether any row's logits are not the model's own when a token is chosen."""
        return bool(self.edited) or self.masked is not None

    @property
    def changed_rows(self) -> Int64Array:
        """Those rows."""
        edited = np.array([each.row for each in self.edited], np.int64)
        return edited if self.masked is None else np.union1d(edited, self.masked.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """One token per row, and which rows have none."""

    tokens: Int64Array
    """[n]; -1 in failed rows, and where the core chooses."""

    non_finite: Int64Array
    """Rows whose largest logit is NaN or infinite. Minus infinity elsewhere excludes a token."""

    no_candidates: Int64Array
    """Rows whose constraints excluded every token."""

    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """By row, for those that asked and did not fail."""

    candidates: dict[int, Candidates] = field(default_factory=dict)
    """By row, for those whose tokens the core chooses, unless they failed; they have no token."""


class Largest(NamedTuple):
    """Each row's largest logit."""

    columns: Int64Array
    """[n]: its column, the lowest among equals."""

    values: Float32Array
    """[n]; a NaN counts as larger than any number."""


def sample(
    logits: Tensor, batch: SamplingBatch, table: SamplingTable, largest: Largest | None = None
) -> Samples:
    """Sample one token per row. logits: float32 [n, vocab_size], overwritten, as are the columns of
    `largest`, which is computed here if it is None."""
    best, largest_values = largest = largest or _largest(logits)
    if not batch.is_changed and table.is_plain[batch.row_ids].all() and _all_finite(largest):
        return Samples(tokens=best, non_finite=_NO_ROWS, no_candidates=_NO_ROWS)
    num_logprobs = table.num_logprobs[batch.row_ids]
    non_finite = np.flatnonzero(~np.isfinite(largest_values))
    _neutralise(logits, non_finite)
    wanted = np.flatnonzero(num_logprobs != NO_LOGPROBS)
    raw = logits[_tensor(wanted, logits)] if len(wanted) else None
    num_candidates = table.num_candidates[batch.row_ids]
    offering = np.flatnonzero(num_candidates)
    if len(offering):
        to_logprobs(logits, offering)
    apply_edits(logits, batch.edited)
    apply_masks(logits, batch.masked)
    offered = offer(logits, offering, num_candidates[offering]) if len(offering) else {}
    no_candidates = _update_best(logits, batch.changed_rows, best)
    no_candidates = no_candidates[num_candidates[no_candidates] == 0]
    _neutralise(logits, no_candidates)
    tokens = _choose(logits, best, batch, table)
    tokens[non_finite] = NO_TOKEN
    tokens[no_candidates] = NO_TOKEN
    tokens[offering] = NO_TOKEN
    logprobs = {} if raw is None else _logprobs(raw, wanted, tokens, num_logprobs)
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
    """One token per row; `tokens` contains those of the greedy rows."""
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
        if has_filters:
            drawn = draw(part, Filters.of_rows(table.filters, ids, logits.device), uniforms)
        else:
            drawn = draw_unfiltered(part, uniforms)
        tokens[rows] = drawn.cpu().numpy()
    return tokens


def _tensor(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    """The values on the device of another tensor."""
    return upload(values, like.device)


def _largest(logits: Tensor) -> Largest:
    """Find the tokens, and the rows that have none, in one pass."""
    if not logits.is_cpu:
        largest, best = logits.max(dim=-1)
        return Largest(best.cpu().numpy(), largest.cpu().numpy())
    # numpy's is vectorised, torch's is not.
    values = logits.numpy()
    best = values.argmax(axis=-1)
    return Largest(best, values[np.arange(len(values)), best])


def _all_finite(largest: Largest) -> bool:
    return bool(np.isfinite(largest.values).all())


def _update_best(logits: Tensor, rows: Int64Array, best: Int64Array) -> Int64Array:
    """Update `best` for changed rows; returns the rows in which every token is excluded."""
    if len(rows) == 0:
        return rows
    best[rows], largest = _largest(logits[_tensor(rows, logits)])
    return rows[largest == -np.inf]


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
