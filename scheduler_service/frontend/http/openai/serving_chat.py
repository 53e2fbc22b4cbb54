"""`/v1/chat/completions`: requests, tool choice, and messages with tool calls."""

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.auth import Principal
from scheduler_service.frontend.chat_formats.constrained import (
    NamedParser,
    RequiredParser,
    named_schema,
    required_schema,
)
from scheduler_service.frontend.chat_formats.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    MessageParser,
)
from scheduler_service.frontend.chat_formats.formats import ChatFormat, find_format
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller, HttpServices
from scheduler_service.frontend.http.openai.protocol import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatMessageBody,
    ChatPrompt,
    ChatRequest,
    ChoiceFields,
    ChunkChoice,
    Delta,
    FinishReason,
    FunctionBody,
    FunctionDelta,
    NamedToolChoice,
    PromptFields,
    ToolBody,
)
from scheduler_service.frontend.http.openai.sampling import constraint_field, sampling_params
from scheduler_service.frontend.http.openai.serving import (
    CompletionResponse,
    Envelope,
    ResponseBuilder,
    chat_logprobs,
    make_request,
    prompt_logprobs,
    request_id_of,
    stop_reason,
    streamed_or_whole,
)
from scheduler_service.frontend.http.request_body import convert, describe_body, json_body
from scheduler_service.frontend.metrics import FINISH_LABELS
from scheduler_service.frontend.structured_output.constraint import closed


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolPlan:
    """How one request treats tools."""

    shows_tools: bool = False
    """Whether the chat template gets the tools."""
    json_schema: str | None = None
    """The schema of the output if a call is required."""
    make_parser: Callable[[], MessageParser] | None = None
    """Makes the parser of one choice; None if the output is not parsed."""
    is_named: bool = False
    """Whether the request itself names the function."""
    keeps_special_tokens: bool = False


def plan_tools(body: ChatRequest, chat_format: Callable[[], ChatFormat]) -> ToolPlan:
    """How to treat the tools of a request. Raises InvalidArgument for an invalid `tool_choice`.

    `chat_format` returns the format in which the model answers.
    """
    choice = body.tool_choice or "auto"
    functions = {tool.function.name: tool.function for tool in body.tools or ()}
    if not functions:
        if choice == "required" or isinstance(choice, NamedToolChoice):
            raise InvalidArgument("tool_choice", "requires tools")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    names = frozenset(functions)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise InvalidArgument(
                "tool_choice.function.name", f"expected one of {sorted(names)}, got {name!r}"
            )
        return ToolPlan(
            shows_tools=True,
            json_schema=named_schema(_parameters(functions[name])),
            make_parser=lambda: NamedParser(name),
            is_named=True,
        )
    if choice == "required":
        tools = [(name, _parameters(function)) for name, function in functions.items()]
        return ToolPlan(
            shows_tools=True,
            json_schema=required_schema(tools, one=body.parallel_tool_calls is False),
            make_parser=lambda: RequiredParser(names),
        )
    found = chat_format()
    schemas = {name: function.parameters for name, function in functions.items()}
    return ToolPlan(
        shows_tools=True,
        make_parser=lambda: found.parser(schemas),
        keeps_special_tokens=bool(found.special_tokens),
    )


def _parameters(function: FunctionBody) -> dict[str, Any] | None:
    if function.parameters is None or function.strict is False:
        return function.parameters
    return closed(function.parameters)


_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


