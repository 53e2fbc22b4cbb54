"""Vectors of a step's hidden states.

What is queued here on a device does not wait for it; `PooledRows.vectors` needs the result on the
host. A vector does not depend on the batch, nor on how its text was divided into rows: sums are
formed in the order of tokens, and every other operation reads one row.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from worker_service.array_types import Float32Array, Int64Array
from worker_service.models.interface import Pools
from worker_service.pinned_memory import upload
from worker_service.plan import PoolingHead, PoolingParams, PoolingType
from worker_service.runner.batch.step_rows import StepRows
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.runner.state.texts import Text

SumRows = Callable[[Tensor, Tensor, Tensor], None]
"""`LayerKernels.sum_rows`."""

_MIN_NORM = 1e-12
"""As in `torch.nn.functional.normalize`: a vector of zeros remains one."""


class _Span(NamedTuple):
    """The hidden states of a row, which belong to a text."""

    row: int
    """Of the plan."""
    place: int
    """Among the rows in the forward pass."""
    start: int
    """Its first hidden state in the forward pass."""
    end: int
    position: int
    """Of its first token."""
    text: Text
    brings: bool


class PooledRows(NamedTuple):
    """What some rows of a step bring, of one head."""

    spans: list[tuple[int, int, PoolingParams]]
    """Row of the plan, number of vectors, parameters."""

    values: Tensor
    """float32 [all vectors, size], neither shortened nor normalized."""

    def vectors(self, values: Float32Array) -> Iterator[tuple[int, Float32Array | None]]:
        """(row, its vectors one after the other); None if a number is not finite. values: those
        above, on the host."""
        shaped: dict[tuple[int, bool], Float32Array] = {}
        start = 0
        for row, count, params in self.spans:
            shape = params.dimensions, params.normalize
            if shape not in shaped:
                shaped[shape] = _shaped(values, *shape)
            found = shaped[shape][start : start + count]
            start += count
            yield row, found.ravel().copy() if np.isfinite(found).all() else None


def _shaped(values: Float32Array, dimensions: int, normalize: bool) -> Float32Array:
    values = values[:, : dimensions or None]
    if not normalize:
        return values
    norms = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
    return (values / np.maximum(norms, _MIN_NORM)).astype(np.float32)


class Pooling:
    """Pools the texts of one model."""

    def __init__(self, pooler: Pools, sum_rows: SumRows) -> None:
        self.facts = pooler.pooling
        self._pooler = pooler
        self._sum_rows = sum_rows

    def pool(self, rows: StepRows, hidden: Tensor, table: SequenceTable) -> list[PooledRows]:
        """Queue what the rows bring, and keep what later rows of their texts need. hidden:
        [num_tokens, hidden_size], of the forward pass."""
        ends = rows.ends()
        spans = [*_spans(rows, ends, table)]
        by_head: dict[PoolingHead, list[_Span]] = defaultdict(list)
        sums = self._sums(ends[rows.computes], spans, hidden)
        for span in spans:
            if span.brings:
                by_head[span.text.params.head].append(span)
            elif span.text.params.type is PoolingType.MEAN:
                span.text.partial = sums[span.place].clone()
            elif span.text.params.type is PoolingType.CLS and span.position == 0:
                span.text.partial = hidden[span.start].to(torch.float32, copy=True)
        return [
            PooledRows(
                [(span.row, _num_vectors(span), span.text.params) for span in of_head],
                self._pooler.pool(_pooled(of_head, hidden, sums), head),
            )
            for head, of_head in by_head.items()
        ]

    def _sums(self, ends: Int64Array, spans: list[_Span], hidden: Tensor) -> Tensor:
        """float32 [num_computing, hidden_size]: sums of the texts whose mean is the vector. ends:
        one past the last hidden state of each row that computes."""
        summed = [span for span in spans if span.text.params.type is PoolingType.MEAN]
        if not summed:
            return hidden.new_empty(0, dtype=torch.float32)
        starts = np.zeros(len(ends) + 1, np.int32)
        starts[1:] = ends
        sums = hidden.new_zeros(len(ends), hidden.shape[1], dtype=torch.float32)
        for span in summed:
            if span.text.partial is not None:
                sums[span.place] = span.text.partial
        self._sum_rows(hidden, upload(starts, hidden.device), sums)
        return sums


def _spans(rows: StepRows, all_ends: Int64Array, table: SequenceTable) -> Iterator[_Span]:
    ends, texts = all_ends.tolist(), table.texts
    for place, row in enumerate(np.flatnonzero(rows.computes).tolist()):
        text = texts.get(int(rows.row_ids[row]))
        if text is not None:
            end, count = ends[row], int(rows.num_tokens[row])
            position, brings = int(rows.firsts[row]), bool(rows.brings_vector[row])
            yield _Span(row, place, end - count, end, position, text, brings)


def _num_vectors(span: _Span) -> int:
    return span.end - span.start if span.text.params.type is PoolingType.ALL else 1


def _pooled(spans: list[_Span], hidden: Tensor, sums: Tensor) -> Tensor:
    """float32 [all vectors, hidden_size]: chosen hidden states, and means."""
    if all(span.text.params.type is PoolingType.MEAN for span in spans):
        return _means(spans, sums)
    states: list[Int64Array] = []
    means: list[_Span] = []
    mean_places: list[int] = []
    firsts: list[tuple[int, Tensor]] = []
    place = 0
    for span in spans:
        kind, partial = span.text.params.type, span.text.partial
        if kind is PoolingType.MEAN:
            means.append(span)
            mean_places.append(place)
        elif kind is PoolingType.CLS and partial is not None:
            firsts.append((place, partial))
        start = span.end - 1 if kind is PoolingType.LAST else span.start
        states.append(np.arange(start, start + _num_vectors(span)))
        place += _num_vectors(span)
    pooled = hidden.index_select(0, upload(np.concatenate(states), hidden.device)).float()
    if means:
        pooled[upload(np.array(mean_places), hidden.device)] = _means(means, sums)
    for place, first in firsts:
        pooled[place] = first
    return pooled


def _means(spans: list[_Span], sums: Tensor) -> Tensor:
    """float32 [len(spans), hidden_size]: the means of texts that end in these spans."""
    places = [span.place for span in spans]
    if len(places) < len(sums):
        sums = sums[upload(np.array(places), sums.device)]
    lengths = np.array([span.position + span.end - span.start for span in spans], np.float32)
    return sums / upload(lengths, sums.device)[:, None]
