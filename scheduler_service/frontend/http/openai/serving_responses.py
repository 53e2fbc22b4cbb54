"""`/v1/responses`, with text and function tools; no response is stored.

A call is converted to the equivalent chat completion, whose pieces become items.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import BeforeValidator, Field, create_model
from typing_extensions import TypedDict

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.errors import ERROR_RESPONSES
from scheduler_service.frontend.http.openai import parts, protocol, serving
from scheduler_service.frontend.http.openai.sampling import (
    MAX_UINT32,
    CacheSalt,
    JsonObject,
    ListOf,
    SamplingFields,
    Strict,
    Text,
    constraint_field,
    proto_range,
)
from scheduler_service.frontend.http.openai.serving_chat import generate_request
from scheduler_service.frontend.models import message_forms
from scheduler_service.frontend.models.message_forms import PART_SEPARATOR


class Part(Strict):
    """A part of a turn's content: text."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


Content = str | ListOf[Annotated[Part, BeforeValidator(protocol.refusal_as_text)]]


class Item(Strict):
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
    summary: ListOf[Part] | None = Field(None, description="Of a thought without content.")


class Tool(protocol.FunctionBody):
    """A function that the model may call."""

    type: Literal["function"]


class NamedTool(Strict):
    """The function that must be called."""

    type: Literal["function"]
    name: Text


class Format(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, description="Repeated in the response.")
    description: str | None = Field(None, description="Repeated in the response.")
    schema_: JsonObject | None = Field(None, alias="schema", description="Of `json_schema`.")
    strict: bool | None = Field(
        None, description="Whether objects are closed, unless false; always enforced."
    )


class TextOptions(Strict):
    """The form of the answer's text."""

    format: Format | None = None
    verbosity: str | None = Field(None, description="Repeated in the response.")


class Reasoning(Strict):
    """How the model thinks."""

    effort: protocol.ReasoningEffort | None = Field(
        None, description="The template's variable `reasoning_effort`."
    )


LOGPROBS = "message.output_text.logprobs"
"""The entry of `include` that asks for log probabilities."""

_SAMPLING = (
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
    *("logit_bias", "allowed_token_ids", "bad_words", "stop", "stop_token_ids", "min_tokens"),
    *("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "structured_outputs"),
    *("priority", "request_id"),
)
"""Fields of chat completions that vLLM's users send here, too."""

if TYPE_CHECKING:
    _SamplingFields = Strict
else:
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=Strict,
        **{
            name: (field.annotation, field)
            for name, field in SamplingFields.model_fields.items()
            if name in _SAMPLING
        },
    )


class ResponsesRequest(_SamplingFields):
    """A conversation to answer."""

    model: str | None = Field(None, description="May be absent when one model is served.")
    input: Text | Annotated[ListOf[Item], Field(min_length=1, max_length=protocol.MAX_MESSAGES)]
    instructions: str | None = Field(None, description="A system message before the input.")
    tools: ListOf[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_UINT32)
    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: Annotated[float, proto_range("top_p")] | None = None
    include: ListOf[str] | None = Field(
        None, description=f"`{LOGPROBS}`: log probabilities of the text. Others are ignored."
    )
    top_logprobs: Annotated[int, proto_range("logprobs")] | None = Field(
        None, description="Most probable tokens at each position of the text."
    )
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    stream: bool | None = None
    metadata: JsonObject | None = Field(None, description="Repeated in the response.")
    cache_salt: CacheSalt | None = None


class ResponsesUsage(TypedDict):
    """Counts of tokens."""

    input_tokens: int
    input_tokens_details: protocol.PromptTokensDetails
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
    top_logprobs: int
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, Any]
    truncation: Literal["disabled"]
    store: Literal[False]
    background: Literal[False]
    previous_response_id: None
    usage: ResponsesUsage | None


_SAME_IN_CHAT = (
    *("model", "temperature", "top_p", "stream", "parallel_tool_calls", "tool_choice"),
    *("cache_salt", "top_logprobs"),
    *_SAMPLING,
)


