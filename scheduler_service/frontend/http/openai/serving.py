"""Common parts of the serving endpoints: whole responses as JSON, chunks as server-sent events."""

import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getdoc
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, Request
from pydantic_core import to_json
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pagewire.plain import plain
from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument, PagewireError, RequestAborted
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.http.errors import error_body, error_response, http_code
from scheduler_service.frontend.http.middleware import (
    REQUEST_ID,
    HttpServices,
    caller_of,
    services_of,
)
from scheduler_service.frontend.http.openai import protocol
from scheduler_service.frontend.http.openai.sampling import SamplingFields
from scheduler_service.frontend.http.request_body import convert, describe_body, json_body
from scheduler_service.frontend.input.processor import draw_request_id
from scheduler_service.frontend.multiplexer import SILENCE, RequestBatch
from scheduler_service.frontend.output.detokenizer import Detokenizer

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(REQUEST_ID)

_CONSTRAINT = re.compile(r"sampling_params\.(json_schema|regex|grammar|choice)\b")
"""The constraint's field in an error, as gRPC names it."""

DONE = b"data: [DONE]\n\n"

T = TypeVar("T", bound=Callable[..., "Generation"])


class ResponseBuilder(ABC):
    """Turns the responses of one call's requests, in order, into an endpoint's JSON or chunks, and
    these into server-sent events."""

    end = DONE
    """Follows the last event of a stream that is complete."""

    keep_alive = b": keep-alive\n\n"
    """Sent while nothing else is; no event."""

    @abstractmethod
    def chunks(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        """The stream's chunks for the next response of request `index`."""

    @abstractmethod
    def last_chunks(self) -> Iterable[Any]:
        """The chunks after the last response."""

    def add(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Add the next response of request `index` to the whole answer."""
        for _ in self.chunks(index, response):
            pass

    @abstractmethod
    def answer(self) -> Any:
        """The whole answer, after the last response."""

    def event(self, chunk: Any) -> bytes:
        """A chunk as a server-sent event."""
        return b"data: " + to_json(chunk) + b"\n\n"

    def error_chunk(self, code: int, body: dict[str, Any]) -> dict[str, Any]:
        """An error as a stream's last chunk: its HTTP code, and its body in OpenAI's shape."""
        return body


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an endpoint."""

    services: HttpServices
    tenant: Principal
    request_id: str


@dataclass(frozen=True, slots=True)
class Generation:
    """What the body of a call asks for."""

    requests: Sequence[inference_pb.GenerateRequest]
    """As a gRPC client would send them."""
    builder: ResponseBuilder
    constraint_field: str | None
    """The client's name for the field that constrains the output."""


def generation_endpoint(
    router: APIRouter,
    path: str,
    body_type: type[Any],
    *,
    summary: str,
    answer: dict[int | str, dict[str, Any]],
) -> Callable[[T], T]:
    """Decorate a function from a body of `body_type` and its call to a Generation, which raises
    InvalidArgument, as the endpoint at `path`; `answer` describes its responses. Bodies that are
    large are converted off the event loop."""

    def register(plan: T) -> T:
        async def create(
            body: Annotated[Any, Depends(json_body(body_type))], http_request: Request
        ) -> Response:
            services, caller = await services_of(http_request), await caller_of(http_request)
            call = Call(services, caller, request_id_of(http_request, body))
            generation = await convert(http_request, lambda: plan(body, call))
            return CompletionResponse(call, generation, stream=bool(body.stream))

        router.post(
            path,
            summary=summary,
            description=getdoc(plan) or "",
            responses=answer,
            response_model=None,
            openapi_extra=describe_body(body_type),
        )(create)
        return plan

    return register


def request_id_of(http_request: Request, body: Any) -> str:
    """The caller's `X-Request-Id`, or the body's, or one drawn here. Raises InvalidArgument if the
    header is malformed."""
    given = http_request.headers.get("x-request-id")
    if given is None:
        return getattr(body, "request_id", None) or draw_request_id()
    if _REQUEST_ID.fullmatch(given) is None:
        raise InvalidArgument(
            "X-Request-Id", f"expected 1 to 100 characters of [A-Za-z0-9._:-], got {given[:120]!r}"
        )
    return given


class CompletionResponse(Response):
    """Runs requests, and streams their chunks or sends the whole answer at their end.

    An error before the first byte is answered with its HTTP code. A later one is the stream's last
    event, and `[DONE]` does not follow: an interrupted stream never looks complete.
    """

    def __init__(self, call: Call, generation: Generation, *, stream: bool) -> None:
        super().__init__()
        self._call = call
        self._request_id = call.request_id
        self._generation = generation
        self._builder = generation.builder
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            services = self._call.services
            silence_s = services.sse_keep_alive_s if self._stream else 0.0
            async with RequestBatch(services.requests, receive, silence_s) as running:
                if not await self._run(running, send):
                    return
            # A call's arguments, where they are no text, may have a number beyond all floats.
            whole = to_json(self._builder.answer(), inf_nan_mode="null")
            response = Response(whole, media_type="application/json")
        except PagewireError as error:
            response = error_response(self._with_client_field(error))
        response.headers["X-Request-Id"] = self._request_id
        await response(scope, receive, send)

    async def _run(self, running: RequestBatch, send: Send) -> bool:
        """Run the requests; True if the whole answer remains to be sent."""
        await running.open(self._generation.requests, self._request_id, self._call.tenant)
        if self._stream:
            await self._send_chunks(running, send)
            return False
        while (item := await running.next()) is not None:
            self._builder.add(*item)
        return True

    def _with_client_field(self, error: PagewireError) -> PagewireError:
        """The error with the client's field: gRPC has one field where HTTP has several."""
        field = self._generation.constraint_field
        if field and isinstance(error, InvalidArgument) and _CONSTRAINT.match(error.field):
            return InvalidArgument(field, error.expected)
        return error

    async def _send_chunks(self, running: RequestBatch, send: Send) -> None:
        item = await running.next()
        await send(self._start())
        builder = self._builder
        try:
            while item is not None:
                if body := builder.keep_alive if item is SILENCE else self._events(*item):
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    running.record_output()
                item = await running.next()
            body = b"".join(map(builder.event, builder.last_chunks())) + builder.end
        except RequestAborted as error:
            logger.debug("stream ended request_id=%s error=%s", self._request_id, error)
            body = self._error_event(error)
        except PagewireError as error:
            body = self._error_event(error)
        except Exception:  # a bug; the stream must end with an error all the same
            logger.exception("stream failed request_id=%s", self._request_id)
            body = self._error_event(PagewireError("internal error"))
        await send({"type": "http.response.body", "body": body})

    def _events(self, index: int, response: inference_pb.GenerateResponse) -> bytes:
        return b"".join(map(self._builder.event, self._builder.chunks(index, response)))

    def _error_event(self, error: PagewireError) -> bytes:
        return self._builder.event(self._builder.error_chunk(http_code(error), error_body(error)))

    def _start(self) -> dict[str, Any]:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # or nginx collects the chunks
            (b"x-request-id", self._request_id.encode()),
        ]
        return {"type": "http.response.start", "status": 200, "headers": headers}


class Envelope:
    """The parts of an answer around its choices: its id and model, and the tokens used by all
    requests of the call, from their first response on."""

    def __init__(self, request: SamplingFields, answer_id: str, *, has_output: bool = True) -> None:
        """`has_output`: whether output tokens were requested, and are counted."""
        options = request.stream_options
        self._includes_usage = options is not None and options.include_usage
        self._includes_usage_so_far = options is not None and options.continuous_usage_stats
        self._returns_timings = bool(request.return_timings)
        self._timings: dict[int, inference_pb.Timings] = {}
        self._has_output = has_output
        self._is_chat = isinstance(request, protocol.ChatRequest)
        self._usages: dict[int, inference_pb.Usage] = {}
        self.head: protocol.AnswerHead = {
            "id": answer_id,
            "created": int(time.time()),
            "model": request.model or "",
        }

    def count(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Count the next response of request `index`. Its final usage replaces the sum of its
        tokens, because candidates that are not returned count too."""
        usage = self._usages.get(index)
        if usage is None:
            usage = self._usages[index] = inference_pb.Usage()
        if response.HasField("started"):
            self.head["model"] = response.started.lora or response.started.model
            usage.prompt_tokens = len(response.started.prompt_token_ids)
        for delta in response.choices:
            usage.completion_tokens += len(delta.token_ids)
            if self._is_chat:
                usage.reasoning_tokens += delta.reasoning_tokens
        if response.HasField("usage"):
            usage.CopyFrom(response.usage)
        if response.HasField("timings"):
            self._timings[index] = response.timings
        if not self._has_output:
            usage.completion_tokens = 0

    def usage(self) -> protocol.UsageBody:
        """The usage so far."""
        prompt, cached, completion, reasoning = (
            sum(getattr(usage, name) for usage in self._usages.values())
            for name in ("prompt_tokens", "cached_tokens", "completion_tokens", "reasoning_tokens")
        )
        drafts, accepted = (
            sum(getattr(timings, name) for timings in self._timings.values())
            for name in ("num_drafts", "num_accepted_drafts")
        )
        details: protocol.CompletionTokensDetails = (
            {"reasoning_tokens": reasoning} if self._is_chat else {}
        )
        if drafts:
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = drafts - accepted
        body: protocol.UsageBody = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if details:
            body["completion_tokens_details"] = details
        return body

    def final_fields(self) -> protocol.UsageFields:
        """The usage, and the timings if they were requested."""
        fields: protocol.UsageFields = {"usage": self.usage()}
        if self._returns_timings:
            fields["timings"] = [plain(timings) for _, timings in sorted(self._timings.items())]
        return fields

    def end_fields(self) -> protocol.UsageFields | None:
        """The usage and timings for a stream's last chunk, as far as they were requested; None if
        neither was."""
        fields = self.final_fields()
        if not self._includes_usage:
            del fields["usage"]
        return fields or None

    def chunk_usage(self) -> protocol.UsageFields:
        """The usage in a chunk that has choices."""
        if not self._includes_usage:
            return {}
        return {"usage": self.usage() if self._includes_usage_so_far else None}


def joined(former: Any, new: Any) -> Any:
    """Texts, lists, and the entries of a dictionary, with the new part appended."""
    if former is None or new is None:
        return new if former is None else former
    if isinstance(former, dict):
        return {name: joined(value, new[name]) for name, value in former.items()}
    former += new
    return former


class ChoicesBuilder(ResponseBuilder):
    """An answer with choices: a whole one is what the pieces of a streamed one add up to."""

    objects: tuple[str, str]
    """The field `object` of a chunk and of a whole answer."""

    def __init__(self, envelope: Envelope) -> None:
        self.envelope = envelope
        self.prompt_fields: protocol.PromptFields = {}
        """Fields about the prompt; in a stream, the next chunk has them."""
        self._choices: dict[int, Any] = {}

    @abstractmethod
    def pieces(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        """The new parts of choices in the next response of request `index`."""

    @abstractmethod
    def append(self, choice: Any, piece: Any) -> Any:
        """The whole choice so far, which is None first, with a piece appended."""

    def chunks(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        """A chunk for each piece."""
        for piece in self._counted(index, response):
            yield self._answer(self.objects[0], [piece], self.envelope.chunk_usage())

    def last_chunks(self) -> Iterable[Any]:
        """The usage and the timings, if they were requested."""
        if (fields := self.envelope.end_fields()) is not None:
            yield self._answer(self.objects[0], [], fields)

    def add(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Append the new part of each choice."""
        for piece in self._counted(index, response):
            number = piece["index"]
            self._choices[number] = self.append(self._choices.get(number), piece)

    def answer(self) -> Any:
        """All choices, and the usage."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._answer(self.objects[1], choices, self.envelope.final_fields())

    def _counted(self, index: int, response: inference_pb.GenerateResponse) -> Iterable[Any]:
        self.envelope.count(index, response)
        return self.pieces(index, response)

    def _answer(self, kind: str, choices: list[Any], fields: Mapping[str, Any]) -> Any:
        answer = {**self.envelope.head, "object": kind, "choices": choices, **fields}
        if self.prompt_fields:
            answer |= self.prompt_fields
            self.prompt_fields = {}
        return answer


def stop_reason(delta: inference_pb.ChoiceDelta) -> int | str | None:
    """vLLM's field: the stop string or token that ended the choice."""
    kind = delta.WhichOneof("stop_reason")
    return getattr(delta, kind) if kind is not None else None


HOLD_MS = 1000
"""How long the core may hold tokens back for an answer that is sent as a whole: they then reach
the frontend in fewer messages."""


def make_request(
    body: SamplingFields, params: sampling_pb2.SamplingParams
) -> inference_pb.GenerateRequest:
    """The request without its prompt. Raises InvalidArgument."""
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options", "requires stream")
    return inference_pb.GenerateRequest(
        sampling_params=params,
        model=body.model,
        priority=body.priority,
        num_speculative_tokens=body.num_speculative_tokens,
        cache_salt=body.cache_salt,
        max_hold_ms=None if body.stream else HOLD_MS,
    )


def streamed_or_whole(answer: type[Any], chunk: type[Any] | None = None) -> Any:
    """The OpenAPI description of an answer that is JSON, or chunks with `stream`."""
    name = (chunk or answer).__name__
    events = f"Server-sent events: `data:` and a {name} each, then `data: [DONE]`."
    return describe_answer(answer, "The answer, or with `stream` its chunks", events)


def describe_answer(answer: type[Any], description: str, events: str) -> Any:
    """The OpenAPI description of an answer that is JSON, or with `stream` the `events`.

    Some tools compare a stream with its schema as a text, others each event, so it has no type.
    """
    event_stream = {"schema": {"description": events}}
    content = {"text/event-stream": event_stream}
    return {200: {"model": answer, "description": description, "content": content}}


LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have, as in vLLM."""


def token_name(token: inference_pb.TokenLogprob, *, as_id: bool) -> str:
    """A token's text, or its id: several tokens may have one text."""
    return f"token_id:{token.token_id}" if as_id else token.text


def finite(logprob: float) -> float:
    """A log probability as JSON allows it."""
    return max(logprob, LEAST)


class LegacyLogprobs:
    """`logprobs` of /v1/completions: parallel lists over the tokens of one choice."""

    def __init__(self, *, as_ids: bool) -> None:
        self._as_ids = as_ids
        self._end = 0

    def write(
        self,
        positions: Iterable[inference_pb.TokenLogprobs],
        detokenizer: Detokenizer,
        *,
        text: str | None = None,
    ) -> protocol.LegacyLogprobsBody:
        """The lists for the next positions, which `detokenizer` reads. Offsets are those of the
        tokens in the choice's text; `text` is all of their text, where it is not theirs exactly."""
        positions = list(positions)
        begin = self._end
        offsets = [self._offset(position.token, detokenizer) for position in positions]
        if text is not None:  # such as one that the tokenizer begins with a special token
            surplus = self._end - begin - len(text)
            offsets = [max(begin, offset - surplus) for offset in offsets]
            self._end = begin + len(text)
        lists: protocol.LegacyLogprobsBody = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        lists["text_offset"] = offsets
        for position in positions:
            token = position.token
            lists["tokens"].append(token_name(token, as_id=self._as_ids))
            is_known = token.HasField("logprob")
            lists["token_logprobs"].append(finite(token.logprob) if is_known else None)
            lists["top_logprobs"].append(self._top(position) if is_known else None)
        return lists

    def _offset(self, token: inference_pb.TokenLogprob, detokenizer: Detokenizer) -> int:
        """Where a token begins: those of which a character consists begin together."""
        begin = self._end
        piece = detokenizer.push(token.token_id)
        self._end += len(piece)
        return max(begin, self._end - len(token.text)) if piece else begin

    def _top(self, position: inference_pb.TokenLogprobs) -> dict[str, float]:
        """The most probable tokens and the chosen one; among tokens with the same text, the most
        probable one counts."""
        found: dict[str, float] = {}
        for token in (*position.top, position.token):
            found.setdefault(token_name(token, as_id=self._as_ids), finite(token.logprob))
        return found


def chat_logprobs(
    positions: Iterable[inference_pb.TokenLogprobs], *, as_ids: bool
) -> protocol.ChatLogprobsBody:
    """`logprobs` of /v1/chat/completions."""
    content: list[protocol.TokenLogprobBody] = [
        {
            **_chat_token(position.token, as_ids),
            "top_logprobs": [_chat_token(token, as_ids) for token in position.top],
        }
        for position in positions
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: inference_pb.TokenLogprob, as_id: bool) -> protocol.TopLogprob:
    """`bytes` are those of the text; None where the token is part of a character."""
    is_whole = "\ufffd" not in token.text
    return {
        "token": token_name(token, as_id=as_id),
        "logprob": finite(token.logprob),
        "bytes": list(token.text.encode()) if is_whole else None,
    }


def prompt_logprobs(positions: Sequence[inference_pb.TokenLogprobs]) -> protocol.PromptLogprobsBody:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token first; None for the first."""
    return [
        {
            str(token.token_id): {
                "logprob": finite(token.logprob),
                "rank": token.rank,
                "decoded_token": token.text,
            }
            for token in (position.token, *position.top)
        }
        if position.token.HasField("logprob")
        else None
        for position in positions
    ]
