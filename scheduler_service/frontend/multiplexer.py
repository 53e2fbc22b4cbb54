"""Several requests in one call: a stream of GenerateMany, and the prompts of one HTTP call."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from types import TracebackType
from typing import Any, Self

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument, PagewireError, RequestAborted, Unavailable
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.output.request_stream import RequestStream
from scheduler_service.frontend.request_manager import RequestManager
from scheduler_service.status_codes import to_status

Write = Callable[[inference_pb.GenerateManyResponse], Awaitable[None]]
Read = Callable[[], Awaitable[inference_pb.GenerateManyRequest | None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
"""ASGI's receive function; typed here so that a frontend without HTTP needs no HTTP library."""

MAX_ERRORS = 1024
"""Errors that wait for their client to read them. At this number no further request is read: a
client that writes and never reads would fill the memory with them."""


OPENED_TOGETHER = 16
"""Requests of one call that are opened before the event loop serves other streams."""


class RequestMultiplexer:
    """The requests of one GenerateMany stream."""

    def __init__(
        self, requests: RequestManager, deadline: float | None, tenant_now: Callable[[], Principal]
    ) -> None:
        """`tenant_now` returns the tenant of the next request; it may raise PagewireError."""
        self._requests = requests
        self._tenant_now = tenant_now
        self._deadline = deadline
        self._streams: set[RequestStream] = set()
        self._news: dict[RequestStream, None] = {}
        """Streams with something to take, in the order in which they got it."""
        self._errors: deque[inference_pb.RequestError] = deque()
        self._may_read = asyncio.Event()
        self._half_closed = False
        self._read_error: Exception | None = None
        self._wake = asyncio.Event()

    async def run(self, read: Read, write: Write) -> None:
        """Serve the stream to its end: half-closed by the client and every request answered.

        `read` gives None at the client's end. Raises Unavailable if the service ends first.
        """
        tasks = [
            asyncio.create_task(self._read_all(read)),
            asyncio.create_task(self._watch_draining()),
        ]
        try:
            await self._write_all(write)
        finally:
            for task in tasks:
                task.cancel()
            for stream in self._streams:
                self._requests.close(stream)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_all(self, read: Read) -> None:
        try:
            while (message := await read()) is not None:
                self._open(message.request)
                if len(self._errors) >= MAX_ERRORS:
                    self._may_read.clear()
                    await self._may_read.wait()
            self._half_closed = True
        # Raised where the stream can be ended with it, in `_write_all`.
        except Exception as error:
            self._read_error = error
        self._wake.set()

    async def _watch_draining(self) -> None:
        await self._requests.is_draining.wait()
        self._wake.set()

    def _open(self, request: inference_pb.GenerateRequest) -> None:
        try:
            if not request.HasField("request_id"):
                raise InvalidArgument("request_id", "required on a GenerateMany stream")
            tenant = self._tenant_now()
            self._requests.check_call_share(len(self._streams))
            self._streams.add(self._requests.open(request, self._deadline, self._on_news, tenant))
        except PagewireError as error:
            self._errors.append(_request_error(request.request_id, error))
            self._wake.set()

    def _on_news(self, stream: RequestStream) -> None:
        self._news[stream] = None
        self._wake.set()

    async def _write_all(self, write: Write) -> None:
        while True:
            self._wake.clear()
            while self._news or self._errors:
                if (response := self._next()) is not None:
                    await write(response)
            if self._read_error is not None:
                raise self._read_error
            if not self._streams and self._half_closed:
                return
            if not self._streams and self._requests.is_draining.is_set():
                raise Unavailable("the frontend is shutting down", reason="SHUTTING_DOWN")
            await self._wake.wait()

    def _next(self) -> inference_pb.GenerateManyResponse | None:
        """One response of the request that has waited longest; refusals come first."""
        if self._errors:
            self._may_read.set()
            return inference_pb.GenerateManyResponse(error=self._errors.popleft())
        stream = next(iter(self._news))
        del self._news[stream]
        response = stream.take()
        if response is not None:
            if stream.is_done:
                self._close(stream)
            elif stream.error is not None:
                self._news[stream] = None  # its error follows
            return inference_pb.GenerateManyResponse(response=response)
        if stream.error is None or stream not in self._streams:
            return None
        self._close(stream)
        error = _request_error(stream.request_id, stream.error)
        return inference_pb.GenerateManyResponse(error=error)

    def _close(self, stream: RequestStream) -> None:
        self._streams.discard(stream)
        self._requests.close(stream)


def _request_error(request_id: str, error: PagewireError) -> inference_pb.RequestError:
    status = to_status(error)
    return inference_pb.RequestError(
        request_id=request_id,
        code=status.code,
        message=status.message,
        status=status.SerializeToString(),
    )


class RequestBatch:
    """A context manager around all requests of one HTTP call.

    Leaving it ends those that are left. So does the client's disconnection, at once, even while a
    write waits for the client.
    """

    def __init__(self, manager: RequestManager, receive: Receive) -> None:
        """`receive` is ASGI's, of a call whose body was read."""
        self._manager = manager
        self._receive = receive
        self._indexes: dict[RequestStream, int] = {}
        self._num_done = 0
        self._news: dict[RequestStream, None] = {}
        """Streams with something to take, in the order in which they got it."""
        self._client_has_gone = False
        self._wake = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._watching is not None
        self._watching.cancel()
        self._close()

    async def open(
        self, requests: Sequence[inference_pb.GenerateRequest], request_id: str, tenant: Principal
    ) -> None:
        """Open all of them; raises the error of the first that is refused."""
        share = self._manager.tenant_share
        if len(requests) > share:
            raise InvalidArgument(
                "prompt", f"expected at most {share} prompts in one call, got {len(requests)}"
            )
        for index, request in enumerate(requests):
            if index and index % OPENED_TOGETHER == 0:
                await asyncio.sleep(0)
            request.request_id = request_id if len(requests) == 1 else f"{request_id}-{index}"
            stream = await self._manager.open_soon(request, None, self._on_news, tenant)
            self._indexes[stream] = index

    async def next(self) -> tuple[int, inference_pb.GenerateResponse] | None:
        """What is new of one request, by its index; None after the last of all.

        Raises the error of the first request that fails: the others are of no use then.
        """
        while self._num_done < len(self._indexes):
            while self._news and not self._client_has_gone:
                stream = next(iter(self._news))
                del self._news[stream]
                if (response := self._take(stream)) is not None:
                    return self._indexes[stream], response
            self._wake.clear()
            await self._wake.wait()
            if self._client_has_gone:
                raise RequestAborted("the client has gone")
        return None

    def _take(self, stream: RequestStream) -> inference_pb.GenerateResponse | None:
        response = stream.take()
        if response is None:
            if stream.error is not None:
                raise stream.error
        elif stream.is_done:
            self._num_done += 1
            self._manager.close(stream)
        elif stream.error is not None:
            self._news[stream] = None  # its error follows
        return response

    def _on_news(self, stream: RequestStream) -> None:
        self._news[stream] = None
        self._wake.set()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._client_has_gone = True
        self._wake.set()
        self._close()

    def _close(self) -> None:
        for stream in self._indexes:
            self._manager.close(stream)
