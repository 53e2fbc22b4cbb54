"""gRPC calls: retries, failover, and streams that continue where they broke.

`retry`, `stream_state` and `batch` hold the bookkeeping, which does no I/O. Calls are
coroutines; those of a blocking client are never suspended (`synchronization`).
"""

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, Self, TypeVar

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import errors
from pagewire_client.batch import Batch, OnProgress, Send
from pagewire_client.connection import Connections, Mode, OpenRequests, trace_metadata
from pagewire_client.outputs import OutputDelta, RequestOutput
from pagewire_client.pooling import PooledInputs
from pagewire_client.retry import Attempts, Deadline, RetryPolicy
from pagewire_client.stream_state import StreamState
from pagewire_client.synchronization import Event, is_cancelled, iterate, run

T = TypeVar("T")


class Caller:
    """Makes calls on whichever frontend answers."""

    def __init__(
        self,
        connections: Connections,
        policy: RetryPolicy,
        timeout: float | None,
        max_connections: int,
    ) -> None:
        """`timeout`: of calls without one of their own, in seconds."""
        self.connections = connections
        self.policy = policy
        self.timeout = timeout
        self.open_requests = OpenRequests(max_connections)

    def with_options(self, timeout: float | None, policy: RetryPolicy | None) -> Self:
        """A caller over the same connections; None leaves an option as it is."""
        other = copy.copy(self)
        other.timeout = self.timeout if timeout is None else timeout
        other.policy = policy or self.policy
        return other

    @property
    def mode(self) -> Mode:
        """How calls are made and waited for."""
        return self.connections.mode

    async def unary(self, method: str, request: Any, timeout: float | None) -> Any:
        """The answer to a call of `method`."""
        deadline = self.deadline(timeout)

        async def attempt(stub: InferenceServiceStub) -> AsyncGenerator[Any, None]:
            yield await getattr(stub, method)(request, **self.call_options(deadline))

        delay_after = Attempts(self.policy, deadline).delay_after
        async with contextlib.aclosing(
            self.with_retries(attempt, delay_after, self.mode.make_event())
        ) as answers:
            return await anext(answers)

    def watch(self, request: pb.WatchStatusRequest) -> AsyncGenerator[pb.WatchStatusResponse, None]:
        """The answers of WatchStatus, over reconnects, until the iterator is closed."""
        attempts = Attempts(self.policy, Deadline(None))

        async def attempt(
            stub: InferenceServiceStub,
        ) -> AsyncGenerator[pb.WatchStatusResponse, None]:
            call: Any = stub.WatchStatus(request, metadata=self.connections.options.metadata)
            try:
                async for response in call:
                    attempts.progressed()
                    yield response
                raise errors.Unavailable("the server ended the stream")
            finally:
                call.cancel()

        return self.with_retries(attempt, attempts.delay_after, self.mode.make_event())

    async def run_batch(self, batch: Batch, on_progress: OnProgress | None) -> None:
        """Run `batch` until it is done; its results include errors."""

        async def attempt(stub: InferenceServiceStub) -> AsyncGenerator[None, None]:
            outbox = _Outbox(self.mode)
            call: Any = stub.GenerateMany(outbox.requests(), **self.call_options(batch.deadline))
            try:
                outbox.put(batch.opened())
                async for message in call:
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
            async for _ in self.with_retries(attempt, batch.broken, self.mode.make_event()):
                pass
        except errors.PagewireError:
            if None in batch.results:
                raise  # The error is not that of a single request.

    async def pool(self, inputs: PooledInputs, timeout: float | None) -> list[list[Any]]:
        """The entries of every input; raises the error of the first that fails."""
        deadline = self.deadline(timeout)
        attempts = Attempts(self.policy, deadline)

        async def attempt(stub: InferenceServiceStub) -> AsyncGenerator[None, None]:
            if not inputs.start():  # the end of the call was lost, and nothing else
                return
            method = getattr(stub, inputs.method)
            call: Any = method(inputs.messages(), **self.call_options(deadline))
            try:
                if inputs.method == "Rank":
                    inputs.receive(await call)
                    return
                is_complete = False
                async for response in call:
                    attempts.progressed()
                    is_complete = inputs.receive(response)
                if not is_complete:
                    raise errors.Unavailable("the server ended the stream before all answers")
            finally:
                call.cancel()
            yield

        async for _ in self.with_retries(attempt, attempts.delay_after, self.mode.make_event()):
            pass
        return inputs.results()

    def deadline(self, timeout: float | None) -> Deadline:
        """The deadline of a call that begins now; None: after the caller's own timeout."""
        return Deadline(self.timeout if timeout is None else timeout)

    def call_options(self, deadline: Deadline) -> dict[str, Any]:
        """Timeout and metadata of the next attempt."""
        return {
            "timeout": deadline.remaining_s(),
            "metadata": (*self.connections.options.metadata, *trace_metadata()),
        }

    async def with_retries(
        self,
        attempt: Callable[[InferenceServiceStub], AsyncGenerator[T, None]],
        delay_after: Callable[[errors.PagewireError], float],
        cancelled: Event,
        connection: int = 0,
    ) -> AsyncGenerator[T, None]:
        """Yield the items of `attempt`, repeated on the next address while `delay_after` allows it.

        Stops without an error once `cancelled` is set.
        """
        while not cancelled.is_set():
            address, stub = self.connections.current(connection)
            try:
                async with contextlib.aclosing(attempt(stub)) as items:
                    async for item in items:
                        self.connections.record(None)
                        yield item
                return
            except grpc.RpcError as error:
                failure = errors.from_call(error)
            except errors.Unavailable as error:
                failure = error
            except asyncio.CancelledError:
                # Also raised in a task that nobody cancels, when `close` ends the call.
                if is_cancelled():
                    raise
                failure = errors.Unavailable("the connection was closed")
            if not cancelled.is_set():
                self.connections.record(failure)
                delay = delay_after(failure)
                self.connections.leave(address)
                await cancelled.wait(delay)


