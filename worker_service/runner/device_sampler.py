"""The sampler whose tokens stay on the device, and the token counts it needs for penalties.

It makes the same choices as `worker_service.sampling`, with the kernels of `pagewire_kernels`.
Nothing here waits for the device, so a step can be launched while the one before it is computed.
The two may differ only in the rounding of sums of probabilities.

Counts are a dense row of the vocabulary for each sequence with penalties, so that tokens sampled on
the device are counted there, and the next step is launched before the host knows them. Count rows
are limited by memory; sequences beyond the limit are penalised from the host's own counts
(`sampling/logit_edits.py`), for which a launch waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.batch import SamplingMetadata
from worker_service.array_types import Int64Array
from worker_service.pinned_memory import Column, upload
from worker_service.runner.device_rows import NO_CANDIDATES, OFF_CONSTRAINT, DeviceRows
from worker_service.sampling.draw import largest
from worker_service.sampling.logit_edits import EditedRow, apply_constraints, apply_penalties
from worker_service.sampling.logprobs import window
from worker_service.sampling.sampler import SamplingBatch
from worker_service.sampling.sampling_table import SamplingTable
from worker_service.structured.masks import MaskedRows

MAX_COUNT_BYTES = 256 * 2**20
_INITIAL_ROWS = 8
_OCCURS = 1
_ONE_OUTPUT = 2
"""An entry is twice the count in the output, and one more if the token occurs at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PenalizedRows:
    """Rows of a batch whose tokens are counted on the device; columns of [n]."""

    rows: Tensor
    """int64: rows of the batch."""

    counts: Tensor
    """int64: rows of counts."""

    factors: Tensor
    """float32 [3, n]: repetition, frequency and presence penalty."""


