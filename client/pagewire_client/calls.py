# Generated from async_calls.py by `make sync-client`; edit that file.
"""gRPC calls that block: retries, failover, and streams that continue where they broke.

`retry`, `stream_state` and `batch` hold the bookkeeping, which does no I/O.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self, TypeVar

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import errors
from pagewire_client.batch import Batch, OnProgress, Send
from pagewire_client.connection import Connections, OpenRequests, trace_metadata
from pagewire_client.outputs import OutputDelta, RequestOutput
from pagewire_client.retry import Attempts, Deadline, RetryPolicy
from pagewire_client.stream_state import StreamState
from pagewire_client.synchronization import Event, Queue

T = TypeVar("T")


class Caller:
    """Makes calls on whichever frontend answers."""

    def __init__(
        self,
        connections: Connections[grpc.Channel],
        policy: RetryPolicy,
        max_connections: int,
    ) -> None:
        self.connections = connections
        self.policy = policy
        self.open_requests = OpenRequests(max_connections)

    def unary(self, method: str, request: Any, timeout: float | None) -> Any:
        """The answer to a call of `method`."""
        deadline = Deadline(timeout)

        def attempt(stub: InferenceServiceStub) -> Generator[Any, None, None]:
            yield getattr(stub, method)(request, **self.call_options(deadline))

        delay_after = Attempts(self.policy, deadline).delay_after
        with contextlib.closing(self.with_retries(attempt, delay_after, Event())) as answers:
            return next(answers)

    def watch(
        self, request: pb.WatchStatusRequest
    ) -> Generator[pb.WatchStatusResponse, None, None]:
        """The answers of WatchStatus, over reconnects, until the iterator is closed."""
        attempts = Attempts(self.policy, Deadline(None))

        def attempt(
            stub: InferenceServiceStub,
        ) -> Generator[pb.WatchStatusResponse, None, None]:
            call: Any = stub.WatchStatus(request, metadata=self.connections.options.metadata)
            try:
                for response in call:
                    attempts.progressed()
                    yield response
                raise errors.Unavailable("the server ended the stream")
            finally:
                call.cancel()

        return self.with_retries(attempt, attempts.delay_after, Event())

    def run_batch(self, batch: Batch, on_progress: OnProgress | None) -> None:
        """Run `batch` until it is done; its results include errors."""

        def attempt(stub: InferenceServiceStub) -> Generator[None, None, None]:
            outbox = _Outbox()
            call: Any = stub.GenerateMany(outbox.requests(), **self.call_options(batch.deadline))
            try:
                outbox.put(batch.opened())
                for message in call:
                    outbox.put(batch.receive(message))
                    if on_progress:
                        on_progress(batch.progress)
                    if batch.is_done:
                        return
                batch.require_done()
            finally:
                outbox.close()
                call.cancel()
            yield

        if batch.is_done:
            return
        try:
            for _ in self.with_retries(attempt, batch.broken, Event()):
                pass
        except errors.PagewireError:
            if None in batch.results:
                raise  # The error is not that of a single request.

    def call_options(self, deadline: Deadline) -> dict[str, Any]:
        """Timeout and metadata of the next attempt."""
        return {
            "timeout": deadline.remaining_s(),
            "metadata": (*self.connections.options.metadata, *trace_metadata()),
        }

    def with_retries(
        self,
        attempt: Callable[[InferenceServiceStub], Generator[T, None, None]],
        delay_after: Callable[[errors.PagewireError], float],
        cancelled: Event,
        connection: int = 0,
    ) -> Generator[T, None, None]:
        """Yield the items of `attempt`, repeated on the next address while `delay_after` allows it.

        Stops without an error once `cancelled` is set.
        """
        while not cancelled.is_set():
            address, stub = self.connections.current(connection)
            try:
                with contextlib.closing(attempt(stub)) as items:
                    for item in items:
                        self.connections.note(None)
                        yield item
                return
            except grpc.RpcError as error:
                failure = errors.from_call(error)
            except errors.Unavailable as error:
                failure = error
            if not cancelled.is_set():
                self.connections.note(failure)
                delay = delay_after(failure)
                self.connections.leave(address)
                cancelled.wait(delay)


class OutputStream(Iterator[OutputDelta]):
    """Iterates over an answer's deltas; `output` accumulates them.

    If the connection breaks, the stream continues where it was, through another frontend if there
    is one. Closing or dropping it ends the request. `close` may be called from another
    thread, and ends a blocked iteration.
    """

    def __init__(self, caller: Caller, request: pb.GenerateRequest, timeout: float | None) -> None:
        # The iteration lives in another object, so that nothing refers back to this one and
        # dropping it is noticed at once.
        self._generation = _Generation(caller, request, Deadline(timeout))
        self._deltas = self._generation.deltas()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of request {self.request_id}>"

    @property
    def request_id(self) -> str:
        """The request's id, for `abort`."""
        return self.output.request_id

    @property
    def output(self) -> RequestOutput:
        """The answer received so far."""
        return self._generation.state.output

    def text_deltas(self) -> Iterator[str]:
        """The first choice's text, piece by piece; empty pieces are left out."""
        for delta in self:
            if delta.index == 0 and delta.text:
                yield delta.text

    def final(self) -> RequestOutput:
        """The answer, once it is complete or the stream is closed."""
        for _ in self:
            pass
        return self.output

    def __next__(self) -> OutputDelta:
        return next(self._deltas)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Absent if the constructor raised.
        if hasattr(self, "_generation"):
            self._generation.close()

    def close(self) -> None:
        """End the request if it is not finished; iteration then stops."""
        self._generation.close()


