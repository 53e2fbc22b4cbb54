"""Steps under way on the device, from launch until both threads have what came of them.

A flight's numbers are read twice. The thread that follows the model thread *collects* them, for the
core, as soon as they are there. The model thread *learns* them, for the host's table of sequences,
when it comes to it: before the next launch, or where a plan needs to know a token now. Neither
waits for the other, and neither changes what the other reads.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_service.array_types import Int64Array
from worker_service.clock import monotonic_us
from worker_service.device.marks import Mark
from worker_service.pinned_memory import Staging
from worker_service.plan import RowErrorReason, StepPlan, StepResult, StepTimings
from worker_service.runner.device_rows import FAILURES
from worker_service.runner.device_sampler import LogprobTensors
from worker_service.runner.sequence_table import SequenceTable
from worker_service.sampler.entries import TokenLogprobs
from worker_service.sampling.logprobs import table_of

_NOBODY = -1
_INITIAL_ROWS = 512


class Buffers:
    """Host memory of one flight: what the device reads, and what it writes its numbers to."""

    def __init__(self, device: torch.device) -> None:
        self.staging = Staging(device)
        self._pinned = device.type == "cuda"
        self._numbers = self._allocate(_INITIAL_ROWS)

    def fetch(self, outcome: Tensor) -> npt.NDArray[np.int64]:
        """Where the numbers will be once the device has got so far."""
        if len(outcome) > len(self._numbers):
            self._numbers = self._allocate(2 * len(outcome))
        self._numbers[: len(outcome)].copy_(outcome, non_blocking=True)
        return self._numbers[: len(outcome)].numpy()

    def _allocate(self, num_rows: int) -> Tensor:
        return torch.empty(num_rows, dtype=torch.int64, pin_memory=self._pinned)


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedLogprobs:
    """Log probabilities on their way to the host, or there."""

    rows: Int64Array
    """Which of the sampling rows asked."""

    num_top: npt.NDArray[np.int32]
    """How many most probable tokens each of them asked for."""

    tensors: LogprobTensors

    @classmethod
    def fetch(
        cls, rows: Int64Array, num_top: npt.NDArray[np.int32], tensors: LogprobTensors
    ) -> "FetchedLogprobs":
        """Begin to copy them to the host."""
        on_host = LogprobTensors(
            token_ids=_to_host(tensors.token_ids),
            logprobs=_to_host(tensors.logprobs),
            ranks=_to_host(tensors.ranks),
        )
        return cls(rows=rows, num_top=num_top, tensors=on_host)

    def entries(self) -> dict[int, TokenLogprobs]:
        """By sampling row, once they are there."""
        each = self.tensors
        table = table_of(each.token_ids.numpy(), each.logprobs.numpy(), each.ranks.numpy())
        counts = zip(self.rows.tolist(), self.num_top.tolist(), strict=True)
        return {row: table.row(index, num_top) for index, (row, num_top) in enumerate(counts)}


def _to_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


class LastFinish:
    """When the step collected last was done: the next one has had the device only since then."""

    def __init__(self) -> None:
        self.time_us = 0


@dataclass(kw_only=True, slots=True)
class Flight:
    """One launched step. Implements `worker_service.engine.executor.Step`."""

    plan: StepPlan
    rows: Int64Array
    """[n]: the plan's rows that sample."""

    slots: Int64Array
    """[n]: theirs; the model thread's alone, _NOBODY once a sequence is forgotten."""

    places: Int64Array
    """[n]: where in its sequence each row's token will stand."""

    errors: dict[int, RowErrorReason]
    """Rows of sequences that were known to have failed, by row of the plan."""

    numbers: npt.NDArray[np.int64]
    """[n]: a token or one of `FAILURES` each, once `end` is reached."""

    logprobs: FetchedLogprobs | None
    buffers: Buffers
    begin: Mark
    computed: Mark
    end: Mark
    launched_us: int
    cache_us: int
    """Microseconds that the cache operations took the host."""

    cache_device_us: Callable[[], int]
    """Microseconds that they have taken the device."""

    last_finish: LastFinish
    is_learnt: bool = False
    is_collected: bool = False

    def collect(self) -> StepResult:
        """What came of it, once the device is done."""
        self.end.wait()
        tokens = np.full(len(self.plan.seq_ids), -1, np.int32)
        tokens[self.rows] = np.maximum(self.numbers, -1)
        errors = dict(self.errors)
        failed = np.flatnonzero(self.numbers < 0)
        for index in failed.tolist():
            errors[int(self.rows[index])] = FAILURES[int(self.numbers[index])]
        logprobs = {} if self.logprobs is None else self.logprobs.entries()
        result = StepResult(
            epoch=self.plan.epoch,
            step_id=self.plan.step_id,
            token_ids=tokens[self.plan.sample],
            logprobs={
                int(self.rows[index]): entry
                for index, entry in logprobs.items()
                if self.numbers[index] >= 0
            },
            errors=dict(sorted(errors.items())),
            timings=self._timings(),
        )
        self.is_collected = True
        return result

    def _timings(self) -> StepTimings:
        started_us = max(self.launched_us, self.last_finish.time_us)
        self.last_finish.time_us = finished_us = monotonic_us()
        return StepTimings(
            received_us=self.plan.received_us,
            started_us=started_us,
            finished_us=finished_us,
            cache_ops_us=self.cache_us + self.cache_device_us(),
            forward_us=self.computed.us_since(self.begin),
            sample_us=self.end.us_since(self.computed),
        )


