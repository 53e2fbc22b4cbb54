"""The asyncio twin of `calls`, with the same names and promises."""

# A timeout here is a gRPC deadline, which the server is told.
# ruff: noqa: ASYNC109

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Self, TypeAlias, TypeVar

import grpc

from pagewire.v1 import inference_service_pb2 as pb
from pagewire.v1.inference_service_pb2_grpc import InferenceServiceStub
from pagewire_client import errors
from pagewire_client.batch import Batch, OnProgress, Send
from pagewire_client.connection import Connections, trace_metadata
from pagewire_client.outputs import OutputDelta, RequestOutput
from pagewire_client.retry import Attempts, Deadline, RetryPolicy
from pagewire_client.stream_state import StreamState

T = TypeVar("T")
_StatusStream: TypeAlias = AsyncGenerator[pb.WatchStatusResponse, None]


class AsyncCaller:
    """Makes calls on whichever frontend answers."""

    def __init__(self, connections: Connections[grpc.aio.Channel], policy: RetryPolicy) -> None:
        self.connections = connections
        self.policy = policy

    async def unary(self, method: str, request: Any, timeout: float | None) -> Any:
        """The answer to a call of `method`."""
        deadline = Deadline(timeout)

        async def attempt(stub: InferenceServiceStub) -> AsyncGenerator[Any, None]:
            yield await getattr(stub, method)(request, **self.call_options(deadline))

        delay_after = Attempts(self.policy, deadline).delay_after
        async with contextlib.aclosing(
            self.with_retries(attempt, delay_after, asyncio.Event())
        ) as answers:
            return await anext(answers)

    def watch(self, request: pb.WatchStatusRequest) -> _StatusStream:
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

        return self.with_retries(attempt, attempts.delay_after, asyncio.Event())

    async def run_batch(self, batch: Batch, on_progress: OnProgress | None) -> None:
        """Drives `batch` until it is done; its results hold the errors too."""

        async def attempt(stub: InferenceServiceStub) -> AsyncGenerator[None, None]:
            outbox: asyncio.Queue[Send | None] = asyncio.Queue()
            call: Any = stub.GenerateMany(_paced(outbox), **self.call_options(batch.deadline))
            try:
                _put(outbox, batch.opened())
                async for message in call:
                    _put(outbox, batch.receive(message))
                    if on_progress:
                        on_progress(batch.progress)
                    if batch.is_done:
                        return
                batch.require_done()
            finally:
                outbox.put_nowait(None)
                call.cancel()
            yield

        if batch.is_done:
            return
        try:
            async for _ in self.with_retries(attempt, batch.broken, asyncio.Event()):
                pass
        except errors.PagewireError:
            if None in batch.results:
                raise  # Nothing that a request can be blamed for.

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
        cancelled: asyncio.Event,
    ) -> AsyncGenerator[T, None]:
        """What `attempt` yields, made again on the next address while `delay_after` allows.

        Ends quietly once `cancelled` is set.
        """
        while not cancelled.is_set():
            address, stub = self.connections.current()
            try:
                async with contextlib.aclosing(attempt(stub)) as items:
                    async for item in items:
                        yield item
                return
            except grpc.RpcError as error:
                failure = errors.from_call(error)
            except errors.Unavailable as error:
                failure = error
            except asyncio.CancelledError:
                # Also raised, of a task that nobody cancels, when `close` ends the call.
                if _is_cancelled():
                    raise
                failure = errors.Unavailable("the connection was closed")
            if not cancelled.is_set():
                delay = delay_after(failure)
                self.connections.leave(address)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(delay):
                        await cancelled.wait()


class AsyncOutputStream(AsyncIterator[OutputDelta]):
    """Iterates over an answer's deltas; `output` is what they add up to so far.

    If the connection breaks, the stream goes on where it was, through another frontend if there
    is one. Closing it, dropping it, or cancelling the task that iterates ends the request.
    """

    def __init__(
        self, caller: AsyncCaller, request: pb.GenerateRequest, timeout: float | None
    ) -> None:
        self._generation = _Generation(caller, request, Deadline(timeout))
        self._deltas = self._generation.deltas()

    @property
    def request_id(self) -> str:
        """The request's id, for `abort`."""
        return self.output.request_id

    @property
    def output(self) -> RequestOutput:
        """The answer as far as it has come."""
        return self._generation.state.output

    async def __anext__(self) -> OutputDelta:
        return await anext(self._deltas)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """End the request if it is not finished; iteration then stops."""
        self._generation.close()


class _Generation:
    """One request's attempts, until its answer is complete or it is closed."""

    def __init__(
        self, caller: AsyncCaller, request: pb.GenerateRequest, deadline: Deadline
    ) -> None:
        self._caller = caller
        self._deadline = deadline
        self._attempts = Attempts(caller.policy, deadline)
        self._closed = asyncio.Event()
        self._call: Any = None
        self.state = StreamState(request)

    def deltas(self) -> AsyncGenerator[OutputDelta, None]:
        return self._caller.with_retries(self._attempt, self._attempts.delay_after, self._closed)

    def close(self) -> None:
        self._closed.set()
        if self._call is not None:
            self._call.cancel()

    async def _attempt(self, stub: InferenceServiceStub) -> AsyncGenerator[OutputDelta, None]:
        request = self.state.next_request()
        self._call = stub.Generate(request, **self._caller.call_options(self._deadline))
        try:
            async for response in self._call:
                self._attempts.progressed()
                for delta in self.state.receive(response):
                    yield delta
            self.state.require_finished()
        except asyncio.CancelledError:
            # Also raised if another task closes the stream, which is no reason to end this one.
            if not self._closed.is_set() or _is_cancelled():
                raise
        finally:
            self._call.cancel()


def _is_cancelled() -> bool:
    """Whether the task that runs this is itself being cancelled, not only a call that it awaits."""
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling() > 0


def _put(outbox: asyncio.Queue[Send | None], sends: list[Send]) -> None:
    for send in sends:
        outbox.put_nowait(send)


async def _paced(outbox: asyncio.Queue[Send | None]) -> AsyncIterator[pb.GenerateManyRequest]:
    """The requests put into `outbox`, each at its time, until None is."""
    while (send := await outbox.get()) is not None:
        await asyncio.sleep(send.delay_s())
        yield pb.GenerateManyRequest(request=send.request)
