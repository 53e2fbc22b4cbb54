"""Several requests in one call: a stream of GenerateMany, and the prompts of one HTTP call."""

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Self

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import (
    InvalidArgument,
    PagewireError,
    PromptTooLong,
    RequestAborted,
    Unavailable,
)
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.request_manager import RequestManager
from scheduler_service.frontend.requests.request_stream import RequestStream
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


class _OpenRequests:
    """The requests that one call has open, each with a number that its caller gives it."""

    def __init__(self, manager: RequestManager) -> None:
        self._manager = manager
        self._streams: dict[int, RequestStream] = {}
        self._updated: dict[int, None] = {}
        """Requests with something to take, in the order in which they got it."""
        self.wake = asyncio.Event()
        """Set when there is something to take."""

    def __len__(self) -> int:
        return len(self._streams)

    def record_update(self, number: int) -> None:
        """There may be something new to take of a request: the callback to open it with."""
        self._updated[number] = None
        self.wake.set()

    def add(self, number: int, stream: RequestStream) -> None:
        """Add a request that was opened."""
        self._streams[number] = stream

    def take(self) -> tuple[int, RequestStream, inference_pb.GenerateResponse | None] | None:
        """The number and the stream of the request that has waited longest, and its next response,
        or None in place of the response when the request has failed; its last responses come before
        that. None if nothing is new."""
        while self._updated:
            number = next(iter(self._updated))
            del self._updated[number]
            stream = self._streams.get(number)
            if stream is None:
                continue
            response = stream.take()
            if response is None and stream.error is None:
                continue
            if response is None or stream.is_done:
                self._manager.close(self._streams.pop(number))
            elif stream.error is not None:
                self._updated[number] = None  # the error follows
            return number, stream, response
        return None

    def close(self) -> None:
        """End all that are left."""
        while self._streams:
            self._manager.close(self._streams.popitem()[1])


class RequestMultiplexer:
    """The requests of one GenerateMany stream."""

    def __init__(
        self, requests: RequestManager, deadline: float | None, tenant_now: Callable[[], Principal]
    ) -> None:
        """`tenant_now` returns the tenant of the next request; it may raise PagewireError."""
        self._requests = requests
        self._tenant_now = tenant_now
        self._deadline = deadline
        self._open_requests = _OpenRequests(requests)
        self._numbers = count()
        self._errors: deque[inference_pb.RequestError] = deque()
        self._may_read = asyncio.Event()
        self._wake = self._open_requests.wake

    async def run(self, read: Read, write: Write) -> None:
        """Serve the stream to its end: half-closed by the client and every request answered.

        `read` gives None at the client's end. Raises Unavailable if the service ends first.
        """
        reading = asyncio.create_task(self._read_all(read))
        draining = asyncio.create_task(self._requests.capacity.is_draining.wait())
        for task in (reading, draining):
            task.add_done_callback(lambda _: self._wake.set())
        try:
            await self._write_all(write, reading)
        finally:
            reading.cancel()
            draining.cancel()
            self._open_requests.close()
            await asyncio.gather(reading, draining, return_exceptions=True)

    async def _read_all(self, read: Read) -> None:
        while (message := await read()) is not None:
            self._open(message.request)
            if len(self._errors) >= MAX_ERRORS:
                self._may_read.clear()
                await self._may_read.wait()

    def _open(self, request: inference_pb.GenerateRequest) -> None:
        opened = self._open_requests
        try:
            if not request.HasField("request_id"):
                raise InvalidArgument("request_id", "required on a GenerateMany stream")
            tenant = self._tenant_now()
            self._requests.capacity.check_call_share(len(opened))
            number = next(self._numbers)
            on_update = partial(opened.record_update, number)
            opened.add(number, self._requests.open(request, self._deadline, on_update, tenant))
        except PagewireError as error:
            self._errors.append(request_error(request.request_id, error))
            self._wake.set()

    async def _write_all(self, write: Write, reading: asyncio.Task[None]) -> None:
        while True:
            self._wake.clear()
            while (response := self._next()) is not None:
                await write(response)
            if reading.done():
                reading.result()  # raises the error that ended it
                if not self._open_requests:
                    return
            if not self._open_requests and self._requests.capacity.is_draining.is_set():
                raise Unavailable("the frontend is shutting down", reason="SHUTTING_DOWN")
            await self._wake.wait()

    def _next(self) -> inference_pb.GenerateManyResponse | None:
        """One response of the request that has waited longest; refusals come first."""
        if self._errors:
            self._may_read.set()
            return inference_pb.GenerateManyResponse(error=self._errors.popleft())
        if (taken := self._open_requests.take()) is None:
            return None
        _, stream, response = taken
        if response is not None:
            return inference_pb.GenerateManyResponse(response=response)
        assert stream.error is not None
        error = request_error(stream.request_id, stream.error)
        return inference_pb.GenerateManyResponse(error=error)


