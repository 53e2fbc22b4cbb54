"""`/v1/responses`, with text and function tools; no response is stored.

A call is converted to the equivalent chat completion, whose pieces become items.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response
from typing_extensions import TypedDict

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.middleware import Caller, HttpServices
from scheduler_service.frontend.http.openai.protocol import (
    MAX_MESSAGES,
    ChatRequest,
    PromptTokensDetails,
)
from scheduler_service.frontend.http.openai.sampling import (
    MAX_UINT32,
    JsonList,
    JsonObject,
    ListOf,
    RequestBody,
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
from scheduler_service.frontend.input import message_forms
from scheduler_service.frontend.input.message_forms import PART_SEPARATOR


class Part(RequestBody):
    """A part of a turn's content: text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: JsonList | None = Field(None, description="Ignored.")
    logprobs: JsonList | None = Field(None, description="Ignored.")


Content = str | ListOf[Part]


class Item(RequestBody):
    """A turn, a call, the result of a call, or a thought. Items of an answer may be sent back."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = Field(
        None, description="Of a message."
    )
    content: Content | None = Field(None, description="Of a message, or a thought.")
    call_id: str | None = Field(None, description="Of a call, and of its result.")
    name: Text | None = Field(None, description="Of a call.")
    arguments: str | None = Field(None, description="Of a call, as JSON text.")
    output: Content | None = Field(None, description="Of a call's result.")
    id: str | None = Field(None, description="Ignored.")
    status: str | None = Field(None, description="Ignored.")
    phase: str | None = Field(None, description="Ignored.")
    summary: ListOf[Part] | None = Field(None, description="Of a thought without content.")
    encrypted_content: str | None = Field(None, description="Ignored.")


class Tool(RequestBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: Text
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedTool(RequestBody):
    """The function that must be called."""

    type: Literal["function"]
    name: Text


class Format(RequestBody):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="Of no effect.")
    description: str | None = Field(None, description="Of no effect.")
    schema_: JsonObject | None = Field(None, alias="schema", description="Of `json_schema`.")
    strict: bool | None = Field(
        None, description="Whether objects are closed, unless false; always enforced."
    )


class TextOptions(RequestBody):
    """The form of the answer's text."""

    format: Format | None = None
    verbosity: str | None = Field(None, description="Ignored.")


class Reasoning(RequestBody):
    """How the model thinks."""

    effort: str | None = Field(None, description="The template's variable `reasoning_effort`.")
    summary: str | None = Field(None, description="Ignored.")
    generate_summary: str | None = Field(None, description="Ignored.")


class StreamOptions(RequestBody):
    """Further contents of a stream."""

    include_obfuscation: bool | None = Field(None, description="Ignored: events are not padded.")


class ResponsesRequest(RequestBody):
    """A conversation to answer."""

    model: str | None = Field(None, description="May be absent when one model is served.")
    input: Text | Annotated[ListOf[Item], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = Field(None, description="A system message before the input.")
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_UINT32)
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: Annotated[float, proto_range("top_p")] | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: JsonObject | None = Field(None, description="Repeated in the response.")
    store: Literal[False] | None = Field(None, description="Responses are not stored.")
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    top_logprobs: Literal[0] | None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    include: ListOf[str] | None = Field(None, description="Ignored.")
    max_tool_calls: int | None = Field(None, description="Ignored: of tools of the server.")
    user: str | None = Field(None, description="Ignored.")
    safety_identifier: str | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    service_tier: str | None = Field(None, description="Ignored.")


