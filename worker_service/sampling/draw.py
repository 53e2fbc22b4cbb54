"""Draws one token per row from its filtered distribution, by inverse transform sampling.

The filters of a row (min-p, top-k, top-p) reduce to one number, the *cut*: the smallest logit that
is kept. All tokens whose logit equals the cut are kept, so that the result does not depend on how
a sort breaks ties. Then one uniform number selects the first token, in order of token ids, at which
the cumulative probability exceeds it.

Sorting a vocabulary is slow, so it is avoided: rows without filters need no sort, and top-k and
top-p examine the largest `WINDOWS[0]` logits first and more only if those do not suffice.

The arithmetic of a row is independent of the other rows. Therefore sums over a row are computed
sequentially in float64 (`cumsum`) or over chunks of fixed size, never with `sum` over a whole row,
which torch splits among threads if there is only one row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from worker_service.array_types import Int64Array
from worker_service.pinned_memory import Column, upload
from worker_service.plan import FILTERS

WINDOWS = (64, 1024)
"""Numbers of largest logits that are examined in successive attempts, before all of a row."""

CHUNK = 128
"""Tokens per chunk of a row."""


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of n rows, on the device of the logits: a field for each of `FILTERS`."""

    top_k: Tensor
    """int64 [n]; 0 keeps all."""

    top_p: Tensor
    """float64 [n]; 1 keeps all."""

    min_p: Tensor
    """float64 [n]; 0 keeps all."""

    @classmethod
    def of_rows(
        cls, columns: Mapping[str, Column], row_ids: Int64Array, device: torch.device
    ) -> "Filters":
        """Gather the filters of some rows from the columns of a `SamplingTable`."""
        return cls(**{name: upload(columns[name][row_ids], device) for name in FILTERS})

    @classmethod
    def uniform(cls, num_rows: int, device: torch.device, **values: float) -> "Filters":
        """The same filters for all rows; filters that are not given exclude nothing."""
        columns = {name: np.full(num_rows, value) for name, value in {**FILTERS, **values}.items()}
        return cls.of_rows(columns, np.arange(num_rows), device)

    def rows(self, index: Tensor) -> "Filters":
        """The filters of some rows."""
        return Filters(**{name: getattr(self, name)[index] for name in FILTERS})


def draw(logits: Tensor, filters: Filters | None, uniforms: Tensor) -> Tensor:
    """Draw a token for each row. filters: None keeps all tokens.

    logits: float32 [n, vocab_size], already divided by the temperature, each row with a finite
    maximum; uniforms: float64 [n], in [0, 1). Returns token ids, int64 [n].
    """
    probs = torch.softmax(logits, dim=-1)
    if filters is None:
        return _invert(probs, uniforms)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    pending = torch.arange(len(logits), device=logits.device)
    for window in WINDOWS:
        if len(pending) == 0 or window >= logits.shape[1]:
            break
        found, certain = _draw_from_largest(
            _rows_of(logits, pending),
            _rows_of(probs, pending),
            filters.rows(pending),
            uniforms[pending],
            window,
        )
        tokens[pending[certain]] = found[certain]
        pending = pending[~certain]
    if len(pending):
        probs = _rows_of(probs, pending)
        keep = keep_mask(_rows_of(logits, pending), probs, filters.rows(pending))
        tokens[pending] = _invert(probs * keep, uniforms[pending])
    return tokens


def keep_mask(logits: Tensor, probs: Tensor, filters: Filters) -> Tensor:
    """Return which tokens are kept, found by sorting the whole vocabulary: bool [n, vocab_size]."""
    # Probabilities increase with logits, so that each can be sorted separately.
    values, weights = _sort_descending(logits), _sort_descending(probs)
    cut, _ = _find_cut(values, weights, filters, logits.shape[1])
    return logits >= cut.unsqueeze(1)


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the cumulative distribution over the whole vocabulary.

    weights: float32 [n, vocab_size], not negative, with a positive sum; uniforms: float64 [n].
    Finds the chunk first, then the token in it, so that only short sums are sequential.
    """
    cumulative = torch.cumsum(_chunk_sums(weights), dim=-1, dtype=torch.float64)
    target = uniforms * cumulative[:, -1]
    chunk = _first_above(cumulative, target)
    before = pad(cumulative, (1, 0)).gather(1, chunk).squeeze(1)
    columns = chunk * CHUNK + torch.arange(CHUNK, device=weights.device)
    is_inside = columns < weights.shape[1]
    members = weights.gather(1, columns.clamp_max(weights.shape[1] - 1)) * is_inside
    within = torch.cumsum(members, dim=-1, dtype=torch.float64)
    return (chunk * CHUNK + _first_above(within, target - before)).squeeze(1)


def largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest logits of each row, largest first, and their columns: [n, count].

    They are in the `count` chunks with the largest maxima; searching only these is several times
    faster than `topk` over a large vocabulary.
    """
    vocab_size = logits.shape[1]
    num_chunks = vocab_size // CHUNK
    if num_chunks < 4 * count:
        return torch.topk(logits, count, dim=-1)
    full = num_chunks * CHUNK
    maxima = logits[:, :full].unflatten(1, (num_chunks, CHUNK)).amax(dim=-1)
    chunks = torch.topk(maxima, count, dim=-1, sorted=False).indices
    columns = (chunks.unsqueeze(2) * CHUNK + torch.arange(CHUNK, device=logits.device)).flatten(1)
    tail = torch.arange(full, vocab_size, device=logits.device).expand(len(logits), -1)
    columns = torch.cat([columns, tail], dim=1)
    values, index = torch.topk(logits.gather(1, columns), count, dim=-1)
    return values, columns.gather(1, index)