def request_error(request_id: str, error: PagewireError) -> inference_pb.RequestError:
    """An error of one request or text among others; a text has no id."""
    status = to_status(error)
    return inference_pb.RequestError(
        request_id=request_id,
        code=status.code,
        message=status.message,
        status=status.SerializeToString(),
    )


_PROMPT = re.compile(r"(text|token_ids\.ids)\b")
"""The field of a prompt in an error, as gRPC names it."""

SILENCE: tuple[int, inference_pb.GenerateResponse] = (-1, inference_pb.GenerateResponse())
"""Stands for a response when none has come for some time."""


class RequestBatch:
    """A context manager around all requests of one HTTP call.

    Leaving it ends those that are left. So does the client's disconnection, at once, even while a
    write waits for the client.
    """

    def __init__(self, manager: RequestManager, receive: Receive, silence_s: float = 0.0) -> None:
        """`receive` is ASGI's, of a call whose body was read. `silence_s`: seconds without output
        after which `next` returns SILENCE; 0: never."""
        self._manager = manager
        self._receive = receive
        self._opened = _OpenRequests(manager)
        self._num_requests = 0
        self._is_disconnected = False
        self._watching: asyncio.Task[None] | None = None
        self._silence_s = silence_s
        self._is_silent = False
        self._last_output = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._watching = asyncio.create_task(self._watch())
        if self._silence_s:
            self._wait_for_silence(self._silence_s)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watching is not None
        self._watching.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._opened.close()

    async def open(
        self, requests: Sequence[inference_pb.GenerateRequest], request_id: str, tenant: Principal
    ) -> None:
        """Open all of them; raises the error of the first that is refused."""
        share = self._manager.capacity.tenant_share
        if len(requests) > share:
            raise InvalidArgument(
                "prompt", f"expected at most {share} prompts in one call, got {len(requests)}"
            )
        self._num_requests = len(requests)
        for index, request in enumerate(requests):
            if index and index % OPENED_TOGETHER == 0:
                await asyncio.sleep(0)
            request.request_id = request_id if len(requests) == 1 else f"{request_id}-{index}"
            on_update = partial(self._opened.record_update, index)
            try:
                stream = await self._manager.open_soon(
                    request, None, on_update, tenant, is_late=True
                )
            except (InvalidArgument, PromptTooLong) as error:
                raise self._naming(index, error) from None
            self._opened.add(index, stream)

    async def next(self) -> tuple[int, inference_pb.GenerateResponse] | None:
        """The next response and the index of its request, or SILENCE; None after the last response.

        Raises the error of the first request that fails; the others' outputs are then discarded.
        """
        opened = self._opened
        while not self._is_disconnected:
            opened.wake.clear()
            if self._is_silent:
                self._is_silent = False
                return SILENCE
            if (taken := opened.take()) is not None:
                index, stream, response = taken
                if response is None:
                    assert stream.error is not None
                    raise self._naming(index, stream.error)
                return index, response
            if not opened:
                return None
            await opened.wake.wait()
        raise RequestAborted("the client has disconnected")

    def _naming(self, index: int, error: PagewireError) -> PagewireError:
        """The error of a request, which says which of several prompts is too long or invalid."""
        if self._num_requests == 1:
            return error
        if isinstance(error, PromptTooLong):
            error.message = f"prompt[{index}]: {error.message}"
        elif isinstance(error, InvalidArgument) and (field := _PROMPT.match(error.field)):
            place = error.field[field.end() :]
            return InvalidArgument(f"prompt[{index}]{place}", error.expected)
        return error

    def record_output(self) -> None:
        """Note that the client was sent something: its silence begins again."""
        self._last_output = time.monotonic()

    def _wait_for_silence(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._check_silence)

    def _check_silence(self) -> None:
        remaining_s = self._last_output + self._silence_s - time.monotonic()
        if remaining_s <= 0:
            self._is_silent = True
            self._opened.wake.set()
            remaining_s = self._silence_s
        self._wait_for_silence(remaining_s)

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_disconnected = True
        self._opened.wake.set()
        self._opened.close()