class _Generation:
    """One request's attempts, until its answer is complete or it is closed."""

    def __init__(self, caller: Caller, request: pb.GenerateRequest, deadline: Deadline) -> None:
        self._caller = caller
        self._deadline = deadline
        self._attempts = Attempts(caller.policy, deadline)
        self._turn = Event()
        self._closed = Event()
        self._call: Any = None
        self.state = StreamState(request)

    def deltas(self) -> Generator[OutputDelta, None, None]:
        caller, open_requests = self._caller, self._caller.open_requests
        open_requests.enter(self._turn)
        try:
            if not self._turn.wait(self._deadline.remaining_s()):
                raise errors.DeadlineExceeded(
                    "the timeout passed while the client had its maximum of open requests"
                )
            if self._closed.is_set():
                return
            connection = open_requests.connection(self._turn)
            attempts = caller.with_retries(
                self._attempt, self._attempts.delay_after, self._closed, connection
            )
            with contextlib.closing(attempts) as deltas:
                yield from deltas
        finally:
            open_requests.leave(self._turn)

    def close(self) -> None:
        self._closed.set()
        self._turn.set()
        self._caller.open_requests.leave(self._turn)
        if self._call is not None:
            self._call.cancel()

    def _attempt(self, stub: InferenceServiceStub) -> Generator[OutputDelta, None, None]:
        request = self.state.next_request()
        call: Any = stub.Generate(request, **self._caller.call_options(self._deadline))
        self._call = call
        try:
            if self._closed.is_set():  # Perhaps by another thread just before the line above.
                return
            for response in call:
                self._attempts.progressed()
                yield from self.state.receive(response)
            self.state.require_finished()
        finally:
            call.cancel()


class _Outbox:
    """Requests to be sent on a stream, each at its time; gRPC consumes them."""

    def __init__(self) -> None:
        self._queue: Queue[Send | None] = Queue()
        self._closed = Event()

    def put(self, sends: list[Send]) -> None:
        for send in sends:
            self._queue.put_nowait(send)

    def close(self) -> None:
        """End the iteration, even while it waits to send a request."""
        self._closed.set()
        self._queue.put_nowait(None)

    def requests(self) -> Iterator[pb.GenerateManyRequest]:
        while (send := self._queue.get()) is not None and not self._closed.is_set():
            if not self._closed.wait(send.delay_s()):
                yield pb.GenerateManyRequest(request=send.request)
