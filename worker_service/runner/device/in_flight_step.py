"""A step that was launched on a device, until the host has its result.

The outcome of a step is read twice. The collector thread *collects* it for the core as soon as it
is available. The model thread *resolves* it into the table of sequences
(`state/sequence_state.py`). Neither waits for the other, and neither changes what the other
reads.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch

from pagewire_kernels.batch import NOT_SAMPLED
from worker_service.array_types import Int64Array
from worker_service.cpu_cores import num_usable_cores
from worker_service.plan import (
    RowErrorReason,
    StepPlan,
    StepResult,
    StepTimings,
    monotonic_us,
)
from worker_service.runner.batch.step_outcome import StepOutcome, StepStart
from worker_service.runner.device.buffers import StepBuffers
from worker_service.runner.device.reports import FetchedReports
from worker_service.runner.state.sequence_state import FAILURES, PendingTokens
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


class LastFinishTime:
    """When the last collected step was done; the next one had the device only from then on."""

    def __init__(self) -> None:
        self.time_us = 0


@dataclass(kw_only=True, slots=True, eq=False)
class InFlightStep:
    """One launched step. Implements `Step` of `worker_service.engine.executor`, and `Outcome`."""

    plan: StepPlan
    rows: Int64Array
    """[n]: the plan's rows that sample, those with drafts once more for each of them; then those
    that only report on their prompts."""

    errors: dict[int, RowErrorReason]
    """Rows of the plan whose sequences were known to have failed."""

    numbers: Int64Array
    """[n]: a token, one of `FAILURES` or NOT_SAMPLED each, once `end` is reached."""

    offsets: Int64Array | None
    """[num_sampling]: drafts before each place that is sampled at; None: none."""

    reports: FetchedReports
    buffers: StepBuffers
    begin: DeviceEvent
    computed: DeviceEvent
    end: DeviceEvent
    start: StepStart
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
        """Once the device is done, [m, 1 + 2 * most accepted drafts of a row]: of each row, see
        `StepOutcome.encode`. Raises GroupBroken."""
        numbers = self._wait()
        if self.offsets is None:
            return numbers[:, np.newaxis].copy()
        kept = dict(self.reports.kept(numbers))
        places = self._first_places()
        most = max(map(len, kept.values()), default=0)
        encoded = np.full((len(places), 1 + 2 * most), NO_TOKEN, np.int64)
        encoded[:, 0] = numbers[places]
        for start, tokens in kept.items():
            encoded[np.searchsorted(places, start), 1 : 1 + len(tokens)] = tokens
        return encoded

    def _wait(self) -> Int64Array:
        self.end.wait()
        if self.check is not None:
            self.check()
        return self.numbers

    def _first_places(self) -> Int64Array:
        """Where in `numbers` each row's first one is."""
        if self.offsets is None:
            return np.arange(len(self.rows))
        num_reporting = len(self.rows) - len(self.offsets)
        return np.flatnonzero(np.append(self.offsets, np.zeros(num_reporting)) == 0)

    def collect(self) -> StepResult:
        """Return the step's result, once the device is done. Raises GroupBroken."""
        numbers = self._wait().copy()
        outcome = StepOutcome.of_failed(len(self.plan.seq_ids), self.errors)
        if self.samples:
            places = self._first_places()
            rows, first = self.rows[places], numbers[places]
            outcome.tokens[rows] = np.maximum(first, NO_TOKEN)
            for index in np.flatnonzero((first < 0) & (first != NOT_SAMPLED)).tolist():
                outcome.errors[int(rows[index])] = FAILURES[int(first[index])]
            self.reports.add_to(outcome, self.rows, self.offsets, numbers)
        result = outcome.result(self.plan, self._timings(), samples=self.samples)
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
            cache_ops_us=cache_us + self.start.cache_us(),
            forward_us=self.computed.us_since(self.begin),
            sample_us=self.end.us_since(self.computed),
        )


class BufferPool:
    """The host memory of steps in flight, which is used again once they are done."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[InFlightStep] = deque()
        """Steps whose buffers may still be written to or read."""
        self._spare: list[StepBuffers] = []

    def pop(self, pending: PendingTokens) -> StepBuffers:
        """Memory for one more step."""
        steps = self._steps
        while steps and steps[0].is_collected and not pending.contains(steps[0]):
            self._spare.append(steps.popleft().buffers)
        return self._spare.pop() if self._spare else StepBuffers(self._device)

    def add(self, step: InFlightStep) -> None:
        """Take the memory of a launched step back once it is done."""
        self._steps.append(step)

    def wait(self) -> None:
        """Wait until the device has done the last step, or was interrupted."""
        if self._steps:
            self._steps[-1].end.wait()
