"""Tokens that were sampled, on the device or by another rank, but that the host does not know yet.

`PendingTokens`: in-flight steps of a `DeviceRunner`. The outcome of a step is read twice. The
collector thread *collects* it for the core as soon as it is there. The model thread *resolves* it
into the table of sequences before the next launch, or where a plan needs to know a token now.
Neither waits for the other, and neither changes what the other reads. `DeviceEvent` is a point in
the device's work to wait for.

`RankPendingTokens`: one rank samples and broadcasts, so ranks agree by construction. The others
resolve a row's token only when they need it; until then a placeholder stands in its sequence, so
that the first stage of a pipeline can continue with other rows. A message carries its step id,
which must equal the receiver's.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_service.array_types import Int64Array
from worker_service.distributed.communicator import ProcessGroups, Transfer
from worker_service.errors import GroupBroken
from worker_service.pinned_memory import Staging
from worker_service.plan import (
    RowErrorReason,
    StepPlan,
    StepResult,
    StepTimings,
    TokenLogprobs,
    monotonic_us,
)
from worker_service.runner.device_rows import FAILURES
from worker_service.runner.device_sampler import LogprobTensors
from worker_service.runner.sequence_table import SequenceTable
from worker_service.sampling.logprobs import table_of


class DeviceEvent(Protocol):
    """A point in what was queued to a device: all that was queued before it."""

    @property
    def is_reached(self) -> bool:
        """Whether the device has got there."""
        ...

    def wait(self) -> None:
        """Wait until it has; others may use the interpreter meanwhile."""
        ...

    def us_since(self, earlier: "DeviceEvent") -> int:
        """Microseconds of device time between two events that are reached."""
        ...


class CudaEvent:
    """An event on the current stream of the thread that makes it."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    @property
    def is_reached(self) -> bool:
        """Whether the device has got there."""
        return self._event.query()

    def wait(self) -> None:
        """Wait until it has."""
        # A thread that has no device yet would take the first one, and memory there.
        with torch.cuda.device(self._event.device):
            self._event.synchronize()

    def us_since(self, earlier: DeviceEvent) -> int:
        """Microseconds between the two."""
        assert isinstance(earlier, CudaEvent)
        return round(earlier._event.elapsed_time(self._event) * 1000)


class HostEvent:
    """On a CPU what was queued is done."""

    is_reached = True

    def __init__(self) -> None:
        self._time_us = monotonic_us()

    def wait(self) -> None:
        """There is nothing to wait for."""

    def us_since(self, earlier: DeviceEvent) -> int:
        """Microseconds between the two."""
        assert isinstance(earlier, HostEvent)
        return self._time_us - earlier._time_us


def event_type(device: torch.device) -> Callable[[], DeviceEvent]:
    """The class of events in a device's work."""
    return CudaEvent if device.type == "cuda" else HostEvent


_FORGOTTEN = -1
_INITIAL_ROWS = 512


class StepBuffers:
    """Host memory of one in-flight step: its inputs, and the outcome that the device writes."""

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


class LastFinishTime:
    """When the step collected last was done: the next one has had the device only since then."""

    def __init__(self) -> None:
        self.time_us = 0


@dataclass(kw_only=True, slots=True)
class InFlightStep:
    """One launched step. Implements `worker_service.engine.executor.Step`."""

    plan: StepPlan
    rows: Int64Array
    """[n]: the plan's rows that sample."""

    row_ids: Int64Array
    """[n]: theirs; the model thread's alone, _FORGOTTEN once a sequence is forgotten."""

    positions: Int64Array
    """[n]: where in its sequence each row's token will stand."""

    errors: dict[int, RowErrorReason]
    """Rows of sequences that were known to have failed, by row of the plan."""

    numbers: npt.NDArray[np.int64]
    """[n]: a token or one of `FAILURES` each, once `end` is reached."""

    logprobs: FetchedLogprobs | None
    buffers: StepBuffers
    begin: DeviceEvent
    computed: DeviceEvent
    end: DeviceEvent
    launched_us: int
    cache_us: int
    """Microseconds that the cache operations took the host."""

    cache_device_us: Callable[[], int]
    """Microseconds that they have taken the device."""

    last_finish: LastFinishTime
    is_resolved: bool = False
    is_collected: bool = False

    def collect(self) -> StepResult:
        """Return the step's result, once the device is done."""
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


