"""The sampler whose tokens stay on the device.

The same choices as `worker_service.sampling`, by the kernels of `pagewire_kernels`: nothing here
waits for the device, so that a step can be launched while the one before it is computed. What the
two may differ in is the rounding of sums of probabilities.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels import reference
from pagewire_kernels.metadata import SamplingMetadata
from worker_service.array_types import Int64Array
from worker_service.device.penalties import DevicePenalties
from worker_service.runner.device_rows import NO_CANDIDATES, OFF_CONSTRAINT, DeviceSlots
from worker_service.sampler.upload import upload
from worker_service.sampling.draw import largest
from worker_service.sampling.logit_edits import apply_constraints, apply_penalties
from worker_service.sampling.logprobs import window
from worker_service.sampling.sampler import SamplingBatch
from worker_service.structured.masks import MaskedRows


class SamplingKernels(Protocol):
    """What a device needs; `pagewire_kernels.reference` tells what each does."""

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> Tensor:
        """One token per row; -1 where the largest logit is not finite."""
        ...

    def apply_bitmask(self, logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
        """Minus infinity where a row's bit is 0."""
        ...

    def gather_logprobs(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Log softmax at some tokens, and the rank of the first."""
        ...


def sampling_kernels(device: torch.device) -> SamplingKernels:
    """Those for a device."""
    if device.type == "cuda":
        from pagewire_kernels import gpu  # imports triton

        return gpu
    return reference


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingRows:
    """The rows that sample in a step, on the device; columns of [n]."""

    slots: Tensor
    """int64."""

    positions: Tensor
    """int32: output tokens each row's sequence has so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobTensors:
    """Log probabilities of each row's own token and of its most probable ones, in no order."""

    token_ids: Tensor
    """int64 [n, 1 + window]; the row's own first."""

    logprobs: Tensor
    """float32, the same shape."""

    ranks: Tensor
    """int32 [n], of the row's own."""


class DeviceSampler:
    """Samples for the sequences of some slots."""

    def __init__(
        self, slots: DeviceSlots, penalties: DevicePenalties, kernels: SamplingKernels
    ) -> None:
        self._slots = slots
        self._penalties = penalties
        self._kernels = kernels

    def sample(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """One token or failure per row, int64 [n], which its slot takes note of.

        logits: float32 [n, vocab_size]. Uses no memory of the host, so that it can be captured.
        """
        return self._slots.settle(rows.slots, self._draw(logits, rows))

    def sample_changed(self, logits: Tensor, rows: SamplingRows, batch: SamplingBatch) -> Tensor:
        """The same after a batch's edits and masks, which are applied in place."""
        changed = batch.changed_rows
        index = upload(changed, logits.device)
        was_sound = logits.index_select(0, index).amax(dim=-1).isfinite()
        apply_constraints(logits, batch.edited)
        others, penalised = self._penalties.select(batch.edited, batch.slots)
        apply_penalties(logits, others)
        if penalised is not None:
            self._penalties.penalise(logits, penalised)
        self._mask(logits, batch.masked)
        drawn = self._draw(logits, rows)
        failed = drawn.index_select(0, index)
        why = upload(_why_nothing_is_left(changed, batch.masked), logits.device)
        reasons = torch.where((failed < 0) & was_sound, why, failed)
        outcome = self._slots.settle(rows.slots, drawn.index_copy(0, index, reasons))
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
        return self._kernels.sample(logits, self._slots.sampling(rows.slots, rows.positions))


def _why_nothing_is_left(changed: Int64Array, masked: MaskedRows | None) -> Int64Array:
    """For each changed row the failure it has if every token was excluded."""
    reasons = np.full(len(changed), NO_CANDIDATES, np.int64)
    if masked is not None:
        reasons[np.isin(changed, masked.rows[masked.failed])] = OFF_CONSTRAINT
    return reasons