class ResponsesUsage(TypedDict):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponsesAnswer(TypedDict):
    """The response, whole or so far."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, Any]
    truncation: Literal["disabled"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    usage: ResponsesUsage | None


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The equivalent chat completion. Raises InvalidArgument."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            _add_item(messages, item, f"input[{index}]")
    same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")
    fields = {name: getattr(body, name) for name in same}
    fields |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    if body.tools:
        fields["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"})}
            for tool in body.tools
        ]
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        fields["tool_choice"] = named_choice(choice.name, (tool.name for tool in body.tools or ()))
    else:
        fields["tool_choice"] = choice
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and (wanted := body.text.format) is not None:
        fields["response_format"] = {"type": wanted.type}
        if wanted.type == "json_schema":
            if wanted.schema_ is None:
                raise InvalidArgument("text.format.schema", "required with the type json_schema")
            fields["response_format"]["json_schema"] = {
                "schema": wanted.schema_,
                "strict": wanted.strict,
            }
    return chat_request_of(fields)


def _add_item(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Append an item as chat completions have it: calls and thoughts belong to a message of the
    assistant."""
    if item.type == "function_call_output":
        output = _content(_required(item, "output", where))
        call_id = _required(item, "call_id", where)
        messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
    elif item.type == "message":
        content, role = _content(_required(item, "content", where)), _required(item, "role", where)
        is_open = messages and messages[-1]["role"] == "assistant" == role
        if is_open and messages[-1]["content"] is None and "tool_calls" not in messages[-1]:
            messages[-1]["content"] = content  # after a thought
        else:
            messages.append({"role": role, "content": content})
    else:
        last = messages[-1] if messages else {"role": None}
        is_answered = item.type == "reasoning" and last.get("content") is not None
        if last["role"] != "assistant" or is_answered:  # thoughts precede what they lead to
            messages.append({"role": "assistant", "content": None})
        if item.type == "reasoning":
            thoughts = [messages[-1].get("reasoning_content"), _text(item.content or item.summary)]
            messages[-1]["reasoning_content"] = PART_SEPARATOR.join(filter(None, thoughts)) or None
            return
        name, arguments = (_required(item, field, where) for field in ("name", "arguments"))
        call = {"id": _required(item, "call_id", where)}
        call["function"] = {"name": name, "arguments": arguments}
        messages[-1].setdefault("tool_calls", []).append(call)


def _content(content: Content) -> message_forms.Content:
    if isinstance(content, str):
        return content
    return message_forms.text_parts(*(part.text for part in content)) or ""


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return PART_SEPARATOR.join(part.text for part in content)


def _required(item: Item, field: str, where: str) -> Any:
    value = getattr(item, field)
    if value is None:
        raise InvalidArgument(f"{where}.{field}", f"required in an item of type {item.type!r}")
    return value


@dataclass(frozen=True, slots=True)
class _TextItem:
    """What an item with a text consists of."""

    prefix: str
    """Begins its id."""
    part: str
    """The type of its part, which also names events."""
    fields: dict[str, Any]
    part_fields: dict[str, Any]
    event_fields: dict[str, Any]


_TEXT_ITEMS = {
    "message": _TextItem(
        "msg",
        "output_text",
        {"role": "assistant", "content": []},
        {"annotations": [], "logprobs": []},
        {"logprobs": []},
    ),
    "reasoning": _TextItem("rs", "reasoning_text", {"summary": [], "content": []}, {}, {}),
}


