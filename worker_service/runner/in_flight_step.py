"""A step that was launched on a device, until the host has its result.

The outcome of a step is read twice. The collector thread *collects* it for the core as soon as it
is available. The model thread *resolves* it into the table of sequences (`sequence_state.py`).
Neither waits for the other, and neither changes what the other reads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagewire_kernels.batch import NOT_SAMPLED
from worker_service.array_types import Int32Array, Int64Array
from worker_service.cpu_cores import num_usable_cores
from worker_service.pinned_memory import Staging
from worker_service.plan import (
    Candidates,
    RowErrorReason,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    monotonic_us,
)
from worker_service.runner.device_rows import FAILURES
from worker_service.runner.device_sampler import CandidateTensors, LogprobTensors
from worker_service.runner.step_outcome import StepOutcome, StepStart
from worker_service.sampling.logprobs import table_of
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


_INITIAL_ROWS = 512


class StepBuffers:
    """Host memory of one in-flight step: its inputs, and the outcome that the device writes."""

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self._masks = Staging(device)
        self._pinned = device.type == "cuda"
        self._numbers = self._allocate(_INITIAL_ROWS)

    def send_bitmask(self, bitmask: Int32Array, target: Tensor | None) -> Tensor:
        """Copy a bitmask to the device, to the first rows of a larger one if there is a target."""
        where = None if target is None else target.view(-1).view(torch.uint8)
        sent = self._masks.send([bitmask], where)[0]
        return sent if target is None else target

    def fetch(self, outcome: Tensor) -> Int64Array:
        """Copy numbers to the host. Returns the memory that holds them once the device is done."""
        if len(outcome) > len(self._numbers):
            self._numbers = self._allocate(2 * len(outcome))
        self._numbers[: len(outcome)].copy_(outcome, non_blocking=True)
        return self._numbers[: len(outcome)].numpy()

    def _allocate(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, dtype=torch.int64, pin_memory=self._pinned)


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedLogprobs:
    """Log probabilities that are being copied to the host."""

    rows: Int64Array
    """Sampling rows that asked for them."""

    num_top: Int32Array
    """Number of most probable tokens that each of them asked for."""

    tensors: LogprobTensors

    @classmethod
    def fetch(
        cls, rows: Int64Array, num_top: Int32Array, tensors: LogprobTensors
    ) -> "FetchedLogprobs":
        """Start the copies."""
        on_host = LogprobTensors(
            token_ids=_to_host(tensors.token_ids),
            logprobs=_to_host(tensors.logprobs),
            ranks=_to_host(tensors.ranks),
        )
        return cls(rows=rows, num_top=num_top, tensors=on_host)

    def entries(self) -> dict[int, TokenLogprobs]:
        """Log probabilities by sampling row, once the copies are done."""
        each = self.tensors
        table = table_of(each.token_ids.numpy(), each.logprobs.numpy(), each.ranks.numpy())
        counts = zip(self.rows.tolist(), self.num_top.tolist(), strict=True)
        return {row: table.row(index, num_top) for index, (row, num_top) in enumerate(counts)}


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedCandidates:
    """Candidates that are being copied to the host."""

    rows: Int64Array
    """Sampling rows whose tokens the core chooses."""

    counts: Int32Array
    """Number of candidates that each of them asked for."""

    tensors: CandidateTensors

    @classmethod
    def fetch(
        cls, rows: Int64Array, counts: Int32Array, tensors: CandidateTensors
    ) -> "FetchedCandidates":
        """Start the copies."""
        on_host = CandidateTensors(_to_host(tensors.token_ids), _to_host(tensors.logprobs))
        return cls(rows=rows, counts=counts, tensors=on_host)

    def entries(self) -> dict[int, Candidates]:
        """Candidates by sampling row, once the copies are done."""
        token_ids = self.tensors.token_ids.numpy().astype(np.int32)
        logprobs = self.tensors.logprobs.numpy()
        kept = np.minimum(np.isfinite(logprobs).sum(axis=1), self.counts).tolist()
        return {
            row: Candidates(token_ids=token_ids[index, :count], logprobs=logprobs[index, :count])
            for index, (row, count) in enumerate(zip(self.rows.tolist(), kept, strict=True))
        }


def _to_host(tensor: Tensor) -> Tensor:
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return on_host.copy_(tensor, non_blocking=True)


class LastFinishTime:
    """When the last collected step was done; the next one had the device only from then on."""

    def __init__(self) -> None:
        self.time_us = 0


@dataclass(kw_only=True, slots=True, eq=False)
class InFlightStep:
    """One launched step. Implements `Step` of `worker_service.engine.executor`, and `Outcome`."""

    plan: StepPlan
    rows: Int64Array
    """[n]: the plan's rows that sample."""

    errors: dict[int, RowErrorReason]
    """Rows of the plan whose sequences were known to have failed."""

    numbers: Int64Array
    """[n]: a token, one of `FAILURES` or NOT_SAMPLED each, once `end` is reached."""

    logprobs: FetchedLogprobs | None
    candidates: FetchedCandidates | None
    buffers: StepBuffers
    begin: DeviceEvent
    computed: DeviceEvent
    end: DeviceEvent
    start: StepStart
    cache_device_us: Callable[[], int]
    """Microseconds that the cache operations have taken the device."""

    last_finish: LastFinishTime
    is_collected: bool = False

    @property
    def is_available(self) -> bool:
        """Whether the device is done."""
        return self.end.is_reached

    def wait(self) -> Int64Array:
        """[num_sampling, 1]: a token or negative outcome per row, once the device is done."""
        self.end.wait()
        return self.numbers[:, np.newaxis]

    def collect(self) -> StepResult:
        """Return the step's result, once the device is done."""
        numbers = self.wait()[:, 0]
        outcome = StepOutcome.of_failed(len(self.plan.seq_ids), self.errors)
        outcome.tokens[self.rows] = np.maximum(numbers, NO_TOKEN)
        for index in np.flatnonzero((numbers < 0) & (numbers != NOT_SAMPLED)).tolist():
            outcome.errors[int(self.rows[index])] = FAILURES[int(numbers[index])]
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