class DevicePenalties:
    """Token counts of some rows of the sequence table, each in a row of counts."""

    def __init__(
        self, vocab_size: int, device: torch.device, max_bytes: int = MAX_COUNT_BYTES
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_rows = max_bytes // (4 * vocab_size)
        self._counts = self._allocate(min(_INITIAL_ROWS, self._max_rows))
        self._row_of: dict[int, int] = {}
        self._free = list(range(len(self._counts)))
        self._outdated: set[int] = set()

    def __contains__(self, row_id: int) -> bool:
        """Whether the tokens of this table row are counted on the device."""
        return row_id in self._row_of

    def note(self, row_id: int, table: SamplingTable) -> None:
        """Mark the counts of a table row as outdated: a sequence was added, or the host has sampled
        for it."""
        edits = table.edits.get(row_id)
        if edits is None or edits.occurrences is None:
            self.release(row_id)
            return
        if row_id not in self._row_of:
            if not self._free and len(self._counts) < self._max_rows:
                self._grow()
            if not self._free:
                return
            self._row_of[row_id] = self._free.pop()
        self._outdated.add(row_id)

    def release(self, row_id: int) -> None:
        """Stop counting the tokens of this table row."""
        self._outdated.discard(row_id)
        row = self._row_of.pop(row_id, None)
        if row is not None:
            self._free.append(row)

    def forget(self) -> None:
        """Stop counting the tokens of all rows."""
        for row_id in list(self._row_of):
            self.release(row_id)

    def changes(self, table: SamplingTable) -> list[Column]:
        """The host's counts of outdated rows, to be sent to the device and passed to `apply`; empty
        if there are none."""
        if not self._outdated:
            return []
        row_ids = sorted(self._outdated)
        self._outdated.clear()
        found = [table.edits[row_id].occurrences for row_id in row_ids]
        rows = np.array([self._row_of[row_id] for row_id in row_ids], np.int64)
        occurrences = [each for each in found if each is not None]
        counts = np.concatenate([each.output_counts for each in occurrences])
        return [
            rows,
            np.repeat(rows, [len(each) for each in occurrences]),
            np.concatenate([each.token_ids for each in occurrences]).astype(np.int64),
            (counts * _ONE_OUTPUT + _OCCURS).astype(np.int32),
        ]

    def apply(self, changes: list[Tensor]) -> None:
        """Apply the columns of `changes`, which are now on the device."""
        if not changes:
            return
        rows, entry_rows, token_ids, values = changes
        self._counts.index_fill_(0, rows, 0)
        self._counts.index_put_((entry_rows, token_ids), values)

    def select(
        self, edited: Sequence[EditedRow], row_ids: Int64Array
    ) -> tuple[list[EditedRow], PenalizedRows | None]:
        """A batch's rows with penalties: those that the host counts, and those counted here."""
        penalised = [each for each in edited if each.edits.occurrences is not None]
        ours = [each for each in penalised if int(row_ids[each.row]) in self._row_of]
        if not ours:
            return penalised, None
        others = [each for each in penalised if int(row_ids[each.row]) not in self._row_of]
        params = [each.edits.params for each in ours]
        factors = [
            (each.repetition_penalty, each.frequency_penalty, each.presence_penalty)
            for each in params
        ]
        rows = np.array([each.row for each in ours], np.int64)
        counts = np.array([self._row_of[row_id] for row_id in row_ids[rows].tolist()], np.int64)
        return others, PenalizedRows(
            rows=upload(rows, self._device),
            counts=upload(counts, self._device),
            factors=upload(np.array(factors, np.float32).T.copy(), self._device),
        )

    def penalise(self, logits: Tensor, penalised: PenalizedRows) -> None:
        """Repetition (Keskar et al. 2019), then frequency, then presence penalties, in place.

        logits: float32 [num_rows, vocab_size].
        """
        entries = self._counts.index_select(0, penalised.counts)
        counts = entries // _ONE_OUTPUT
        repetition, frequency, presence = penalised.factors.unsqueeze(2)
        values = logits.index_select(0, penalised.rows)
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(entries > 0, repeated, values)
        values -= frequency * counts
        values -= presence * (counts > 0)
        logits.index_copy_(0, penalised.rows, values)

    def count(self, tokens: Tensor, penalised: PenalizedRows) -> None:
        """Count the tokens sampled in a batch, int64 [num_rows]; a failure counts as a token."""
        sampled = tokens.index_select(0, penalised.rows).clamp_min(0)
        entries = self._counts[penalised.counts, sampled]
        entries = (entries | _OCCURS) + _ONE_OUTPUT
        self._counts.index_put_((penalised.counts, sampled), entries)

    def _grow(self) -> None:
        """Double the rows, up to the memory limit."""
        old = self._counts
        self._counts = self._allocate(min(2 * len(old), self._max_rows))
        self._counts[: len(old)] = old
        self._free.extend(range(len(old), len(self._counts)))

    def _allocate(self, num_rows: int) -> Tensor:
        shape = (num_rows, self._vocab_size)
        return torch.zeros(shape, dtype=torch.int32, device=self._device)


class SamplingKernels(Protocol):
    """Kernels that sampling needs; `pagewire_kernels.reference` defines each."""

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """One token per row; -1 where the largest logit is not finite."""
        ...

    def apply_bitmask(self, logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
        """Set logits to minus infinity where a row's bit is 0."""
        ...

    def gather_logprobs(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log softmax of some tokens of each row, and the rank of the first."""
        ...


def sampling_kernels(device: torch.device) -> SamplingKernels:
    """The kernels of a device."""
    if device.type == "cuda":
        from pagewire_kernels import triton as triton_kernels  # imports triton

        return triton_kernels
    return reference


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """The rows that sample in a step, on the device; columns of [n]."""

    row_ids: Tensor
    """int64."""

    positions: Tensor
    """int32: output tokens each row's sequence has so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobTensors:
    """Log probabilities of each row's own token and of its most probable ones, unordered."""

    token_ids: Tensor
    """int64 [n, 1 + window]; the row's own first."""

    logprobs: Tensor
    """float32, the same shape."""

    ranks: Tensor
    """int32 [n]: rank of the row's own token."""


class DeviceSampler:
    """Samples on the device, for sequences in rows of the table."""

    def __init__(
        self, device_rows: DeviceRows, penalties: DevicePenalties, kernels: SamplingKernels
    ) -> None:
        self._device_rows = device_rows
        self._penalties = penalties
        self._kernels = kernels

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """One token or failure per row, int64 [n], also written to the device's rows.

        logits: float32 [n, vocab_size]. Reads no host memory, so that it can be captured.
        """
        return self._device_rows.settle(rows.row_ids, self._draw(logits, rows))

    def sample_changed(self, logits: Tensor, rows: SamplingRows, batch: SamplingBatch) -> Tensor:
        """Sample after applying a batch's edits and masks to the logits in place."""
        changed = batch.changed_rows
        index = upload(changed, logits.device)
        was_sound = logits.index_select(0, index).amax(dim=-1).isfinite()
        apply_constraints(logits, batch.edited)
        others, penalised = self._penalties.select(batch.edited, batch.row_ids)
        apply_penalties(logits, others)
        if penalised is not None:
            self._penalties.penalise(logits, penalised)
        self._mask(logits, batch.masked)
        drawn = self._draw(logits, rows)
        failed = drawn.index_select(0, index)
        why = upload(_why_nothing_is_left(changed, batch.masked), logits.device)
        reasons = torch.where((failed < 0) & was_sound, why, failed)
        outcome = self._device_rows.settle(rows.row_ids, drawn.index_copy(0, index, reasons))
        if penalised is not None:
            self._penalties.count(outcome, penalised)
        return outcome

    def logprobs(self, logits: Tensor, tokens: Tensor, num_top: int) -> LogprobTensors:
        """logits: float32 [n, vocab_size], unedited; tokens: int64 [n], failures among them."""
        ids = tokens.clamp_min(0).unsqueeze(1)
        if num_top > 0:
            _, top_ids = largest(logits, window(num_top, logits.shape[1]))
            ids = torch.cat([ids, top_ids], dim=1)
        logprobs, ranks = self._kernels.gather_logprobs(logits, ids)
        return LogprobTensors(token_ids=ids, logprobs=logprobs, ranks=ranks)

    def _mask(self, logits: Tensor, masked: MaskedRows | None) -> None:
        if masked is not None:
            rows = upload(masked.rows, logits.device)
            self._kernels.apply_bitmask(logits, rows, upload(masked.bitmask, logits.device))

    def _draw(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        return self._kernels.sample(
            logits, self._device_rows.sampling(rows.row_ids, rows.positions)
        )


def _why_nothing_is_left(changed: Int64Array, masked: MaskedRows | None) -> Int64Array:
    """For each changed row the failure it has if every token was excluded."""
    reasons = np.full(len(changed), NO_CANDIDATES, np.int64)
    if masked is not None:
        reasons[np.isin(changed, masked.rows[masked.failed])] = OFF_CONSTRAINT
    return reasons
