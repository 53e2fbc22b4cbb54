"""Which tokens occurred in the sequences with penalties, counted on the device.

A dense row of the vocabulary for each such sequence, so that the tokens that the device samples can
be counted where they are, and the next step launched before the host has heard of them. Rows are
given out up to a limit of memory; sequences beyond it are penalised from the host's own counts
(`worker_service/sampler/occurrences.py`), for which a launch waits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_service.pinned_memory import Column
from worker_service.sampler.upload import upload
from worker_service.sampling.logit_edits import EditedRow
from worker_service.sampling.sampling_table import SamplingTable

MAX_BYTES = 256 * 2**20
_INITIAL_ROWS = 8
_OCCURS = 1
_ONE_OUTPUT = 2
"""An entry is twice the count in the output, and one more if the token occurs at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Penalised:
    """Rows of a batch whose tokens are counted here, on the device; columns of [n]."""

    rows: Tensor
    """int64: of the batch."""

    counts: Tensor
    """int64: of the counts."""

    factors: Tensor
    """float32 [3, n]: repetition, frequency and presence penalty."""


class DevicePenalties:
    """Counts of tokens by slot, for the slots that have a row."""

    def __init__(self, vocab_size: int, device: torch.device, max_bytes: int = MAX_BYTES) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._max_rows = max_bytes // (4 * vocab_size)
        self._counts = self._allocate(min(_INITIAL_ROWS, self._max_rows))
        self._row_of: dict[int, int] = {}
        self._free = list(range(len(self._counts)))
        self._outdated: set[int] = set()

    def __contains__(self, slot: int) -> bool:
        """Whether a slot's tokens are counted here."""
        return slot in self._row_of

    def note(self, slot: int, table: SamplingTable) -> None:
        """What is counted for a slot is out of date: a sequence has come, or the host has sampled
        for it."""
        edits = table.edits.get(slot)
        if edits is None or edits.occurrences is None:
            self.release(slot)
            return
        if slot not in self._row_of:
            if not self._free and len(self._counts) < self._max_rows:
                self._grow()
            if not self._free:
                return
            self._row_of[slot] = self._free.pop()
        self._outdated.add(slot)

    def release(self, slot: int) -> None:
        """A slot's tokens need no counting."""
        self._outdated.discard(slot)
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._free.append(row)

    def forget(self) -> None:
        """No slot's do."""
        for slot in list(self._row_of):
            self.release(slot)

    def changes(self, table: SamplingTable) -> list[Column]:
        """What was noted since the last time, to be sent and given to `apply`: the counts that the
        host has now. Empty if there is nothing."""
        if not self._outdated:
            return []
        slots = sorted(self._outdated)
        self._outdated.clear()
        found = [table.edits[slot].occurrences for slot in slots]
        rows = np.array([self._row_of[slot] for slot in slots], np.int64)
        occurrences = [each for each in found if each is not None]
        counts = np.concatenate([each.output_counts for each in occurrences])
        return [
            rows,
            np.repeat(rows, [len(each) for each in occurrences]),
            np.concatenate([each.token_ids for each in occurrences]).astype(np.int64),
            (counts * _ONE_OUTPUT + _OCCURS).astype(np.int32),
        ]

    def apply(self, changes: list[Tensor]) -> None:
        """Take in what `changes` gave, once it is on the device."""
        if not changes:
            return
        rows, entry_rows, token_ids, values = changes
        self._counts.index_fill_(0, rows, 0)
        self._counts.index_put_((entry_rows, token_ids), values)

    def select(
        self, edited: Sequence[EditedRow], slots: npt.NDArray[np.int64]
    ) -> tuple[list[EditedRow], Penalised | None]:
        """Of a batch's edited rows those with penalties: from the host's counts, and from these."""
        penalised = [each for each in edited if each.edits.occurrences is not None]
        ours = [each for each in penalised if int(slots[each.row]) in self._row_of]
        if not ours:
            return penalised, None
        others = [each for each in penalised if int(slots[each.row]) not in self._row_of]
        params = [each.edits.params for each in ours]
        factors = [
            (each.repetition_penalty, each.frequency_penalty, each.presence_penalty)
            for each in params
        ]
        rows = np.array([each.row for each in ours], np.int64)
        counts = np.array([self._row_of[slot] for slot in slots[rows].tolist()], np.int64)
        return others, Penalised(
            rows=upload(rows, self._device),
            counts=upload(counts, self._device),
            factors=upload(np.array(factors, np.float32).T.copy(), self._device),
        )

    def penalise(self, logits: Tensor, penalised: Penalised) -> None:
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

    def count(self, tokens: Tensor, penalised: Penalised) -> None:
        """Count what a batch's rows have sampled, int64 [num_rows]; a failure counts as a token."""
        sampled = tokens.index_select(0, penalised.rows).clamp_min(0)
        entries = self._counts[penalised.counts, sampled]
        entries = (entries | _OCCURS) + _ONE_OUTPUT
        self._counts.index_put_((penalised.counts, sampled), entries)

    def _grow(self) -> None:
        """Double the rows, as far as memory goes."""
        old = self._counts
        self._counts = self._allocate(min(2 * len(old), self._max_rows))
        self._counts[: len(old)] = old
        self._free.extend(range(len(old), len(self._counts)))

    def _allocate(self, num_rows: int) -> Tensor:
        shape = (num_rows, self._vocab_size)
        return torch.zeros(shape, dtype=torch.int32, device=self._device)