class AssistantMessage:
    """Turns text into the pieces of one message; `body` joins all of them."""

    def __init__(self, plan: ToolPlan, *, one_call: bool) -> None:
        self._parser = plan.make_parser() if plan.make_parser is not None else None
        self._one_call = one_call
        self._texts: list[str] = []
        self._calls: list[tuple[str, str]] = []
        """Id and name."""
        self._arguments: list[list[str]] = []
        self._drops_call = False

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a function."""
        return bool(self._calls)

    def take(self, delta: inference_pb.ChoiceDelta) -> list[Delta]:
        """The pieces in a choice's next output; at its end, those that were held back, too."""
        pieces = self.push(delta.text) if delta.text else []
        return pieces + self.finish() if delta.finish_reason else pieces

    def push(self, text: str) -> list[Delta]:
        """The pieces in the next text."""
        if self._parser is None:
            self._texts.append(text)
            return [{"content": text}]
        return self._pieces(self._parser.push(text))

    def finish(self) -> list[Delta]:
        """The pieces that were held back, at the end of the text."""
        return self._pieces(self._parser.finish()) if self._parser is not None else []

    def body(self) -> AnswerMessage:
        """The whole message."""
        text = "".join(self._texts)
        message: AnswerMessage = {
            "role": "assistant",
            "content": text or (None if self._calls else ""),
            "refusal": None,
        }
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": "".join(arguments)},
                }
                for (call_id, name), arguments in zip(self._calls, self._arguments, strict=True)
            ]
        return message

    def _pieces(self, events: Iterable[Event]) -> list[Delta]:
        pieces: list[Delta] = []
        for event in _merged(events):
            if isinstance(event, Content):
                self._texts.append(event.text)
                pieces.append({"content": event.text})
            elif isinstance(event, CallStart):
                pieces += self._start_call(event)
            elif isinstance(event, CallArguments) and not self._drops_call:
                self._arguments[-1].append(event.text)
                pieces.append(self._call_delta({"arguments": event.text}))
        return pieces

    def _start_call(self, event: CallStart) -> list[Delta]:
        self._drops_call = self._one_call and self.has_calls
        if self._drops_call:
            return []
        call_id = _draw_call_id()
        self._calls.append((call_id, event.name))
        self._arguments.append([])
        delta = self._call_delta({"name": event.name, "arguments": ""})
        delta["tool_calls"][0] |= {"id": call_id, "type": "function"}
        return [delta]

    def _call_delta(self, function: FunctionDelta) -> Delta:
        return {"tool_calls": [{"index": len(self._calls) - 1, "function": function}]}


