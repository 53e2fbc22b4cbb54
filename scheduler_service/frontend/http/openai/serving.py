"""How every generation is answered: whole, as JSON, or in chunks, as server-sent events."""

import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument, PagewireError, RequestAborted
from scheduler_service.frontend.authentication import Tenant
from scheduler_service.frontend.http.errors import error_body, error_response
from scheduler_service.frontend.http.openai.sampling import REQUEST_ID, SamplingFields
from scheduler_service.frontend.http.running import RunningRequests
from scheduler_service.frontend.http.services import HttpServices
from scheduler_service.frontend.input.processor import draw_request_id

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(REQUEST_ID)

_CONSTRAINT = re.compile(r"sampling_params\.(json_schema|regex|grammar|choice)\b")
"""Fields of the constraint in complaints about it."""

_to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
"""Made once: `json.dumps` makes an encoder per call."""

DONE = b"data: [DONE]\n\n"


class AnswerForm(Protocol):
    """How one endpoint words what comes of its requests. Called in order, for each response."""

    def chunks(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        """The stream's chunks that tell one more response of request `index`."""

    def last_chunks(self) -> Iterable[Any]:
        """What a stream ends with, after the last response."""

    def add(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Take one more response in."""

    def whole(self) -> Any:
        """The answer, after the last response."""


def request_id_of(http_request: Request, body: SamplingFields) -> str:
    """The caller's `X-Request-Id`, or the body's, or one drawn here. Raises InvalidArgument if the
    header is malformed."""
    given = http_request.headers.get("x-request-id")
    if given is None:
        return body.request_id or draw_request_id()
    if _REQUEST_ID.fullmatch(given) is None:
        raise InvalidArgument("X-Request-Id", "expected 1 to 100 characters of [A-Za-z0-9._:-]")
    return given


class Answer(Response):
    """Runs requests and answers as they come, or once they have ended.

    What goes wrong before the first byte is an error with its HTTP code. What goes wrong later is
    the stream's last event, and `[DONE]` does not follow: a cut stream never looks complete.
    """

    def __init__(
        self,
        services: HttpServices,
        requests: Sequence[inference_pb.GenerateRequest],
        form: AnswerForm,
        *,
        tenant: Tenant,
        request_id: str,
        stream: bool,
        constraint_field: str | None,
    ) -> None:
        """`constraint_field`: what the client calls the field that constrains the output."""
        super().__init__()
        self._constraint_field = constraint_field
        self._services = services
        self._requests = requests
        self._form = form
        self._tenant = tenant
        self._request_id = request_id
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with RunningRequests(self._services.requests, receive) as running:
                if not await self._run(running, send):
                    return
            response = JSONResponse(self._form.whole())
        except PagewireError as error:
            response = error_response(self._as_the_client_calls_it(error))
        response.headers["X-Request-Id"] = self._request_id
        await response(scope, receive, send)

    async def _run(self, running: RunningRequests, send: Send) -> bool:
        """Run the requests; whether the whole answer is still to be sent."""
        running.open(self._requests, self._request_id, self._tenant)
        if self._stream:
            await self._send_chunks(running, send)
            return False
        while (item := await running.next()) is not None:
            self._form.add(*item)
        return True

    def _as_the_client_calls_it(self, error: PagewireError) -> PagewireError:
        """A constraint has one field over gRPC, and comes by many names over HTTP."""
        if self._constraint_field is None or not isinstance(error, InvalidArgument):
            return error
        if not _CONSTRAINT.match(error.field):
            return error
        return InvalidArgument(self._constraint_field, error.expected)

    async def _send_chunks(self, running: RunningRequests, send: Send) -> None:
        item = await running.next()
        await send(self._start())
        try:
            while item is not None:
                if body := b"".join(map(_event, self._form.chunks(*item))):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                item = await running.next()
            body = b"".join(map(_event, self._form.last_chunks())) + DONE
        except RequestAborted as error:
            logger.debug("stream ended request_id=%s error=%s", self._request_id, error)
            body = _event(error_body(error))
        except PagewireError as error:
            body = _event(error_body(error))
        except Exception:  # a bug; the stream must end with an error all the same
            logger.exception("stream failed request_id=%s", self._request_id)
            body = _event(error_body(PagewireError("internal error")))
        await send({"type": "http.response.body", "body": body})

    def _start(self) -> dict[str, Any]:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # or nginx collects the chunks
            (b"x-request-id", self._request_id.encode()),
        ]
        return {"type": "http.response.start", "status": 200, "headers": headers}


def _event(data: Any) -> bytes:
    return b"data: " + _to_json(data).encode() + b"\n\n"