class Flights:
    """The model thread's side: which steps it has not learnt the tokens of."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flights: deque[Flight] = deque()
        self._spare: list[Buffers] = []

    def buffers(self) -> Buffers:
        """Memory for one more flight."""
        while self._flights and self._flights[0].is_learnt and self._flights[0].is_collected:
            self._spare.append(self._flights.popleft().buffers)
        return self._spare.pop() if self._spare else Buffers(self._device)

    def add(self, flight: Flight) -> None:
        """A step was launched."""
        self._flights.append(flight)

    def learn_what_is_there(self, table: SequenceTable) -> None:
        """Learn the tokens of steps that are done, without waiting."""
        for flight in self._unlearnt():
            if not flight.end.is_reached:
                return
            _learn(flight, table)

    def learn(self, slots: Int64Array, table: SequenceTable) -> None:
        """Wait until all tokens of these sequences are known."""
        if len(slots) == 0:
            return
        unlearnt = self._unlearnt()
        last = max((i for i, f in enumerate(unlearnt) if np.isin(f.slots, slots).any()), default=-1)
        for flight in unlearnt[: last + 1]:
            _learn(flight, table)

    def learn_all(self, table: SequenceTable) -> None:
        """Wait until all tokens are known."""
        for flight in self._unlearnt():
            _learn(flight, table)

    def forget(self, slots: Int64Array) -> None:
        """What is still to come of these sequences is of no interest."""
        for flight in self._unlearnt():
            flight.slots[np.isin(flight.slots, slots)] = _NOBODY

    def forget_all(self) -> None:
        """Nothing that is still to come is."""
        for flight in self._unlearnt():
            flight.is_learnt = True

    def _unlearnt(self) -> list[Flight]:
        return [flight for flight in self._flights if not flight.is_learnt]


def _learn(flight: Flight, table: SequenceTable) -> None:
    flight.end.wait()
    flight.is_learnt = True
    is_known = flight.slots != _NOBODY
    has_token = is_known & (flight.numbers >= 0)
    table.learn_tokens(flight.slots[has_token], flight.places[has_token], flight.numbers[has_token])
    for index in np.flatnonzero(is_known & (flight.numbers < 0)).tolist():
        table.take_back(int(flight.slots[index]), FAILURES[int(flight.numbers[index])])
