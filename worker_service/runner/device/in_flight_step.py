"""A step that was launched on a device, until the host has its result.

The outcome of a step is read twice. The collector thread *collects* it for the core as soon as it
is available. The model thread *resolves* it into the table of sequences
(`state/sequence_state.py`). Neither waits for the other, and neither changes what the other
reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import NOT_SAMPLED
from worker_service.array_types import Int32Array, Int64Array
from worker_service.cpu_cores import num_usable_cores
from worker_service.pinned_memory import Column, Staging
from worker_service.plan import (
    Candidates,
    PromptLogprobs,
    RowErrorReason,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    monotonic_us,
)
from worker_service.runner.batch.step_outcome import StepOutcome, StepStart, nothing_sampled
from worker_service.runner.batch.step_rows import PromptSpan
from worker_service.runner.device.rows import FAILURES
from worker_service.sampling.logprobs import of_prompt, table_of
from worker_service.sampling.sampler import NO_TOKEN


class DeviceEvent(Protocol):
    """A point in a device's queue of work, reached when all work queued before it is done."""

    @property
    def is_reached(self) -> bool:
        """Whether the device has reached it."""
        ...

    def wait(self) -> None:
        """Wait until the device has reached it, without holding the interpreter lock."""
        ...

    def us_since(self, earlier: "DeviceEvent") -> int:
        """Microseconds of device time between two events, both reached."""
        ...


_MAX_SLEEPING_CORES = 4
"""With at most this many cores, a thread that waits for an event sleeps. With more it spins, which
notices the event some microseconds earlier but occupies a core that other threads may need."""


@cache
def _sleeps() -> bool:
    return num_usable_cores() <= _MAX_SLEEPING_CORES


