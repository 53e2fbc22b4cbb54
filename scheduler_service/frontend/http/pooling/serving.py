"""A call's way from its body to its answer."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from pagewire.v1 import model_pb2
from scheduler_service.errors import InvalidArgument, PagewireError, RequestAborted
from scheduler_service.frontend.http.errors import ERROR_RESPONSES, error_response
from scheduler_service.frontend.http.middleware import caller_of, services_of
from scheduler_service.frontend.http.openai.serving import request_id_of
from scheduler_service.frontend.http.pooling.bodies import CohereError, PoolingList
from scheduler_service.frontend.http.request_body import convert, describe_body, json_body
from scheduler_service.frontend.models.frontend_model import FrontendModel
from scheduler_service.frontend.pooling.service import PoolingAnswer
from scheduler_service.frontend.pooling.work import PoolingRequest
from scheduler_service.tasks import Interrupted, Interruptible

PART_BYTES = 1 << 18
"""Longer answers are sent in parts of about this size, which take a few milliseconds to write. In
between the event loop serves other calls."""

FIELDS = (
    (r"^inputs(\[\d+\])(\.(text|token_ids(\.ids)?))?", r"input\1"),
    (r"(^|; )(options|embed|classify|score)\.", r"\1"),
    (r"^(normalize|apply_activation)$", "use_activation"),
    (r"^prompt_name$", "input_type"),
)
"""Regular expressions for names of fields in errors, as gRPC has them, and their replacements. An
endpoint may have others, which follow."""

_ONLY_INPUT = ((r"^input\[0\]", "input"),)

T = TypeVar("T")


class _DirectRoute(APIRoute):
    """Calls its endpoint with the request alone. FastAPI's injection of parameters, and the
    contexts that it opens for them, would take longer than reading a short body."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **settings: Any) -> None:
        super().__init__(path, endpoint, **settings)
        self.app = self._run

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self.endpoint(Request(scope, receive, send))
        await response(scope, receive, send)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What differs between the endpoints."""

    path: str
    body: type[Any]
    request: Callable[[Any, FrontendModel], PoolingRequest]
    """From a body to what a gRPC client would send. Raises InvalidArgument, UnsupportedByModel."""
    write: Callable[[Any, PoolingAnswer, str], Iterable[bytes]]
    """From a body, the results and the call's id to the answer's JSON, in pieces."""
    answer: type[Any] = PoolingList
    """Describes the answer."""
    fields: Sequence[tuple[str, str]] = ()
    """See FIELDS."""

    @property
    def is_cohere(self) -> bool:
        """Whether its errors have Cohere's shape."""
        return self.path.startswith("/v2/")

    def add_to(self, router: APIRouter) -> None:
        """Add its route."""
        error = {"model": CohereError} if self.is_cohere else {}
        read_body = json_body(self.body)

        async def create(http_request: Request) -> Response:
            return PoolingResponse(self, http_request, await read_body(http_request))

        router.add_api_route(
            self.path,
            create,
            methods=["POST"],
            summary=getdoc(self.body),
            responses={code: row | error for code, row in ERROR_RESPONSES.items()}
            | {200: {"model": self.answer}},
            response_model=None,
            openapi_extra=describe_body(self.body),
            route_class_override=_DirectRoute,
        )


class PoolingResponse(Response):
    """Runs a call, and sends its answer, or the error of the first input that fails."""

    def __init__(self, endpoint: Endpoint, http_request: Request, body: Any) -> None:
        super().__init__()
        self._endpoint = endpoint
        self._http_request = http_request
        self._request_id = request_id_of(http_request, body)
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await unless_disconnected(receive, self._run())
        except PagewireError as error:
            fields = (*self._endpoint.fields, *(_ONLY_INPUT if self._is_one_input else ()))
            response = error_response(in_client_terms(error, fields))
        response.headers["X-Request-Id"] = self._request_id
        await response(scope, receive, send)

    @property
    def _is_one_input(self) -> bool:
        """Whether the body has a text, or the ids of one, in place of a list of inputs."""
        value = getattr(self._body, "input", None)
        return isinstance(value, str) or (isinstance(value, list) and isinstance(value[0], int))

    async def _run(self) -> Response:
        http_request, endpoint, body = self._http_request, self._endpoint, self._body
        services, caller = await services_of(http_request), await caller_of(http_request)
        was_read = False

        async def read() -> PoolingRequest | None:
            """The only message, as soon as its model is served; None after it."""
            nonlocal was_read
            if was_read:
                return None
            was_read = True
            work = model_pb2.WORK_KIND_POOLING
            model, _ = await services.models.resolve_with_adapter(body.model, caller, work)
            return await convert(http_request, lambda: endpoint.request(body, model))

        answer = await services.pooling.collect_all(read, caller, deadline=None, is_late=True)
        if failed := next(filter(None, (result.error for result in answer.results)), None):
            raise failed
        pieces = endpoint.write(body, answer, self._request_id)
        if sum(len(result.values) for result in answer.results) <= PART_BYTES:
            return Response(b"".join(pieces), media_type="application/json")
        return StreamingResponse(_in_parts(pieces), media_type="application/json")


async def _in_parts(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= PART_BYTES:
            yield bytes(part)
            part.clear()
            await asyncio.sleep(0)
    yield bytes(part)


def in_client_terms(error: PagewireError, fields: Sequence[tuple[str, str]]) -> PagewireError:
    """The error with the client's names of fields: of the invalid one, or in the message."""
    text = error.field if isinstance(error, InvalidArgument) else error.message
    for pattern, replacement in (*FIELDS, *fields):
        text = re.sub(pattern, replacement, text)
    if isinstance(error, InvalidArgument):
        return InvalidArgument(text, error.expected)
    error.message = text
    return error


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of work, which is cancelled if the client disconnects. Raises RequestAborted."""
    try:
        with Interruptible() as context:
            watching = asyncio.create_task(_watch(receive, context))
            try:
                return await work
            finally:
                watching.cancel()
    except Interrupted:
        raise RequestAborted("the client has disconnected") from None


async def _watch(receive: Receive, context: Interruptible) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    context.interrupt()
