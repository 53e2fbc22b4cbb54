"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`, with text and tools.

A call is converted to the equivalent chat completion, whose pieces become Anthropic's blocks.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from pydantic_core import from_json, to_json
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller, HttpServices
from scheduler_service.frontend.http.openai.protocol import MAX_MESSAGES, ChatRequest
from scheduler_service.frontend.http.openai.sampling import (
    MAX_UINT32,
    STOP,
    JsonObject,
    ListOf,
    RequestBody,
    StopText,
    Strict,
    Text,
    proto_range,
)
from scheduler_service.frontend.http.openai.serving import (
    Envelope,
    ResponseBuilder,
    TypedEventResponse,
    describe_answer,
    request_id_of,
)
from scheduler_service.frontend.http.openai.serving_chat import (
    chat_request_of,
    generate_request,
    named_choice,
)
from scheduler_service.frontend.http.request_body import convert, describe_body, json_body
from scheduler_service.frontend.input import processor
from scheduler_service.frontend.input.message_forms import PART_SEPARATOR, Content, text_parts

PATHS = ("/v1/messages", "/v1/messages/count_tokens")

ERROR_TYPES = {
    413: "request_too_large",
    501: "api_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by HTTP code, where Anthropic's name differs from OpenAI's."""


THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which chat templates switch thinking off or on, such as Qwen's and DeepSeek's."""


class Block(Strict):
    """A part of a turn: its text, a call, or the result of a call."""

    type: Literal["text", "tool_use", "tool_result", "thinking"]
    text: str | None = Field(None, description="Of `text`.")
    id: str | None = Field(None, description="Of `tool_use`.")
    name: str | None = Field(None, description="Of `tool_use`.")
    input: JsonObject | None = Field(None, description="Of `tool_use`.")
    tool_use_id: str | None = Field(None, description="Of `tool_result`.")
    content: "str | ListOf[Block] | None" = Field(None, description="Of `tool_result`.")
    is_error: bool | None = Field(None, description="Ignored: the content says it.")
    thinking: str | None = Field(None, description="Of `thinking`.")
    signature: str | None = Field(None, description="Ignored.")
    citations: None = None
    caller: JsonObject | None = Field(None, description="Ignored.")
    cache_control: JsonObject | None = Field(None, description="Ignored.")


class Turn(Strict):
    """One turn of the conversation."""

    role: Literal["user", "assistant"]
    content: str | ListOf[Block]


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: Text
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = None
    cache_control: JsonObject | None = Field(None, description="Ignored.")


class ToolChoice(Strict):
    """Whether a tool is called: `any` requires a call, `tool` one of the named tool."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Strict):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer."""

    format: OutputFormat | None = None
    effort: str | None = Field(None, description="The template's variable `reasoning_effort`.")


class Thinking(Strict):
    """Whether the model thinks, where its chat template has a switch for it; others decide
    themselves. With `disabled` the answer has no thoughts in any case."""

    type: Literal["disabled", "enabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, description="Ignored: thoughts count as output.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted`: the answer has no thoughts. They are never summarized."
    )


class CountTokensRequest(RequestBody):
    """A conversation."""

    model: str | None = Field(None, description="May be absent when one model is served.")
    messages: Annotated[ListOf[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | ListOf[Block] | None = None
    tools: ListOf[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    cache_control: JsonObject | None = Field(None, description="Ignored.")


class MessagesRequest(CountTokensRequest):
    """A conversation to answer, or whose last answer is to be continued."""

    max_tokens: int = Field(ge=1, le=MAX_UINT32)
    stop_sequences: Annotated[ListOf[StopText], Field(max_length=STOP.max_items)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_k: int | None = Field(None, ge=0, le=MAX_UINT32)
    top_p: Annotated[float, proto_range("top_p")] | None = None
    metadata: JsonObject | None = Field(None, description="Ignored.")
    service_tier: str | None = Field(None, description="Ignored.")


class AnswerBlock(TypedDict):
    """A part of the answer: a thought, text, or a call."""

    type: Literal["thinking", "text", "tool_use"]
    thinking: NotRequired[str]
    signature: NotRequired[Annotated[str, Field(description="Of no meaning here.")]]
    text: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessagesUsage(TypedDict):
    """Counts of tokens; those found in the prefix cache are not among `input_tokens`."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessagesAnswer(TypedDict):
    """The whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage


class InputTokens(BaseModel):
    """The length of a prompt."""

    input_tokens: int


class ErrorBody(BaseModel):
    """What went wrong."""

    type: str
    message: str


class MessagesError(BaseModel):
    """Every answer with a code of 400 or above."""

    type: Literal["error"]
    error: ErrorBody


def chat_request(body: CountTokensRequest) -> ChatRequest:
    """The equivalent chat completion. Raises InvalidArgument."""
    system = _content(body.system, "system")
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for index, turn in enumerate(body.messages):
        messages += _messages(turn, f"messages[{index}].content")
    begun = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    fields = {"model": body.model, "messages": messages, **_tool_fields(body)}
    fields["continue_final_message"] = begun or None  # as Anthropic's models do
    if body.thinking is not None:
        is_shown = body.thinking.type != "disabled"
        fields["chat_template_kwargs"] = dict.fromkeys(THINKING_SWITCHES, is_shown)
        fields["include_reasoning"] = is_shown and body.thinking.display != "omitted"
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
        if (wanted := body.output_config.format) is not None:
            schema = {"schema": wanted.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if isinstance(body, MessagesRequest):
        same = ("max_tokens", "stream", "temperature", "top_k", "top_p")
        fields |= {name: getattr(body, name) for name in same}
        fields["stop"] = body.stop_sequences
    return chat_request_of(fields)


def _tool_fields(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is None:
        return fields
    fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        fields["tool_choice"] = named_choice(choice.name, (tool.name for tool in body.tools or ()))
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _messages(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    """The turn as chat completions have it, where a result of a call is a turn of its own."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    parts: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    num_results = 0
    for index, block in enumerate(turn.content):
        at = f"{where}[{index}]"
        writer = {"text": turn.role, "tool_result": "user"}.get(block.type, "assistant")
        if turn.role != writer:
            raise InvalidArgument(f"{at}.type", f"{block.type!r} requires the role {writer}")
        if block.type == "tool_result":
            num_results += 1
            content = _content(block.content, f"{at}.content")
            call_id = _required(block, "tool_use_id", at)
            yield {"role": "tool", "tool_call_id": call_id, "content": content}
        elif block.type == "tool_use":
            name, call_id = _required(block, "name", at), _required(block, "id", at)
            function = {"name": name, "arguments": json.dumps(block.input or {})}
            parts["tool_use"].append({"id": call_id, "function": function})
        else:
            parts[block.type].append(_required(block, block.type, at))
    if parts["text"] or not num_results:
        yield {
            "role": turn.role,
            "content": text_parts(*parts["text"]) or "",
            "tool_calls": parts["tool_use"] or None,
            "reasoning_content": PART_SEPARATOR.join(parts["thinking"]) or None,
        }


def _content(content: str | list[Block] | None, where: str) -> Content:
    """A text, or parts from blocks, which must all be text."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, block in enumerate(content):
        if block.type != "text":
            raise InvalidArgument(f"{where}[{index}].type", f"expected 'text', got {block.type!r}")
    texts = (_required(block, "text", f"{where}[{i}]") for i, block in enumerate(content))
    return text_parts(*texts) or ""


def _required(block: Block, field: str, where: str) -> str:
    value = getattr(block, field)
    if not isinstance(value, str) or (not value and field == "name"):
        raise InvalidArgument(f"{where}.{field}", f"required in a block of type {block.type!r}")
    return value


class MessagesBuilder(ResponseBuilder):
    """The answer as Anthropic's clients expect it."""

    def __init__(self, chat: ChatRequest, request_id: str) -> None:
        self._envelope = Envelope(chat, f"msg_{request_id}")
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None
        self._blocks: list[AnswerBlock] = []
        self._is_open = False
        """Whether the last block may grow."""
        self._arguments = ""
        """Those of the call in the last block, as JSON text."""

    def chunks(
        self, index: int, response: inference_pb.GenerateResponse
    ) -> Iterator[dict[str, Any]]:
        """The message's start, then blocks that begin, grow and end."""
        self._envelope.take(index, response)
        if response.HasField("started"):
            yield {"type": "message_start", "message": self._answer()}
        for delta in response.choices:
            yield from self._block_events(delta)
            if delta.finish_reason:
                yield from self._close_block()
                self._note_end(delta)

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The message's end."""
        end = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def whole(self) -> MessagesAnswer:
        """The whole message."""
        return self._answer()

    def _answer(self) -> MessagesAnswer:
        return {
            "id": self._envelope.head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._envelope.head["model"],
            "content": self._blocks,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> MessagesUsage:
        usage = self._envelope.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def _note_end(self, delta: inference_pb.ChoiceDelta) -> None:
        if delta.finish_reason == inference_pb.FINISH_REASON_LENGTH:
            self._stop_reason = "max_tokens"
        elif delta.HasField("stop_string"):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_string
        else:
            has_calls = any(block["type"] == "tool_use" for block in self._blocks)
            self._stop_reason = "tool_use" if has_calls else "end_turn"

    def _block_events(self, delta: inference_pb.ChoiceDelta) -> Iterator[dict[str, Any]]:
        if delta.reasoning:
            yield from self._grow("thinking", delta.reasoning)
        if delta.text:
            yield from self._grow("text", delta.text)
        for call in delta.tool_calls:
            if call.id:
                self._arguments = ""
                yield from self._open_block(
                    {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
                )
            if call.arguments:
                self._arguments += call.arguments
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})

    def _grow(self, kind: Literal["thinking", "text"], text: str) -> Iterator[dict[str, Any]]:
        """Append to the last block, or to a new one if that is of another type."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            empty: AnswerBlock = {"type": "text", "text": ""}
            if kind == "thinking":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._open_block(empty)
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open_block(self, block: AnswerBlock) -> Iterator[dict[str, Any]]:
        yield from self._close_block()
        self._blocks.append(block)
        self._is_open = True
        yield self._event("content_block_start", content_block=dict(block))

    def _close_block(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "thinking":
            block["signature"] = blake2b(block["thinking"].encode(), digest_size=16).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        elif block["type"] == "tool_use":
            # A call that was cut off by max_tokens has the arguments that are complete.
            value = from_json(self._arguments or "{}", allow_partial=True)
            block["input"] = value if isinstance(value, dict) else {}
        yield self._event("content_block_stop")

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return self._event("content_block_delta", delta=delta)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the last block."""
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


def error_of(code: int, body: dict[str, Any]) -> dict[str, Any]:
    """Convert an error from OpenAI's shape to Anthropic's."""
    error = body["error"]
    kind = ERROR_TYPES.get(code, error["type"])
    return {"type": "error", "error": {"type": kind, "message": error["message"]}}


class AnthropicErrors:
    """Rewrites the errors of this API's paths, wherever they come from, in its own shape."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: Message | None = None
        body = b""

        async def send_rewritten(message: Message) -> None:
            nonlocal refused, body
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refused = message
            elif refused is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    status = refused["status"]
                    whole = to_json(error_of(status, json.loads(body)))
                    kept = [each for each in refused["headers"] if each[0] != b"content-length"]
                    length = (b"content-length", str(len(whole)).encode())
                    await send({**refused, "headers": [*kept, length]})
                    await send({"type": "http.response.body", "body": whole})

        is_ours = scope["type"] == "http" and scope["path"] in PATHS
        await self._app(scope, receive, send_rewritten if is_ours else send)


class _MessagesResponse(TypedEventResponse):
    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def error_data(self, code: int, body: dict[str, Any]) -> dict[str, Any]:
        return error_of(code, body)


Messages = Annotated[MessagesRequest, Depends(json_body(MessagesRequest))]
Counted = Annotated[CountTokensRequest, Depends(json_body(CountTokensRequest))]


def make_router(services: HttpServices) -> APIRouter:
    """Both endpoints."""
    router = APIRouter(tags=["Anthropic"])
    errors = {code: each | {"model": MessagesError} for code, each in ERROR_RESPONSES.items()}
    answer = describe_answer(
        MessagesAnswer,
        "The answer, or with `stream` its events",
        "Server-sent events, from `message_start` to `message_stop`.",
    )

    @router.post(
        "/v1/messages",
        summary="Answer a conversation, by Anthropic's interface",
        responses=errors | answer,
        response_model=None,
        openapi_extra=describe_body(MessagesRequest),
    )
    async def create(body: Messages, http_request: Request, caller: Caller) -> Response:
        """A conversation, by the model's chat template."""
        chat = await convert(http_request, lambda: chat_request(body))
        request_id = request_id_of(http_request, chat)
        return _MessagesResponse(
            services,
            [await convert(http_request, lambda: generate_request(chat))],
            MessagesBuilder(chat, request_id),
            tenant=caller,
            request_id=request_id,
            stream=bool(body.stream),
            constraint_field="output_config.format",
        )

    @router.post(
        "/v1/messages/count_tokens",
        summary="Count the tokens of a conversation",
        responses=errors,
        response_model=InputTokens,
        openapi_extra=describe_body(CountTokensRequest),
    )
    async def count_tokens(body: Counted, http_request: Request, caller: Caller) -> dict[str, int]:
        """The tokens that `/v1/messages` would have as its prompt."""
        chat = await convert(http_request, lambda: chat_request(body))
        request = await convert(
            http_request, lambda: inference_pb.TokenizeRequest(chat=generate_request(chat).chat)
        )
        answer = await processor.tokenize(request, services.models.current(body.model, caller))
        return {"input_tokens": len(answer.token_ids)}

    return router
