"""`/v1/chat/completions`: requests, and messages with reasoning and tool calls."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import Response

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
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
    NamedToolChoice,
    PromptFields,
    ToolBody,
    ToolCallDelta,
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


class AssistantMessage:
    """Joins the parts of one message."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[str, str, list[str]]] = []
        """Id, name, and pieces of the arguments."""

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a function."""
        return bool(self._calls)

    def add(self, delta: inference_pb.ChoiceDelta) -> None:
        """Append the new part."""
        self._texts.append(delta.text)
        self._reasoning.append(delta.reasoning)
        for call in delta.tool_calls:
            if call.index == len(self._calls):
                self._calls.append((call.id, call.name, []))
            self._calls[call.index][2].append(call.arguments)

    def body(self) -> AnswerMessage:
        """The whole message."""
        text = "".join(self._texts)
        message: AnswerMessage = {
            "role": "assistant",
            "content": text or (None if self._calls else ""),
            "refusal": None,
        }
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": "".join(arguments)},
                }
                for call_id, name, arguments in self._calls
            ]
        return message


def _pieces(delta: inference_pb.ChoiceDelta) -> Iterator[Delta]:
    """The parts of a message's new output, each for a chunk of its own: some clients read only one
    of the fields of a chunk."""
    if delta.reasoning:
        yield {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.text:
        yield {"content": delta.text}
    for call in delta.tool_calls:
        part: ToolCallDelta = {"index": call.index, "function": {"arguments": call.arguments}}
        if call.id:
            part |= {"id": call.id, "type": "function"}
            part["function"]["name"] = call.name
        yield {"tool_calls": [part]}


@dataclass(slots=True)
class _ChatChoice:
    message: AssistantMessage = field(default_factory=AssistantMessage)
    logprobs: list[inference_pb.TokenLogprobs] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    end: ChoiceFields = field(default_factory=ChoiceFields)


class ChatResponseBuilder(ResponseBuilder):
    """Answers to a conversation."""

    def __init__(self, request: ChatRequest, request_id: str) -> None:
        self._request = request
        self._envelope = Envelope(request, f"chatcmpl-{request_id}")
        self._choices = [_ChatChoice() for _ in range(request.n or 1)]
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
            choice.message.add(delta)
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
        self._choices[delta.index].message.add(delta)
        pieces = list(_pieces(delta))
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
        is_named = isinstance(self._request.tool_choice, NamedToolChoice)
        if reason == "stop" and self._choices[delta.index].message.has_calls and not is_named:
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
        content=body.content if isinstance(body.content, str) else "",
        content_parts=[
            inference_pb.ContentPart(text=part.text)
            for part in (body.content if isinstance(body.content, list) else ())
        ],
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


def _tool(body: ToolBody) -> inference_pb.Tool:
    parameters = body.function.parameters
    return inference_pb.Tool(
        name=body.function.name,
        description=body.function.description,
        parameters_json=None if parameters is None else json.dumps(parameters),
        strict=body.function.strict,
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
        return CompletionResponse(
            services,
            [await convert(http_request, lambda: generate_request(body))],
            ChatResponseBuilder(body, request_id),
            tenant=caller,
            request_id=request_id,
            stream=bool(body.stream),
            constraint_field=constraint_field(body),
        )

    return router


def generate_request(body: ChatRequest) -> inference_pb.GenerateRequest:
    """The request that a gRPC client would send. Raises InvalidArgument."""
    request = make_request(body, chat_params(body))
    chat, choice = request.chat, body.tool_choice
    chat.CopyFrom(chat_of(body, with_tools=choice != "none"))
    if isinstance(choice, NamedToolChoice):
        chat.tool_choice.name = choice.function.name
    elif choice == "required":
        chat.tool_choice.required = True
    for name in ("include_reasoning", "parallel_tool_calls"):
        if (value := getattr(body, name)) is not None:
            setattr(chat, name, value)
    return request


def chat_params(body: ChatRequest) -> sampling_pb2.SamplingParams:
    """The sampling parameters. Raises InvalidArgument."""
    params = sampling_params(body)
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens == 0:
        raise InvalidArgument("max_tokens", "expected at least 1, or -1 (as many as fit), got 0")
    if max_tokens is not None and max_tokens > 0:
        params.max_tokens = max_tokens
    if body.logprobs:
        params.logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise InvalidArgument("top_logprobs", "requires logprobs")
    return params
