"""What the core is to be told, collected until the stream takes the next message.

So a burst of submissions is one message, and at most one message is under way.
"""

import asyncio

from pagewire.v1 import scheduler_service_pb2 as scheduler_pb
from scheduler_service.columns import to_column
from scheduler_service.frontend.output.choice_stream import ChoiceStream
from scheduler_service.frontend.output.request_stream import RequestStream

MAX_SUBMIT_BYTES = 4 << 20
"""Submissions in one message, roughly: after a reconnect there may be many long ones."""


class Outgoing:
    """The messages to be, of one stream."""

    def __init__(self, frontend_id: str | None = None) -> None:
        """`frontend_id` makes the first message a greeting, due at once."""
        self._frontend_id = frontend_id
        self._submits: dict[RequestStream, None] = {}
        self._cancels: list[int] = []
        self._stops: list[scheduler_pb.StopChoice] = []
        self._wake = asyncio.Event()
        if frontend_id is not None:
            self._wake.set()

    def submit(self, request: RequestStream) -> None:
        """Submit a request, with what it has when the message is made."""
        self._submits[request] = None
        self._wake.set()

    def cancel(self, request: RequestStream) -> None:
        """Take a request back."""
        if request in self._submits:  # the core has not heard of it
            del self._submits[request]
            return
        self._cancels.append(request.handle)
        self._wake.set()

    def stop(self, request: RequestStream, choice: ChoiceStream) -> None:
        """End a choice, with the tokens it has now."""
        handle = request.handle + choice.index
        stop = scheduler_pb.StopChoice(handle=handle, num_tokens=len(choice.token_ids))
        self._stops.append(stop)
        self._wake.set()

    async def next(self) -> scheduler_pb.FrontendMessage:
        """Wait until there is something to say, and say all of it."""
        await self._wake.wait()
        self._wake.clear()
        message = scheduler_pb.FrontendMessage(cancels=to_column(self._cancels), stops=self._stops)
        if self._frontend_id is not None:
            message.frontend_id, self._frontend_id = self._frontend_id, None
        self._cancels.clear()
        self._stops.clear()
        self._write_submits(message)
        return message

    def _write_submits(self, message: scheduler_pb.FrontendMessage) -> None:
        num_bytes = 0
        while self._submits and num_bytes < MAX_SUBMIT_BYTES:
            request = next(iter(self._submits))
            del self._submits[request]
            submit = request.submission()
            num_bytes += submit.ByteSize()
            message.submits.append(submit)
        if self._submits:
            self._wake.set()
