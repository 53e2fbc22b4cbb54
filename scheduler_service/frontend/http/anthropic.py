"""Anthropic's API: `/v1/messages` and `/v1/messages/count_tokens`, with text and tools.

A call is converted to the equivalent chat completion, whose pieces become Anthropic's blocks.
"""

import json
from collections.abc import Iterator
from hashlib import blake2b
from typing import Annotated, Any, Literal, NotRequired

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field
from pydantic_core import from_json
from typing_extensions import TypedDict

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.chat_formats.values import completed_object
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller, Services, Shape
from scheduler_service.frontend.http.openai import serving
from scheduler_service.frontend.http.openai.parts import (
    Kind,
    PartsBuilder,
    chat_request_of,
    chat_tools,
    named_choice,
    required,
)
from scheduler_service.frontend.http.openai.protocol import (
    MAX_MESSAGES,
    ChatRequest,
    FunctionBody,
    ReasoningEffort,
)
from scheduler_service.frontend.http.openai.sampling import (
    MAX_UINT32,
    STOP,
    CacheSalt,
    JsonObject,
    ListOf,
    StopText,
    Strict,
    Text,
    proto_range,
)
from scheduler_service.frontend.http.openai.serving_chat import (
    THINKING_SWITCHES,
    generate_request,
)
from scheduler_service.frontend.http.request_body import convert, describe_body, json_body
from scheduler_service.frontend.input import processor
from scheduler_service.frontend.models.message_forms import PART_SEPARATOR, Content, text_parts