def _draw_from_largest(
    logits: Tensor, probs: Tensor, filters: Filters, uniforms: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Draw among the `window` largest logits of each row.

    Returns token ids and whether they are certain, both [n]. They are if a row's filters keep fewer
    tokens than the window.
    """
    values, columns = largest(logits, window)
    weights = probs.gather(1, columns)
    cut, is_found = _find_cut(values, weights, filters, logits.shape[1])
    # If the window has a logit below the cut, it contains all logits from the cut upwards.
    certain = is_found & (values[:, -1] < cut)
    weights = weights * (values >= cut.unsqueeze(1))
    columns, order = torch.sort(columns, dim=-1)
    cumulative = torch.cumsum(weights.gather(1, order), dim=-1, dtype=torch.float64)
    index = _first_above(cumulative, uniforms * cumulative[:, -1])
    return columns.gather(1, index).squeeze(1), certain


def _find_cut(
    values: Tensor, weights: Tensor, filters: Filters, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return the smallest logit that is kept, and whether the window sufficed to find it: [n].

    values: [n, window], the largest logits of each row, largest first; weights: their
    probabilities. min-p and top-k apply to the whole distribution, then top-p to what they keep.
    """
    window = values.shape[1]
    top_k = filters.top_k.clamp_max(vocab_size)
    has_top_k = top_k > 0
    kth = values.gather(1, (top_k.clamp(1, window) - 1).unsqueeze(1)).squeeze(1)
    cut = torch.maximum(
        torch.where(has_top_k, kth, -torch.inf),
        values[:, 0] + torch.log(filters.min_p).to(values.dtype),
    )
    is_all = ~has_top_k & (filters.min_p == 0.0)
    is_inside = (cut > values[:, -1]) | (window == vocab_size)
    mass = torch.cumsum(weights * (values >= cut.unsqueeze(1)), dim=-1, dtype=torch.float64)
    total = torch.where(is_all, 1.0, mass[:, -1])
    has_crossed = mass >= (filters.top_p * total).unsqueeze(1)
    is_nucleus = (filters.top_p < 1.0) & has_crossed[:, -1]
    crossing = values.gather(1, has_crossed.int().argmax(dim=-1, keepdim=True)).squeeze(1)
    cut = torch.where(is_nucleus, torch.maximum(cut, crossing), cut)
    return cut, torch.where(is_all, is_nucleus, is_inside)


def _sort_descending(values: Tensor) -> Tensor:
    if values.is_cpu:
        # numpy sorts with vector instructions, about twenty times faster than torch.
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)
    return torch.sort(values, dim=-1, descending=True).values


def _chunk_sums(weights: Tensor) -> Tensor:
    """Sums over chunks of `CHUNK` columns, of which the last may be shorter: [n, num_chunks]."""
    num_chunks = weights.shape[1] // CHUNK
    full = num_chunks * CHUNK
    sums = weights[:, :full].unflatten(1, (num_chunks, CHUNK)).sum(dim=-1)
    if full == weights.shape[1]:
        return sums
    return torch.cat([sums, torch.cumsum(weights[:, full:], dim=-1)[:, -1:]], dim=1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index of the first entry above the target: [n, 1].

    Rounding can put a target at or above the last entry; then it is the index of the first entry
    that equals the last one, which has a positive weight, too.
    """
    above = torch.searchsorted(cumulative, target.unsqueeze(1), right=True)
    return torch.minimum(above, torch.searchsorted(cumulative, cumulative[:, -1:].contiguous()))


def _rows_of(tensor: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a tensor; the tensor itself, not copied, if these are all rows."""
    return tensor if len(rows) == len(tensor) else tensor[rows]