def chat_request(body: ResponsesRequest) -> protocol.ChatRequest:
    """The equivalent chat completion. Raises InvalidArgument."""
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
    else:
        for index, item in enumerate(body.input):
            _add_item(messages, item, f"input[{index}]")
    fields = {name: getattr(body, name) for name in _SAME_IN_CHAT}
    fields |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    fields["logprobs"] = LOGPROBS in (body.include or ())
    if body.top_logprobs and not fields["logprobs"]:
        raise InvalidArgument("top_logprobs", f"requires {LOGPROBS!r} in include")
    if body.tools:
        fields["tools"] = parts.chat_tools(body.tools)
    if isinstance(body.tool_choice, NamedTool):
        fields["tool_choice"] = parts.named_choice(body.tool_choice.name, body.tools or ())
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    return parts.chat_request_of(fields)


def _response_format(wanted: Format) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    if wanted.schema_ is None:
        raise InvalidArgument("text.format.schema", "required with the type json_schema")
    schema = {"schema": wanted.schema_, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": schema}


def _add_item(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Append an item as chat completions have it: calls and thoughts belong to a message of the
    assistant."""
    if item.type == "message":
        _add_message(
            messages,
            parts.required(item, "role", where),
            _content(parts.required(item, "content", where)),
        )
    elif item.type == "function_call_output":
        output, call_id = (parts.required(item, field, where) for field in ("output", "call_id"))
        messages.append({"role": "tool", "tool_call_id": call_id, "content": _content(output)})
    elif item.type == "reasoning":
        thought = _text(item.content or item.summary)
        if not thought:  # such as one that is encrypted
            return
        message = _assistant_message(messages, may_have_content=False)
        thoughts = [message.get("reasoning_content"), thought]
        message["reasoning_content"] = PART_SEPARATOR.join(filter(None, thoughts))
    else:
        names = ("name", "arguments", "call_id")
        name, arguments, call_id = (parts.required(item, field, where) for field in names)
        call = {"id": call_id, "function": {"name": name, "arguments": arguments}}
        message = _assistant_message(messages, may_have_content=True)
        message.setdefault("tool_calls", []).append(call)


def _add_message(messages: list[dict[str, Any]], role: str, content: message_forms.Content) -> None:
    """Append a turn, or a text to the turn of the thought or the call that it follows: the results
    of calls come next to them."""
    last = messages[-1] if messages else {"role": None}
    if role == "assistant" == last["role"] and (last["content"] is None or "tool_calls" in last):
        last["content"] = _both(last["content"], content)
    else:
        messages.append({"role": role, "content": content})


def _both(former: message_forms.Content | None, new: message_forms.Content) -> Any:
    """The content of a turn with more of it."""
    if not former:
        return new
    parts = [
        message_forms.text_parts(text) if isinstance(text, str) else text for text in (former, new)
    ]
    return [*parts[0], *parts[1]]


def _assistant_message(messages: list[dict[str, Any]], *, may_have_content: bool) -> dict[str, Any]:
    """The last message if it is the assistant's, or else a new one: thoughts precede what they lead
    to."""
    last = messages[-1] if messages else {"role": None}
    is_open = may_have_content or "tool_calls" in last or last.get("content") is None
    if last["role"] != "assistant" or not is_open:
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _content(content: Content) -> message_forms.Content:
    if isinstance(content, str):
        return content
    return message_forms.text_parts(*(part.text for part in content)) or ""


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return PART_SEPARATOR.join(part.text for part in content)


@dataclass(frozen=True, slots=True)
class _ItemForm:
    """What an item consists of."""

    type: str
    prefix: str
    """Begins its id."""
    fields: dict[str, Any]
    part: str = ""
    """The type of its part, which also names events, of an item with a text."""
    part_fields: dict[str, Any] = field(default_factory=dict)
    """The other fields of its part."""


_FORMS: dict[parts.Kind, _ItemForm] = {
    "text": _ItemForm(
        "message",
        "msg",
        {"role": "assistant", "content": []},
        "output_text",
        {"annotations": [], "logprobs": []},
    ),
    "reasoning": _ItemForm("reasoning", "rs", {"summary": [], "content": []}, "reasoning_text"),
    "call": _ItemForm("function_call", "fc", {"call_id": "", "name": "", "arguments": ""}),
}


class ResponsesBuilder(parts.PartsBuilder):
    """The answer as items."""

    def __init__(self, body: ResponsesRequest, chat: protocol.ChatRequest, request_id: str) -> None:
        super().__init__(chat, f"resp_{request_id}")
        self._body = body
        self._is_cut = False
        """Whether the output ended by its length."""
        self._num_events = 0
        self._logprobs: list[Any] = []
        """Of tokens whose text is to come."""

    def start(self) -> Iterator[dict[str, Any]]:
        """The response's start."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._answer("in_progress"))

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        """The whole response."""
        answer = self.answer()
        yield self._event(f"response.{answer['status']}", response=answer)

    def answer(self) -> ResponsesAnswer:
        """The whole response."""
        return self._answer("incomplete" if self._is_cut else "completed")

    def error_chunk(self, code: int, body: dict[str, Any]) -> dict[str, Any]:
        """An error as an event."""
        named = {name: body["error"][name] for name in ("code", "message", "param")}
        return self._event("error", **named)

    def _answer(self, status: Literal["in_progress", "completed", "incomplete"]) -> ResponsesAnswer:
        body, head = self._body, self.envelope.head
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
            "output": self.parts,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "max_output_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_logprobs": body.top_logprobs or 0,
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
        usage = self.envelope.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
            },
            "total_tokens": usage["total_tokens"],
        }

    # PartsBuilder.

    def record_tokens(self, delta: inference_pb.ChoiceDelta) -> None:
        """Keep the log probabilities of a text's tokens, which may come before the text."""
        is_of_call = delta.tool_calls and not delta.text
        if delta.reasoning_tokens or is_of_call:
            self._logprobs = []
        else:
            self._logprobs += serving.chat_logprobs(delta.logprobs, as_ids=False)["content"]

    def begin_part(
        self, kind: parts.Kind, call: inference_pb.ToolCallDelta | None
    ) -> Iterator[dict[str, Any]]:
        """Append an item, and its part if it has a text."""
        form = _FORMS[kind]
        name = f"{form.prefix}_{self.envelope.head['id']}_{len(self.parts)}"
        item = {"id": name, "type": form.type, **form.fields, "status": "in_progress"}
        if call is not None:
            item |= {"call_id": call.id, "name": call.name}
        self.parts.append(item)
        yield self._of_last("response.output_item.added", item=dict(item))
        if form.part:
            part = {"type": form.part, "text": "", **form.part_fields}
            item["content"] = [part | {"logprobs": []} if kind == "text" else part]
            yield self._item_event("response.content_part.added", content_index=0, part=dict(part))

    def grow_part(self, kind: parts.Kind, text: str) -> dict[str, Any]:
        """Append to the last item."""
        form, item = _FORMS[kind], self.parts[-1]
        if not form.part:
            item["arguments"] += text
            return self._item_event("response.function_call_arguments.delta", delta=text)
        [part] = item["content"]
        part["text"] += text
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "text":
            fields["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += fields["logprobs"]
        return self._item_event(f"response.{form.part}.delta", **fields)

    def end_part(self, kind: parts.Kind) -> Iterator[dict[str, Any]]:
        """Complete the last item."""
        if kind == "text" and self._logprobs:  # of tokens without text, such as the last one
            yield self.grow_part(kind, "")
        form, item = _FORMS[kind], self.parts[-1]
        item["status"] = "incomplete" if self._is_cut else "completed"
        if form.part:
            [part] = item["content"]
            text = {"content_index": 0, "text": part["text"]}
            text |= {"logprobs": part["logprobs"]} if kind == "text" else {}
            yield self._item_event(f"response.{form.part}.done", **text)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            named = {name: item[name] for name in ("name", "arguments")}
            yield self._item_event("response.function_call_arguments.done", **named)
        yield self._of_last("response.output_item.done", item=item)

    def record_end(self, delta: inference_pb.ChoiceDelta) -> None:
        """Record whether the output ends by its length."""
        self._is_cut = delta.finish_reason == inference_pb.FINISH_REASON_LENGTH

    def _item_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._of_last(kind, item_id=self.parts[-1]["id"], **fields)

    def _of_last(self, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, output_index=len(self.parts) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


router = APIRouter(tags=["OpenAI"])


@serving.generation_endpoint(
    router,
    "/v1/responses",
    ResponsesRequest,
    summary="Answer a conversation, given as items",
    answer=ERROR_RESPONSES
    | serving.describe_answer(
        ResponsesAnswer,
        "The response, or with `stream` its events",
        "Server-sent events, from `response.created` to `response.completed`.",
    ),
)
def answer_items(body: ResponsesRequest, call: serving.Call) -> serving.Generation:
    """A conversation, by the model's chat template."""
    chat = chat_request(body)
    builder = ResponsesBuilder(body, chat, call.request_id)
    constraint = "text.format" if chat.response_format else constraint_field(chat)
    return serving.Generation([generate_request(chat)], builder, constraint)
