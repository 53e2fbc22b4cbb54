"""The forward pass of a step that is computed at once: operation by operation, or on a CPU as one
recorded program."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pagewire_kernels.batch import LayerCaches, StepBatch
from pagewire_kernels.interface import Computed, HeadOutput
from worker_service.array_types import Int64Array
from worker_service.models.interface import ComputesLogits, Model
from worker_service.pinned_memory import upload
from worker_service.runner.batch.step_rows import (
    DecodeInputs,
    StepRows,
    build_batch,
    lay_out,
)
from worker_service.runner.state.sequence_table import SequenceTable
from worker_service.sampling.sampler import Largest


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardPass:
    """The hidden states of a batch and where each of the plan's rows lies in them."""

    hidden: Tensor
    """[num_tokens, hidden_size]."""

    starts: Int64Array
    """[num_rows]: first hidden state of each row."""

    ends: Int64Array
    """[num_rows]: one past the last; equal to the start where a row computed nothing."""

    firsts: Int64Array
    """[num_rows]: position of each row's first token."""

    head: HeadOutput | None
    """The LM head's output for the sampling rows, if it was part of the pass."""

    captured: tuple[Tensor, ...]
    """Hidden states between the model's layers; see `Computed`."""


class HostForward:
    """Runs a model over one cache. Inputs are built on the host."""

    def __init__(self, model: Model, caches: Sequence[LayerCaches]) -> None:
        """caches: keys and values of the model's layers."""
        self._model = model
        self._to_logits = model.forward_to_logits if isinstance(model, ComputesLogits) else None
        self._caches = caches
        self._device = caches[0][0].device
        self._decodes = DecodeInputs(self._caches) if self._device.type == "cpu" else None

    def run(self, rows: StepRows, table: SequenceTable) -> ForwardPass | None:
        """Compute the rows that have something to compute; None if there are none."""
        firsts = table.num_computed_tokens[rows.row_ids]
        if rows.are_decodes and self._decodes is not None and len(rows.row_ids):
            batch = self._decodes.build(rows.row_ids, table)
            starts = np.arange(len(rows.row_ids))
            return self._pass(batch, starts, starts + 1, firsts)
        ends = rows.ends()
        if len(ends) == 0 or ends[-1] == 0:
            return None
        row_ids, lengths = rows.row_ids[rows.computes], rows.num_tokens[rows.computes]
        # A fork samples from its parent's last state, which is then named twice.
        is_plain = len(rows.sampling) > 0 and len(rows.forks) == 0
        sampled = rows.last_states(ends) if is_plain else None
        batch = build_batch(lay_out(row_ids, lengths, table), table, self._caches, sampled)
        return self._pass(batch, np.append(0, ends[:-1]), ends, firsts)

    def last_logits(
        self, rows: StepRows, forward: ForwardPass
    ) -> tuple[Tensor, Largest | None] | None:
        """Logits to sample from, float32 [num_sampling, vocab_size], and the largest of each row if
        they are known. None if no row samples."""
        if len(rows.sampling) == 0:
            return None
        if (head := forward.head) is not None:
            return head.logits, Largest(head.best.numpy(), head.largest.numpy())
        last = rows.last_states(forward.ends)
        if len(rows.forks) == 0:
            return self._logits_at(last, forward.hidden), None
        distinct, inverse = np.unique(last, return_inverse=True)
        return self._logits_at(distinct, forward.hidden)[self._index(inverse)], None

    def _pass(
        self, batch: StepBatch, starts: Int64Array, ends: Int64Array, firsts: Int64Array
    ) -> ForwardPass:
        """Run the model."""
        if self._to_logits is None:
            computed = Computed(self._model.forward(batch))
        else:
            computed = self._to_logits(batch)
        return ForwardPass(
            hidden=computed.hidden,
            starts=starts,
            ends=ends,
            firsts=firsts,
            head=computed.head,
            captured=computed.captured,
        )

    def _logits_at(self, positions: Int64Array, hidden: Tensor) -> Tensor:
        """Logits of some of the hidden states, named in rising order."""
        if len(positions) < len(hidden):
            hidden = hidden[self._index(positions)]
        return self._model.compute_logits(hidden)

    def _index(self, rows: Int64Array) -> Tensor:
        return upload(rows, self._device)