class ResponsesBuilder(ResponseBuilder):
    """The answer as items."""

    def __init__(self, body: ResponsesRequest, chat: ChatRequest, request_id: str) -> None:
        self._body = body
        self._envelope = Envelope(chat, f"resp_{request_id}")
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        """Whether the last item may grow."""
        self._is_cut = False
        """Whether the output ended by its length."""
        self._num_events = 0

    def chunks(
        self, index: int, response: inference_pb.GenerateResponse
    ) -> Iterator[dict[str, Any]]:
        """The response's start, then items that begin, grow and end."""
        self._envelope.take(index, response)
        if response.HasField("started"):
            for name in ("created", "in_progress"):
                yield self._event(f"response.{name}", response=self._answer("in_progress"))
        for delta in response.choices:
            yield from self._item_events(delta)
            if delta.finish_reason:
                self._is_cut = delta.finish_reason == inference_pb.FINISH_REASON_LENGTH
                yield from self._close_item()

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The whole response."""
        answer = self.whole()
        yield self._event(f"response.{answer['status']}", response=answer)

    def whole(self) -> ResponsesAnswer:
        """The whole response."""
        return self._answer("incomplete" if self._is_cut else "completed")

    def error_event(self, error: dict[str, Any]) -> dict[str, Any]:
        """An error in OpenAI's shape as a stream's last event."""
        named = {name: error[name] for name in ("code", "message", "param")}
        return self._event("error", **named)

    def _answer(self, status: Literal["in_progress", "completed", "incomplete"]) -> ResponsesAnswer:
        body, head = self._body, self._envelope.head
        text = {"format": {"type": "text"}}
        if body.text is not None:
            text |= body.text.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice or "auto"
        return {
            "id": head["id"],
            "object": "response",
            "created_at": head["created"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._is_cut else None,
            "instructions": body.instructions,
            "model": head["model"],
            "output": self._items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": choice.model_dump()
            if isinstance(choice, NamedTool)
            else choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": text,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "metadata": dict(body.metadata or {}),
            "truncation": "disabled",
            "store": False,
            "background": False,
            "previous_response_id": None,
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> ResponsesUsage:
        usage = self._envelope.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": usage["total_tokens"],
        }

    def _item_events(self, delta: inference_pb.ChoiceDelta) -> Iterator[dict[str, Any]]:
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.text)):
            if text:
                yield from self._grow(kind, text)
        for call in delta.tool_calls:
            if call.id:
                item = {"type": "function_call", "call_id": call.id, "name": call.name}
                yield from self._open_item("fc", item | {"arguments": ""})
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                yield self._item_event(
                    "response.function_call_arguments.delta", delta=call.arguments
                )

    def _grow(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        """Append to the last item, or to a new one if that is of another type."""
        of_kind = _TEXT_ITEMS[kind]
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._open_item(of_kind.prefix, {"type": kind, **of_kind.fields})
            self._items[-1]["content"] = [{"type": of_kind.part, "text": "", **of_kind.part_fields}]
            part = dict(self._items[-1]["content"][0])
            yield self._item_event("response.content_part.added", content_index=0, part=part)
        self._items[-1]["content"][0]["text"] += text
        yield self._item_event(
            f"response.{of_kind.part}.delta", content_index=0, delta=text, **of_kind.event_fields
        )

    def _open_item(self, prefix: str, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close_item()
        name = f"{prefix}_{self._envelope.head['id']}_{len(self._items)}"
        self._items.append({"id": name, **item, "status": "in_progress"})
        self._is_open = True
        added = dict(self._items[-1])
        yield self._of_last("response.output_item.added", item=added)

    def _close_item(self) -> Iterator[dict[str, Any]]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = "incomplete" if self._is_cut else "completed"
        if (of_kind := _TEXT_ITEMS.get(item["type"])) is not None:
            [part] = item["content"]
            text = {"content_index": 0, "text": part["text"], **of_kind.event_fields}
            yield self._item_event(f"response.{of_kind.part}.done", **text)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            yield self._item_event(
                "response.function_call_arguments.done",
                name=item["name"],
                arguments=item["arguments"],
            )
        yield self._of_last("response.output_item.done", item=item)

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_last(kind, item_id=self._items[-1]["id"], **fields)

    def _of_last(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


class _ResponsesResponse(TypedEventResponse):
    _form: ResponsesBuilder

    def error_data(self, code: int, body: dict[str, Any]) -> dict[str, Any]:
        return self._form.error_event(body["error"])


Body = Annotated[ResponsesRequest, Depends(json_body(ResponsesRequest))]


def make_router(services: HttpServices) -> APIRouter:
    """The endpoint."""
    router = APIRouter(tags=["OpenAI"])
    answer = describe_answer(
        ResponsesAnswer,
        "The response, or with `stream` its events",
        "Server-sent events, from `response.created` to `response.completed`.",
    )

    @router.post(
        "/v1/responses",
        summary="Answer a conversation, given as items",
        responses=ERROR_RESPONSES | answer,
        response_model=None,
        openapi_extra=describe_body(ResponsesRequest),
    )
    async def create(body: Body, http_request: Request, caller: Caller) -> Response:
        """A conversation, by the model's chat template."""
        chat = await convert(http_request, lambda: chat_request(body))
        request_id = request_id_of(http_request, chat)
        return _ResponsesResponse(
            services,
            [await convert(http_request, lambda: generate_request(chat))],
            ResponsesBuilder(body, chat, request_id),
            tenant=caller,
            request_id=request_id,
            stream=bool(body.stream),
            constraint_field="text.format",
        )

    return router