ERROR_TYPES = {
    413: "request_too_large",
    501: "api_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Error types by HTTP code, where Anthropic's name differs from OpenAI's."""
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of the refusal of `thread`: Anthropic's tool runner then sends whole conversations."""


class Block(Strict):
    """A part of a turn: its text, a call, the result of a call, or a thought. Thoughts that another
    server has encrypted are ignored."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = Field(None, description="Of `text`.")
    id: str | None = Field(None, description="Of `tool_use`.")
    name: Text | None = Field(None, description="Of `tool_use`.")
    input: JsonObject | None = Field(None, description="Of `tool_use`.")
    tool_use_id: str | None = Field(None, description="Of `tool_result`.")
    content: "str | ListOf[Block] | None" = Field(None, description="Of `tool_result`.")
    thinking: str | None = Field(None, description="Of `thinking`.")


class Turn(Strict):
    """One turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | ListOf[Block]


class CustomTool(FunctionBody):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    parameters: JsonObject = Field(alias="input_schema")


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
    effort: ReasoningEffort | None = Field(
        None, description="The template's variable `reasoning_effort`."
    )


class Thinking(Strict):
    """Whether the model thinks, where its chat template has a switch for it; others decide
    themselves. With `disabled` the answer has no thoughts in any case."""

    type: Literal["disabled", "enabled", "adaptive"]
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted`: the answer has no thoughts. They are never summarized."
    )


class CountTokensRequest(Strict):
    """A conversation."""

    model: str | None = Field(None, description="May be absent when one model is served.")
    messages: Annotated[ListOf[Turn], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | ListOf[Block] | None = None
    tools: ListOf[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountTokensRequest):
    """A conversation to answer, or whose last answer is to be continued."""

    max_tokens: int = Field(ge=1, le=MAX_UINT32)
    stop_sequences: Annotated[ListOf[StopText], Field(max_length=STOP.max_items)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_k: int | None = Field(None, ge=0, le=MAX_UINT32)
    top_p: Annotated[float, proto_range("top_p")] | None = None
    cache_salt: CacheSalt | None = None


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
    details: dict[str, Any] | None = Field(None, description="Of a refused `thread`.")


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
    if begun and _is_blank(messages[-1], f"messages[{len(body.messages) - 1}].content"):
        messages.pop()
        begun = False
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
        same = ("max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt")
        fields |= {name: getattr(body, name) for name in same}
        fields["stop"] = body.stop_sequences
    return chat_request_of(fields)


def _tool_fields(body: CountTokensRequest) -> dict[str, Any]:
    fields: dict[str, Any] = {"tools": chat_tools(body.tools)} if body.tools else {}
    choice = body.tool_choice
    if choice is None:
        return fields
    fields["tool_choice"] = "required" if choice.type == "any" else choice.type
    if choice.type == "tool":
        fields["tool_choice"] = named_choice(choice.name, body.tools or ())
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _messages(turn: Turn, where: str) -> Iterator[dict[str, Any]]:
    """The turn as chat completions have it, where a result of a call is a turn of its own."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
        return
    parts: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for index, block in enumerate(turn.content):
        at = f"{where}[{index}]"
        if block.type == "redacted_thinking":
            continue
        writer = {"text": turn.role, "tool_result": "user"}.get(block.type, "assistant")
        if turn.role != writer:
            raise InvalidArgument(f"{at}.type", f"{block.type!r} requires the role {writer}")
        if block.type == "tool_result":
            content = _content(block.content, f"{at}.content")
            call_id = required(block, "tool_use_id", at)
            yield {"role": "tool", "tool_call_id": call_id, "content": content}
        elif block.type == "tool_use":
            name, call_id = required(block, "name", at), required(block, "id", at)
            function = {"name": name, "arguments": _json_text(block.input or {})}
            parts["tool_use"].append({"id": call_id, "function": function})
        else:
            parts[block.type].append(required(block, block.type, at))
    if parts["text"] or not any(block.type == "tool_result" for block in turn.content):
        yield {
            "role": turn.role,
            "content": text_parts(*parts["text"]) or "",
            "tool_calls": parts["tool_use"] or None,
            "reasoning_content": PART_SEPARATOR.join(parts["thinking"]) or None,
        }


def _is_blank(last: dict[str, Any], where: str) -> bool:
    """Whether the assistant's last turn, which only it may leave empty, has nothing to continue.

    Raises InvalidArgument for white space or a thought alone, which no answer continues.
    """
    parts = last["content"]
    text = parts if isinstance(parts, str) else parts[-1]["text"]
    if not text.strip() and (text or last.get("reasoning_content")):
        raise InvalidArgument(where, "expected to be empty, or to end with a text to continue")
    return not text


def _json_text(value: Any) -> str:
    """As templates write JSON, which may write this text as it is."""
    return json.dumps(value, ensure_ascii=False)


def _content(content: str | list[Block] | None, where: str) -> Content:
    """A text, or parts from blocks, which must all be text."""
    if content is None or isinstance(content, str):
        return content or ""
    for index, block in enumerate(content):
        if block.type != "text":
            raise InvalidArgument(f"{where}[{index}].type", f"expected 'text', got {block.type!r}")
    texts = (required(block, "text", f"{where}[{i}]") for i, block in enumerate(content))
    return text_parts(*texts) or ""


_TEXT_FIELDS: dict[Kind, Literal["thinking", "text"]] = {"reasoning": "thinking", "text": "text"}
"""The field of a block that contains its text, and the block's type."""


class MessagesBuilder(PartsBuilder):
    """The answer as Anthropic's clients expect it, in blocks."""

    keep_alive = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, chat: ChatRequest, request_id: str) -> None:
        super().__init__(chat, f"msg_{request_id}")
        self._stop_reason: StopReason | None = None
        self._stop_sequence: str | None = None
        self._arguments = ""
        """Those of the call in the last block, as JSON text."""

    def start(self) -> Iterator[dict[str, Any]]:
        """The message's start."""
        yield {"type": "message_start", "message": self.answer()}

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The message's end."""
        end = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield {"type": "message_delta", "delta": end, "usage": self._usage()}
        yield {"type": "message_stop"}

    def answer(self) -> MessagesAnswer:
        """The whole message."""
        return {
            "id": self.envelope.head["id"],
            "type": "message",
            "role": "assistant",
            "model": self.envelope.head["model"],
            "content": self.parts,
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def error_chunk(self, code: int, body: dict[str, Any]) -> dict[str, Any]:
        """An error as an event."""
        return error_of(code, body)

    def _usage(self) -> MessagesUsage:
        usage = self.envelope.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    # PartsBuilder.

    def begin_part(
        self, kind: Kind, call: inference_pb.ToolCallDelta | None
    ) -> Iterator[dict[str, Any]]:
        """Append a block."""
        block: AnswerBlock
        if call is not None:
            self._arguments = ""
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        elif kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "text", "text": ""}
        self.parts.append(block)
        yield self._event("content_block_start", content_block=dict(block))

    def grow_part(self, kind: Kind, text: str) -> dict[str, Any]:
        """Append to the last block."""
        if kind == "call":
            self._arguments += text
            return self._delta({"type": "input_json_delta", "partial_json": text})
        name = _TEXT_FIELDS[kind]
        self.parts[-1][name] += text
        return self._delta({"type": f"{name}_delta", name: text})

    def end_part(self, kind: Kind) -> Iterator[dict[str, Any]]:
        """Complete the last block."""
        block = self.parts[-1]
        if kind == "reasoning":
            block["signature"] = blake2b(block["thinking"].encode(), digest_size=16).hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        elif kind == "call":
            block["input"] = _input(self._arguments)
        yield self._event("content_block_stop")

    def record_end(self, delta: inference_pb.ChoiceDelta) -> None:
        """Record why the message ends."""
        if delta.finish_reason == inference_pb.FINISH_REASON_LENGTH:
            self._stop_reason = "max_tokens"
        elif delta.HasField("stop_string"):
            self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_string
        else:
            has_calls = any(block["type"] == "tool_use" for block in self.parts)
            self._stop_reason = "tool_use" if has_calls else "end_turn"

    def _delta(self, delta: dict[str, str]) -> dict[str, Any]:
        return self._event("content_block_delta", delta=delta)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the last block."""
        return {"type": kind, "index": len(self.parts) - 1, **fields}


def _input(arguments: str) -> dict[str, Any]:
    """The arguments of a call that was perhaps cut off by max_tokens, as far as they are complete,
    and not nested too deeply or of numbers too long to be read."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = from_json(completed_object(arguments))
    return value if isinstance(value, dict) else {}


def error_of(code: int, body: dict[str, Any]) -> dict[str, Any]:
    """Convert an error from OpenAI's shape to Anthropic's."""
    error = body["error"]
    kind = ERROR_TYPES.get(code, error["type"])
    details = {"details": NO_THREADS} if error["param"] == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": error["message"], **details}}


PATHS = ("/v1/messages", "/v1/messages/count_tokens")
ERROR_SHAPES: dict[str, Shape] = dict.fromkeys(PATHS, error_of)
"""By path, wherever its errors come from."""

router = APIRouter(tags=["Anthropic"])

_ERRORS = {code: row | {"model": MessagesError} for code, row in ERROR_RESPONSES.items()}


@serving.generation_endpoint(
    router,
    "/v1/messages",
    MessagesRequest,
    summary="Answer a conversation, by Anthropic's interface",
    answer=_ERRORS
    | serving.describe_answer(
        MessagesAnswer,
        "The answer, or with `stream` its events",
        "Server-sent events, from `message_start` to `message_stop`.",
    ),
)
def answer_messages(body: MessagesRequest, call: serving.Call) -> serving.Generation:
    """A conversation, by the model's chat template."""
    chat = chat_request(body)
    builder = MessagesBuilder(chat, call.request_id)
    return serving.Generation([generate_request(chat)], builder, "output_config.format")


Counted = Annotated[CountTokensRequest, Depends(json_body(CountTokensRequest))]


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation",
    responses=_ERRORS,
    response_model=InputTokens,
    openapi_extra=describe_body(CountTokensRequest),
)
async def count_tokens(
    body: Counted, http_request: Request, services: Services, caller: Caller
) -> dict[str, int]:
    """The tokens that `/v1/messages` would have as its prompt."""
    request = await convert(
        http_request,
        lambda: inference_pb.TokenizeRequest(chat=generate_request(chat_request(body)).chat),
    )
    answer = await processor.tokenize(request, services.models.current(body.model, caller))
    return {"input_tokens": len(answer.token_ids)}