def _merged(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with consecutive pieces of arguments, and of text, joined."""
    for kind, run in groupby(events, type):
        if kind is CallStart:
            yield from run
        else:
            yield kind("".join(each.text for each in run if not isinstance(each, CallStart)))


def _draw_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse anything else; others accept it."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))


@dataclass(slots=True)
class _ChatChoice:
    message: AssistantMessage
    logprobs: list[inference_pb.TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: ChoiceFields = field(default_factory=ChoiceFields)


class ChatResponseBuilder(ResponseBuilder):
    """Answers to a conversation."""

    def __init__(self, request: ChatRequest, request_id: str, plan: ToolPlan) -> None:
        self._request = request
        self._plan = plan
        self._envelope = Envelope(request, f"chatcmpl-{request_id}")
        one_call = request.parallel_tool_calls is False
        self._choices = [
            _ChatChoice(AssistantMessage(plan, one_call=one_call)) for _ in range(request.n or 1)
        ]
        self._of_prompt: PromptFields = {}
        """Fields about the prompt; in a stream, the next chunk has them."""

    # ResponseBuilder.

    def chunks(
        self, index: int, response: inference_pb.GenerateResponse
    ) -> Iterable[ChatCompletionChunk]:
        """The roles first, then the new part of each choice."""
        self._take(index, response)
        if response.HasField("started"):
            for number in range(len(self._choices)):
                yield self._chunk(number, {"role": "assistant", "content": ""}, {})
        for delta in response.choices:
            yield from self._delta_chunks(delta)

    def last_chunks(self) -> Iterable[ChatCompletionChunk]:
        """The usage and the timings, if they were requested."""
        if (fields := self._envelope.end_fields()) is not None:
            yield {
                **self._envelope.head,
                "object": "chat.completion.chunk",
                "choices": [],
                **fields,
            }

    def add(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Append the new part of each choice."""
        self._take(index, response)
        for delta in response.choices:
            choice = self._choices[delta.index]
            choice.message.take(delta)
            choice.logprobs.extend(delta.logprobs)
            choice.token_ids.extend(delta.token_ids)
            if delta.finish_reason:
                choice.end = self._end(delta)

    def whole(self) -> ChatCompletion:
        """All choices, and the usage."""
        choices: list[ChatChoice] = [
            {
                "index": index,
                "message": choice.message.body(),
                "logprobs": None,
                "finish_reason": None,
                "stop_reason": None,
                **self._of_tokens(choice.logprobs, choice.token_ids),
                **choice.end,
            }
            for index, choice in enumerate(self._choices)
        ]
        return {
            **self._envelope.head,
            "object": "chat.completion",
            "choices": choices,
            **self._envelope.whole_fields(),
            **self._of_prompt,
        }

    # Parts.

    def _take(self, index: int, response: inference_pb.GenerateResponse) -> None:
        """Take in the parts that all choices share."""
        self._envelope.take(index, response)
        if response.HasField("started") and self._request.return_token_ids:
            self._of_prompt["prompt_token_ids"] = list(response.started.prompt_token_ids)
        if response.prompt_logprobs:
            self._of_prompt["prompt_logprobs"] = prompt_logprobs(response.prompt_logprobs)

    def _delta_chunks(self, delta: inference_pb.ChoiceDelta) -> Iterable[ChatCompletionChunk]:
        """A chunk per piece of the message; the last one has the tokens and the end."""
        pieces = self._choices[delta.index].message.take(delta)
        rest: ChoiceFields = {}
        if delta.token_ids:
            rest = self._of_tokens(delta.logprobs, delta.token_ids)
        if delta.finish_reason:
            rest |= self._end(delta)
        if rest and not pieces:
            pieces = [{}]
        for place, piece in enumerate(pieces):
            is_last = place == len(pieces) - 1
            yield self._chunk(delta.index, piece, rest if is_last else {})

    def _of_tokens(
        self, logprobs: Iterable[inference_pb.TokenLogprobs], token_ids: Iterable[int]
    ) -> ChoiceFields:
        """The requested fields of output tokens besides their text."""
        fields: ChoiceFields = {}
        if self._request.logprobs:
            as_ids = bool(self._request.return_tokens_as_token_ids)
            fields["logprobs"] = chat_logprobs(logprobs, as_ids=as_ids)
        if self._request.return_token_ids:
            fields["token_ids"] = list(token_ids)
        return fields

    def _end(self, delta: inference_pb.ChoiceDelta) -> ChoiceFields:
        reason: FinishReason | None = FINISH_LABELS.get(delta.finish_reason)
        has_calls = self._choices[delta.index].message.has_calls and not self._plan.is_named
        if reason == "stop" and has_calls:
            reason = "tool_calls"
        return {"finish_reason": reason, "stop_reason": stop_reason(delta)}

    def _chunk(self, index: int, delta: Delta, rest: ChoiceFields) -> ChatCompletionChunk:
        choice: ChunkChoice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            **rest,
        }
        of_prompt, self._of_prompt = self._of_prompt, {}
        return {
            **self._envelope.head,
            "object": "chat.completion.chunk",
            "choices": [choice],
            **self._envelope.chunk_usage(),
            **of_prompt,
        }


PART_SEPARATOR = "\n"
"""Joins the parts of one turn's content: templates take it as one text."""


def chat_of(body: ChatPrompt, *, with_tools: bool = True) -> inference_pb.Chat:
    """The conversation, with or without its tools. Raises InvalidArgument."""
    for index, message in enumerate(body.messages):
        if message.content is None and message.role != "assistant":
            raise InvalidArgument(
                f"chat.messages[{index}].content", f"required in a message of role {message.role!r}"
            )
    variables: dict[str, Any] = dict(body.chat_template_kwargs or {})
    if body.documents is not None:
        variables["documents"] = body.documents
    if body.reasoning_effort is not None:
        variables["reasoning_effort"] = body.reasoning_effort
    return inference_pb.Chat(
        messages=map(_message, body.messages),
        tools=map(_tool, body.tools or ()) if with_tools else (),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_arguments_json=json.dumps(variables) if variables else None,
    )