class AsyncOutputStream(AsyncIterator[OutputDelta]):
    """Iterates over an answer's deltas; `output` accumulates them.

    If the connection breaks, the stream continues where it was, through another frontend if there
    is one. Closing it, dropping it, or cancelling the task that iterates ends the request.
    """

    def __init__(self, caller: Caller, request: pb.GenerateRequest, timeout: float | None) -> None:
        # The iteration lives in another object, so that nothing refers back to this one and
        # dropping it is noticed at once.
        self._generation = _Generation(caller, request, caller.deadline(timeout))
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

    async def text_deltas(self) -> AsyncGenerator[str, None]:
        """The first choice's text, piece by piece; empty pieces are left out."""
        async for delta in self:
            if delta.index == 0 and delta.text:
                yield delta.text

    async def final(self) -> RequestOutput:
        """The answer, once it is complete or the stream is closed."""
        async for _ in self:
            pass
        return self.output

    async def __anext__(self) -> OutputDelta:
        return await anext(self._deltas)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        # Absent if the constructor raised.
        if hasattr(self, "_generation"):
            self._generation.close()

    async def aclose(self) -> None:
        """End the request if it is not finished; iteration then stops."""
        self._generation.close()


class OutputStream(Iterator[OutputDelta]):
    """Iterates over an answer's deltas; `output` accumulates them.

    If the connection breaks, the stream continues where it was, through another frontend if there
    is one. Closing or dropping it ends the request. `close` may be called from another thread, and
    ends a blocked iteration.
    """

    def __init__(self, stream: AsyncOutputStream) -> None:
        """`stream`: that of a client whose calls are never suspended."""
        self._stream = stream

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of request {self.request_id}>"

    @property
    def request_id(self) -> str:
        """The request's id, for `abort`."""
        return self._stream.request_id

    @property
    def output(self) -> RequestOutput:
        """The answer received so far."""
        return self._stream.output

    def text_deltas(self) -> Iterator[str]:
        """The first choice's text, piece by piece; empty pieces are left out."""
        return iterate(self._stream.text_deltas())

    def final(self) -> RequestOutput:
        """The answer, once it is complete or the stream is closed."""
        return run(self._stream.final())

    def __next__(self) -> OutputDelta:
        try:
            return run(anext(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request if it is not finished; iteration then stops."""
        run(self._stream.aclose())


class _Generation:
    """One request's attempts, until its answer is complete or it is closed."""

    def __init__(self, caller: Caller, request: pb.GenerateRequest, deadline: Deadline) -> None:
        self._caller = caller
        self._deadline = deadline
        self._attempts = Attempts(caller.policy, deadline)
        self._turn = caller.mode.make_event()
        self._closed = caller.mode.make_event()
        self._call: Any = None
        self.state = StreamState(request)

    async def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        caller, open_requests = self._caller, self._caller.open_requests
        open_requests.enter(self._turn)
        try:
            if not await self._turn.wait(self._deadline.remaining_s()):
                raise errors.DeadlineExceeded(
                    "the timeout passed while the client had its maximum of open requests"
                )
            if self._closed.is_set():
                return
            connection = open_requests.connection(self._turn)
            attempts = caller.with_retries(
                self._attempt, self._attempts.delay_after, self._closed, connection
            )
            async with contextlib.aclosing(attempts) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            open_requests.leave(self._turn)

    def close(self) -> None:
        self._closed.set()
        self._turn.set()
        self._caller.open_requests.leave(self._turn)
        if self._call is not None:
            self._call.cancel()

    async def _attempt(self, stub: InferenceServiceStub) -> AsyncGenerator[OutputDelta, None]:
        request = self.state.next_request()
        call: Any = stub.Generate(request, **self._caller.call_options(self._deadline))
        self._call = call
        try:
            if self._closed.is_set():  # Perhaps by another thread just before the line above.
                return
            async for response in call:
                self._attempts.progressed()
                for delta in self.state.receive(response):
                    yield delta
            self.state.require_finished()
        finally:
            call.cancel()


class _Outbox:
    """Requests to be sent on a stream, each at its time; gRPC consumes them."""

    def __init__(self, mode: Mode) -> None:
        self._queue = mode.make_queue()
        self._closed = mode.make_event()

    def put(self, sends: list[Send]) -> None:
        for send in sends:
            self._queue.put_nowait(send)

    def close(self) -> None:
        """End the iteration, even while it waits to send a request."""
        self._closed.set()
        self._queue.put_nowait(None)

    async def requests(self) -> AsyncGenerator[pb.GenerateManyRequest, None]:
        while (send := await self._queue.get()) is not None and not self._closed.is_set():
            if not await self._closed.wait(send.delay_s()):
                yield pb.GenerateManyRequest(request=send.request)