class CudaEvent:
    """An event on the current stream of the thread that creates it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True, blocking=_sleeps())
        self._event.record()

    @property
    def is_reached(self) -> bool:
        """Whether the device has reached it."""
        return self._event.query()

    def wait(self) -> None:
        """Wait until the device has reached it."""
        # A thread without a current device would initialise the first one and take memory there.
        with torch.cuda.device(self._event.device):
            self._event.synchronize()

    def us_since(self, earlier: DeviceEvent) -> int:
        """Microseconds between the two."""
        assert isinstance(earlier, CudaEvent)
        return round(earlier._event.elapsed_time(self._event) * 1000)


_INITIAL_WORDS = 1024
_DTYPES = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}


class StepBuffers:
    """Host memory of one in-flight step: its inputs, and the outcome that the device writes."""

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self._masks = Staging(device)
        self._pinned = device.type == "cuda"
        self._fetched = self._allocate(_INITIAL_WORDS)

    def send_bitmask(self, bitmask: Int32Array, target: Tensor | None) -> Tensor:
        """Copy a bitmask to the device, to the first rows of a larger one if there is a target."""
        where = None if target is None else target.view(-1).view(torch.uint8)
        sent = self._masks.send([bitmask], where)[0]
        return sent if target is None else target

    def fetch(self, tensors: Sequence[Tensor]) -> list[Column]:
        """Copy tensors, whose elements have four or eight bytes, to the host in one copy. Returns
        the memory that holds them once the device is done."""
        words = [tensor.reshape(-1).view(torch.int32) for tensor in tensors]
        size = sum(map(len, words))
        if size > len(self._fetched):
            self._fetched = self._allocate(2 * size)
        packed = words[0] if len(words) == 1 else torch.cat(words)
        self._fetched[:size].copy_(packed, non_blocking=True)
        parts = self._fetched[:size].split([len(part) for part in words])
        return [
            part.numpy().view(_DTYPES[tensor.dtype]).reshape(tensor.shape)
            for part, tensor in zip(parts, tensors, strict=True)
        ]

    def _allocate(self, num_words: int) -> Tensor:
        return torch.empty(num_words, dtype=torch.int32, pin_memory=self._pinned)


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedLogprobs:
    """Log probabilities that are being copied to the host: of `LogprobTensors`."""

    rows: Int64Array
    """Sampling rows that asked for them."""

    num_top: Int32Array
    """Number of most probable tokens that each of them asked for."""

    columns: Sequence[Column]

    def entries(self) -> dict[int, TokenLogprobs]:
        """Log probabilities by sampling row, once the copies are done."""
        table = table_of(*self.columns)
        counts = zip(self.rows.tolist(), self.num_top.tolist(), strict=True)
        return {row: table.row(index, num_top) for index, (row, num_top) in enumerate(counts)}


class FetchedPrompt(NamedTuple):
    """Log probabilities of a span of prompt tokens that are being copied to the host."""

    span: PromptSpan
    pieces: Sequence[Sequence[Column]]
    """Of each `LogprobTensors`."""

    def entry(self) -> PromptLogprobs | None:
        """The log probabilities, once the copies are done; None if one is not finite."""
        tables = [table_of(*columns) for columns in self.pieces]
        found = of_prompt(self.span.start, self.span.num_top, tables)
        return found if np.isfinite(found.logprobs).all() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedCandidates:
    """Candidates that are being copied to the host: of `CandidateTensors`."""

    rows: Int64Array
    """Sampling rows whose tokens the core chooses."""

    counts: Int32Array
    """Number of candidates that each of them asked for."""

    columns: Sequence[Column]

    def entries(self) -> dict[int, Candidates]:
        """Candidates by sampling row, once the copies are done."""
        token_ids, logprobs = self.columns[0].astype(np.int32), self.columns[1].copy()
        kept = np.minimum(np.isfinite(logprobs).sum(axis=1), self.counts).tolist()
        return {
            row: Candidates(token_ids=token_ids[index, :count], logprobs=logprobs[index, :count])
            for index, (row, count) in enumerate(zip(self.rows.tolist(), kept, strict=True))
        }


class LastFinishTime:
    """When the last collected step was done; the next one had the device only from then on."""

    def __init__(self) -> None:
        self.time_us = 0


@dataclass(kw_only=True, slots=True, eq=False)
class InFlightStep:
    """One launched step. Implements `Step` of `worker_service.engine.executor`, and `Outcome`."""

    plan: StepPlan
    rows: Int64Array
    """[n]: the plan's rows that sample, then those that only report on their prompts."""

    errors: dict[int, RowErrorReason]
    """Rows of the plan whose sequences were known to have failed."""

    numbers: Int64Array
    """[n]: a token, one of `FAILURES` or NOT_SAMPLED each, once `end` is reached."""

    logprobs: FetchedLogprobs | None
    candidates: FetchedCandidates | None
    prompts: Sequence[FetchedPrompt]
    buffers: StepBuffers
    begin: DeviceEvent
    computed: DeviceEvent
    end: DeviceEvent
    start: StepStart
    cache_device_us: Callable[[], int]
    """Microseconds that the cache operations have taken the device."""

    last_finish: LastFinishTime
    samples: bool = True
    """Whether this rank samples; the results of the others have no tokens."""

    check: Callable[[], None] | None = None
    """Raises GroupBroken if ranks were interrupted, so that what the device computed is invalid."""

    is_collected: bool = False

    @property
    def is_available(self) -> bool:
        """Whether the device is done."""
        return self.end.is_reached

    def wait(self) -> Int64Array:
        """[n, 1]: a token or negative outcome per row, once the device is done. Raises
        GroupBroken."""
        self.end.wait()
        if self.check is not None:
            self.check()
        return self.numbers[:, np.newaxis].copy()

    def collect(self) -> StepResult:
        """Return the step's result, once the device is done. Raises GroupBroken."""
        numbers = self.wait()[:, 0]
        if not self.samples:
            self.is_collected = True
            return nothing_sampled(self.plan, self._timings())
        outcome = StepOutcome.of_failed(len(self.plan.seq_ids), self.errors)
        outcome.tokens[self.rows] = np.maximum(numbers, NO_TOKEN)
        for index in np.flatnonzero((numbers < 0) & (numbers != NOT_SAMPLED)).tolist():
            outcome.errors[int(self.rows[index])] = FAILURES[int(numbers[index])]
        for each in self.prompts:
            if each.span.row not in outcome.errors and (entry := each.entry()) is not None:
                outcome.prompt_logprobs[each.span.row] = entry
        if self.logprobs is not None:
            outcome.logprobs = {
                int(self.rows[index]): entry
                for index, entry in self.logprobs.entries().items()
                if numbers[index] >= 0
            }
        if self.candidates is not None:
            outcome.candidates = {
                int(self.rows[index]): entry
                for index, entry in self.candidates.entries().items()
                if numbers[index] == NOT_SAMPLED
            }
        result = outcome.result(self.plan, self._timings())
        self.is_collected = True
        return result

    def _timings(self) -> StepTimings:
        started_us = max(self.start.started_us, self.last_finish.time_us)
        self.last_finish.time_us = finished_us = monotonic_us()
        cache_us = self.start.cache_done_us - self.start.started_us
        return StepTimings(
            received_us=self.plan.received_us,
            started_us=started_us,
            finished_us=finished_us,
            cache_ops_us=cache_us + self.cache_device_us(),
            forward_us=self.computed.us_since(self.begin),
            sample_us=self.end.us_since(self.computed),
        )