def _message(body: ChatMessageBody) -> inference_pb.ChatMessage:
    return inference_pb.ChatMessage(
        role="system" if body.role == "developer" else body.role,
        content=_text(body),
        name=body.name,
        tool_calls=[
            inference_pb.ToolCall(
                id=call.id, name=call.function.name, arguments_json=call.function.arguments
            )
            for call in body.tool_calls or ()
        ],
        tool_call_id=body.tool_call_id,
        reasoning_content=(
            body.reasoning if body.reasoning_content is None else body.reasoning_content
        ),
    )


def _text(body: ChatMessageBody) -> str:
    if isinstance(body.content, list):
        return PART_SEPARATOR.join(part.text for part in body.content)
    return body.content or ""


def _tool(body: ToolBody) -> inference_pb.Tool:
    parameters = body.function.parameters
    return inference_pb.Tool(
        name=body.function.name,
        description=body.function.description,
        parameters_json=None if parameters is None else json.dumps(parameters),
    )


def chat_request_of(fields: Mapping[str, Any]) -> ChatRequest:
    """A chat completion that another endpoint asks for. Raises RequestValidationError."""
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from None


def named_choice(name: str | None, tools: Iterable[str]) -> dict[str, Any]:
    """The `tool_choice` of one function, as another endpoint names it. Raises InvalidArgument."""
    names = sorted(tools)
    if name not in names:
        raise InvalidArgument("tool_choice.name", f"expected one of {names}, got {name!r}")
    return {"type": "function", "function": {"name": name}}


ChatBody = Annotated[ChatRequest, Depends(json_body(ChatRequest))]


def make_router(services: HttpServices) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/chat/completions",
        summary="Answer a conversation",
        responses=ERROR_RESPONSES | streamed_or_whole(ChatCompletion, ChatCompletionChunk),
        response_model=None,
        openapi_extra=describe_body(ChatRequest),
    )
    async def create(body: ChatBody, http_request: Request, caller: Caller) -> Response:
        """A conversation, by the model's chat template."""
        request_id = request_id_of(http_request, body)
        plan = find_plan(services, body, caller)
        return CompletionResponse(
            services,
            [await convert(http_request, lambda: generate_request(body, plan))],
            ChatResponseBuilder(body, request_id, plan),
            tenant=caller,
            request_id=request_id,
            stream=bool(body.stream),
            constraint_field="tools" if plan.json_schema else constraint_field(body),
        )

    return router


def find_plan(services: HttpServices, body: ChatRequest, tenant: Principal) -> ToolPlan:
    """How to treat the tools of a request, by the format of its model. Raises InvalidArgument."""

    def chat_format() -> ChatFormat:
        tokenizer = services.models.current(body.model, tenant).tokenizer
        template = tokenizer.tool_template_source if tokenizer is not None else None
        return find_format(template, template, lambda token: False)

    return plan_tools(body, chat_format)


def generate_request(body: ChatRequest, plan: ToolPlan) -> inference_pb.GenerateRequest:
    """The request that a gRPC client would send. Raises InvalidArgument."""
    request = make_request(body, chat_params(body, plan))
    request.chat.CopyFrom(chat_of(body, with_tools=plan.shows_tools))
    return request


def chat_params(body: ChatRequest, plan: ToolPlan) -> sampling_pb2.SamplingParams:
    """The sampling parameters. Raises InvalidArgument."""
    params = sampling_params(body)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None:
        params.max_tokens = max_tokens
    if body.logprobs:
        params.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidArgument("top_logprobs", "requires logprobs")
    if plan.json_schema is not None:
        kind = params.WhichOneof("structured_output")
        if kind is not None:
            raise InvalidArgument(
                "tool_choice",
                "requires that no other field constrains the output; leave out "
                "response_format, structured_outputs and the guided_ fields",
            )
        params.json_schema = plan.json_schema
    if plan.keeps_special_tokens and body.skip_special_tokens is None:
        params.skip_special_tokens = False
    return params