class PendingTokens:
    """The model thread's side: in-flight steps whose tokens it has not resolved."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[InFlightStep] = deque()
        self._spare: list[StepBuffers] = []

    def buffers(self) -> StepBuffers:
        """Memory for one more in-flight step."""
        while self._steps and self._steps[0].is_resolved and self._steps[0].is_collected:
            self._spare.append(self._steps.popleft().buffers)
        return self._spare.pop() if self._spare else StepBuffers(self._device)

    def add(self, step: InFlightStep) -> None:
        """A step was launched."""
        self._steps.append(step)

    def resolve_available(self, table: SequenceTable) -> None:
        """Resolve the tokens of steps that are done, without waiting."""
        for step in self._unresolved():
            if not step.end.is_reached:
                return
            _resolve(step, table)

    def resolve(self, row_ids: Int64Array, table: SequenceTable) -> None:
        """Wait until all tokens of these sequences are known."""
        if len(row_ids) == 0:
            return
        unresolved = self._unresolved()
        last = max(
            (i for i, f in enumerate(unresolved) if np.isin(f.row_ids, row_ids).any()), default=-1
        )
        for step in unresolved[: last + 1]:
            _resolve(step, table)

    def resolve_all(self, table: SequenceTable) -> None:
        """Wait until all tokens are known."""
        for step in self._unresolved():
            _resolve(step, table)

    def forget(self, row_ids: Int64Array) -> None:
        """What is still to come of these sequences is of no interest."""
        for step in self._unresolved():
            step.row_ids[np.isin(step.row_ids, row_ids)] = _FORGOTTEN

    def forget_all(self) -> None:
        """Nothing that is still to come is."""
        for step in self._unresolved():
            step.is_resolved = True

    def _unresolved(self) -> list[InFlightStep]:
        return [step for step in self._steps if not step.is_resolved]


def _resolve(step: InFlightStep, table: SequenceTable) -> None:
    step.end.wait()
    step.is_resolved = True
    is_known = step.row_ids != _FORGOTTEN
    has_token = is_known & (step.numbers >= 0)
    table.resolve_tokens(
        step.row_ids[has_token], step.positions[has_token], step.numbers[has_token]
    )
    for index in np.flatnonzero(is_known & (step.numbers < 0)).tolist():
        table.take_back(int(step.row_ids[index]), FAILURES[int(step.numbers[index])])


_NO_TOKEN = -1
"""Of a row that neither sampled nor failed, or for whose token the core has candidates."""
_FIRST_ERROR = -2
"""Errors count down from here, in the order of RowErrorReason."""
_REASONS = list(RowErrorReason)


def encode_outcome(tokens: Int64Array, errors: dict[int, RowErrorReason]) -> Int64Array:
    """One number per row: its token, _NO_TOKEN, or its error."""
    numbers = tokens.copy()
    for row, reason in errors.items():
        numbers[row] = _FIRST_ERROR - _REASONS.index(reason)
    return numbers


@dataclass(kw_only=True, slots=True)
class _PendingMessage:
    """A message that has not been resolved."""

    step_id: int
    transfer: Transfer
    row_ids: Int64Array
    """Of the rows; _FORGOTTEN where nothing will be resolved, or the sequence is forgotten."""

    has_placeholder: npt.NDArray[np.bool_]
    """Rows whose token is awaited."""


class RankPendingTokens:
    """This rank's side of it, for one epoch."""

    def __init__(self, groups: ProcessGroups, table: SequenceTable) -> None:
        self._groups = groups
        self._table = table
        self._messages: deque[_PendingMessage] = deque()
        self._sent: deque[Transfer] = deque()

    def broadcast(self, step_id: int, numbers: Int64Array) -> None:
        """On the sampling rank: send the results of some rows, in `encode_outcome`'s form."""
        while self._sent and self._sent[0].is_done:
            self._sent.popleft().wait()
        message = torch.from_numpy(np.concatenate([[step_id], numbers]))
        self._sent.append(self._groups.share_with_all(message))

    def expect(self, step_id: int, row_ids: Int64Array, sampling: npt.NDArray[np.bool_]) -> None:
        """On the others: these rows' sequences have a placeholder now where they are `sampling`."""
        while self._messages and self._messages[0].transfer.is_done:
            self._resolve_next()
        waits = row_ids[sampling]
        self._table.append_tokens(waits, np.zeros(len(waits), np.int64))
        # Only rows that sample, or report what the model makes of their prompt, can fail.
        may_fail = sampling | np.isin(row_ids, list(self._table.prompt_logprobs))
        message = torch.empty(1 + len(row_ids), dtype=torch.int64)
        self._messages.append(
            _PendingMessage(
                step_id=step_id,
                transfer=self._groups.share_with_all(message),
                row_ids=np.where(may_fail, row_ids, _FORGOTTEN),
                has_placeholder=sampling,
            )
        )

    def resolve(self, row_ids: Int64Array) -> None:
        """Wait until nothing is awaited of these sequences. Raises GroupBroken."""
        last = max(
            (i for i, e in enumerate(self._messages) if np.isin(e.row_ids, row_ids).any()),
            default=-1,
        )
        for _ in range(last + 1):
            self._resolve_next()

    def forget(self, row_ids: Int64Array) -> None:
        """What is still to come of these sequences is of no interest."""
        for pending in self._messages:
            pending.row_ids[np.isin(pending.row_ids, row_ids)] = _FORGOTTEN

    def _resolve_next(self) -> None:
        pending = self._messages.popleft()
        step_id, *numbers = pending.transfer.wait().tolist()
        if step_id != pending.step_id:
            raise GroupBroken(f"rank at step {pending.step_id}, the sampling rank at {step_id}")
        rows = zip(pending.row_ids.tolist(), pending.has_placeholder, numbers, strict=True)
        for row_id, has_placeholder, number in rows:
            if row_id == _FORGOTTEN:
                continue
            if number >= 0:
                self._table.token_ids[row_id, self._table.num_tokens[row_id] - 1] = number
            elif has_placeholder:
                self._table.num_tokens[row_id] -= 1
            if number <= _FIRST_ERROR:
                self._table.failures[row_id] = _REASONS[_FIRST_ERROR - number]
