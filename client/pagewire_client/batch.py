"""Many requests on one stream: when to send each, and the result of each.

Pure bookkeeping, like `StreamState`; the clients move the messages.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pagewire.v1 import inference_service_pb2 as pb
from pagewire_client import errors
from pagewire_client.outputs import RequestOutput
from pagewire_client.retry import Attempts, Deadline, RetryPolicy
from pagewire_client.stream_state import StreamState

DEFAULT_MAX_IN_FLIGHT = 512
"""Most requests sent and unfinished. More than a worker's usual batch, so that the scheduler always
has another one to admit; few enough to leave room in its queue for other clients."""


@dataclass(kw_only=True, slots=True)
class BatchProgress:
    """Progress of a batch."""

    num_requests: int
    num_finished: int = 0
    """Including failed ones."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the requests that the server has accepted."""
    num_generated_tokens: int = 0


OnProgress = Callable[[BatchProgress], None]


@dataclass(frozen=True, slots=True)
class Send:
    """A request to be sent, not before this instant of `time.monotonic`."""

    not_before: float
    request: pb.GenerateRequest

    def delay_s(self) -> float:
        """Seconds still to wait."""
        return max(0.0, self.not_before - time.monotonic())


@dataclass(slots=True)
class _Member:
    position: int
    state: StreamState
    attempts: Attempts


@dataclass
class Batch:
    """Requests that share a stream.

    Invariant: a member without a result is either in `_waiting` or in `_in_flight`.
    """

    requests: Sequence[pb.GenerateRequest]
    policy: RetryPolicy
    deadline: Deadline
    max_in_flight: int | None = None
    """None: `DEFAULT_MAX_IN_FLIGHT`."""
    fail_fast: bool = True
    """Whether one failed request ends the batch."""
    results: list[RequestOutput | errors.PagewireError | None] = field(init=False)
    """Results in the order of `requests`; None for requests that are not finished."""

    def __post_init__(self) -> None:
        if self.max_in_flight is not None and self.max_in_flight < 1:
            raise ValueError(f"max_in_flight: expected at least 1, got {self.max_in_flight}")
        self._max_window = self.max_in_flight or DEFAULT_MAX_IN_FLIGHT
        self._window = self._max_window
        self.results = [None] * len(self.requests)
        self._waiting = deque(
            _Member(position, StreamState(request), self._new_attempts())
            for position, request in enumerate(self.requests)
        )
        self._in_flight: dict[str, _Member] = {}
        self._stream_attempts = self._new_attempts()
        self._progress = BatchProgress(num_requests=len(self.requests))
        self._has_failed = False

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to wait for."""
        all_finished = self._progress.num_finished == len(self.requests)
        return all_finished or (self.fail_fast and self._has_failed)

    @property
    def progress(self) -> BatchProgress:
        """Progress so far."""
        return replace(self._progress)

    def opened(self) -> list[Send]:
        """Note that a stream was opened; returns what to send on it first."""
        self._waiting.extendleft(reversed(self._in_flight.values()))
        self._in_flight.clear()
        return self._fill_window()

    def receive(self, message: pb.GenerateManyResponse) -> list[Send]:
        """Process a message of the server; returns what to send now."""
        self._stream_attempts.progressed()
        if message.WhichOneof("event") == "error":
            return self._receive_error(message.error)
        member = self._in_flight.get(message.response.request_id)
        if member is None:
            return []  # The request was abandoned in the meantime.
        member.attempts.progressed()
        output = member.state.output
        if message.response.HasField("started") and not output.prompt_token_ids:
            self._progress.num_prompt_tokens += len(message.response.started.prompt_token_ids)
        for delta in member.state.receive(message.response):
            self._progress.num_generated_tokens += len(delta.token_ids)
        if not output.finished:
            return []
        self._window = min(self._max_window, self._window + 1)
        return self._settle(member, output)

    def broken(self, error: errors.PagewireError) -> float:
        """Note that the stream ended early; returns the seconds to wait before opening another.

        Raises if another stream would not help; every unfinished request has failed then.
        """
        try:
            return self._stream_attempts.delay_after(error)
        except errors.PagewireError as final:
            self.results = [final if result is None else result for result in self.results]
            raise

    def require_done(self) -> None:
        """Raise Unavailable if requests are unfinished although the server has ended the stream."""
        if not self.is_done:
            raise errors.Unavailable("the server ended the stream before all answers")

    def outputs(self) -> list[RequestOutput]:
        """The results of a batch in which nothing failed; raises the first error otherwise."""
        outputs = []
        for result in self.results:
            if isinstance(result, errors.PagewireError):
                raise result
            if result is not None:
                outputs.append(result)
        return outputs

    def outcomes(self) -> list[RequestOutput | errors.PagewireError]:
        """The results, including errors."""
        return [result for result in self.results if result is not None]

    def _new_attempts(self) -> Attempts:
        return Attempts(self.policy, self.deadline)

    def _receive_error(self, error: pb.RequestError) -> list[Send]:
        member = self._in_flight.get(error.request_id)
        if member is None:  # The error concerns the stream, not one of its requests.
            raise errors.from_status(error.code, error.message, error.status)
        message = f"prompts[{member.position}]: {error.message}"
        failure = errors.from_status(error.code, message, error.status)
        if isinstance(failure, errors.Overloaded) and len(self._in_flight) > 1:
            # The server accepts no more of this client's requests: send this one when another ends.
            del self._in_flight[error.request_id]
            self._waiting.appendleft(member)
            self._window = len(self._in_flight)
            return []
        try:
            delay = member.attempts.delay_after(failure)
        except errors.PagewireError as final:
            self._has_failed = True
            return self._settle(member, final)
        return [Send(time.monotonic() + delay, member.state.next_request())]

    def _settle(self, member: _Member, result: RequestOutput | errors.PagewireError) -> list[Send]:
        del self._in_flight[member.state.output.request_id]
        self.results[member.position] = result
        self._progress.num_finished += 1
        return self._fill_window()

    def _fill_window(self) -> list[Send]:
        sends = []
        while self._waiting and len(self._in_flight) < self._window:
            member = self._waiting.popleft()
            self._in_flight[member.state.output.request_id] = member
            sends.append(Send(0.0, member.state.next_request()))
        return sends
