"""The requests behind one HTTP call: opened together, read as one, ended together."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from starlette.types import Receive

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import RequestAborted
from scheduler_service.frontend.authentication import Tenant
from scheduler_service.frontend.output.request_stream import RequestStream
from scheduler_service.frontend.request_manager import OpenRequests


class RunningRequests:
    """A context manager around all that one call has the core do.

    Leaving it ends what is left; so does, at once, the client's going away, even while a write
    waits for it.
    """

    def __init__(self, open_requests: OpenRequests, receive: Receive) -> None:
        """`receive` is ASGI's, of a call whose body was read."""
        self._open_requests = open_requests
        self._receive = receive
        self._indexes: dict[RequestStream, int] = {}
        self._num_done = 0
        self._news: dict[RequestStream, None] = {}
        """Streams to take from, in the order they had news."""
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

    def open(
        self, requests: Sequence[inference_pb.GenerateRequest], request_id: str, tenant: Tenant
    ) -> None:
        """Take all in; raises what makes one unacceptable."""
        for index, request in enumerate(requests):
            request.request_id = request_id if len(requests) == 1 else f"{request_id}-{index}"
            stream = self._open_requests.open(request, None, self._on_news, tenant)
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
            self._open_requests.close(stream)
        elif stream.error is not None:
            self._news[stream] = None  # the error comes behind it
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
            self._open_requests.close(stream)
