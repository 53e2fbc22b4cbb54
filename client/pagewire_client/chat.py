"""Conversations: turns, tools and calls as in OpenAI's API, and the message built from them."""

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict, Unpack

from pagewire.v1 import inference_service_pb2 as pb


class FunctionCall(TypedDict):
    """A function and its arguments, as JSON text or as an object."""

    name: str
    arguments: str | Mapping[str, object]


class ToolCall(TypedDict):
    """A call that the model requested."""

    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionCall


class TextPart(TypedDict):
    """A part of a turn's content."""

    type: Literal["text"]
    text: str


class ChatMessage(TypedDict):
    """One turn of a conversation. Values of None are as if they were absent."""

    role: str
    content: NotRequired[str | Sequence[TextPart] | None]
    """A text, or parts. Required unless there are `tool_calls`."""
    name: NotRequired[str | None]
    """The speaker, for templates that distinguish speakers."""
    tool_calls: NotRequired[Sequence[ToolCall] | None]
    """The calls that an assistant's turn requested."""
    tool_call_id: NotRequired[str | None]
    """The call that a turn with a function's result answers."""
    reasoning_content: NotRequired[str | None]
    """The reasoning of an assistant's turn, for templates that include it."""
    reasoning: NotRequired[str | None]
    """The same by another name."""


class Function(TypedDict):
    """A function that the model may call."""

    name: str
    description: NotRequired[str | None]
    parameters: NotRequired[Mapping[str, object] | None]
    """JSON schema of its arguments."""
    strict: NotRequired[bool | None]
    """False: a required call may have arguments that the schema does not name."""


class Tool(TypedDict):
    """A tool; functions are the only ones."""

    type: NotRequired[Literal["function"]]
    function: Function


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, object]
"""Of a mapping, as `{"type": "function", "function": {"name": "f"}}`, the function is called."""
Messages: TypeAlias = Sequence[ChatMessage] | Sequence[Mapping[str, object]]
Tools: TypeAlias = Sequence[Tool] | Sequence[Mapping[str, object]]


class ChatOptions(TypedDict, total=False):
    """What a conversation may have besides its messages."""

    tools: Tools | None
    """Functions that the model may request to call."""
    chat_template_kwargs: Mapping[str, object] | None
    """Additional variables for the template."""
    add_generation_prompt: bool | None
    """Whether the prompt ends with the beginning of the assistant's turn. None: unless
    `continue_final_message`."""
    continue_final_message: bool
    """Whether to continue the last message, which must be an assistant's."""
    tool_choice: ToolChoice | None
    """Whether the model must call a tool. None: it decides."""
    parallel_tool_calls: bool | None
    """False: one call at most."""
    include_reasoning: bool
    """Whether the answer contains the model's reasoning, which is generated in any case. True if it
    is left out."""


class ChatPrompt(ChatOptions):
    """A conversation as a prompt."""

    messages: Messages


def chat_proto(messages: Messages, **options: Unpack[ChatOptions]) -> pb.Chat:
    """The message for a conversation. Raises ValueError that names the wrong part."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Iterable):
        kind = type(messages).__name__
        raise ValueError(
            f'messages must be a list of {{"role": text, "content": text}}, not {kind}'
        )
    if unknown := options.keys() - ChatOptions.__annotations__.keys():
        raise TypeError(f"unknown parts of a conversation: {', '.join(sorted(unknown))}")
    tools, tool_choice = options.get("tools") or (), options.get("tool_choice")
    chat = pb.Chat(
        messages=[_message(f"messages[{i}]", message) for i, message in enumerate(messages)],
        tools=[_tool(f"tools[{i}]", tool) for i, tool in enumerate(tools)],
        add_generation_prompt=options.get("add_generation_prompt"),
        parallel_tool_calls=options.get("parallel_tool_calls"),
    )
    if tool_choice == "none":
        del chat.tools[:]
    elif tool_choice not in (None, "auto"):
        chat.tool_choice.CopyFrom(_tool_choice(tool_choice))
    if not options.get("include_reasoning", True):
        chat.include_reasoning = False
    if variables := options.get("chat_template_kwargs"):
        chat.template_arguments_json = _json("chat_template_kwargs", variables)
    if options.get("continue_final_message"):
        chat.continue_final_message = True
    return chat


def _tool_choice(choice: Any) -> pb.ToolChoice:
    name = _given(_given(choice).get("function")).get("name")
    if choice != "required" and not isinstance(name, str):
        raise ValueError(
            'tool_choice must be "auto", "none", "required" or {"type": "function", "function": '
            f'{{"name": text}}}}; got {choice!r}'
        )
    return pb.ToolChoice(required=True) if name is None else pb.ToolChoice(name=name)


def encodable(text: str) -> str:
    """The text; raises ValueError for unpaired surrogates, such as undecodable input leaves."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"expected Unicode text; position {error.start} holds an unpaired surrogate"
        ) from None
    return text


_MESSAGE = (
    '{"role": text, "content": text or parts}, with or without "name", "tool_calls" (then content '
    'may be absent), "tool_call_id" and "reasoning_content"'
)
_PART = '{"type": "text", "text": text}'
_CALL = (
    '{"id": text, "type": "function", "function": {"name": text, "arguments": JSON text or object}}'
)
_TOOL = (
    '{"type": "function", "function": {"name": text, "description": text, "parameters": JSON '
    'schema, "strict": bool}}'
)


def _message(path: str, message: Any) -> pb.ChatMessage:
    values = _given(message)
    calls = values.pop("tool_calls", ())
    if (reasoning := values.pop("reasoning", None)) is not None:
        values.setdefault("reasoning_content", reasoning)
    content = values.setdefault("content", "" if calls else None)
    parts = content if isinstance(content, list | tuple) else ()
    if content is parts:
        values["content"] = ""
    optional = {"name", "tool_call_id", "reasoning_content"}
    return pb.ChatMessage(
        **_texts(path, _MESSAGE, values, {"role", "content"}, optional),
        content_parts=[_part(f"{path}.content[{i}]", part) for i, part in enumerate(parts)],
        tool_calls=[_call(f"{path}.tool_calls[{i}]", call) for i, call in enumerate(calls)],
    )


def _part(path: str, part: Any) -> pb.ContentPart:
    values = _given(part)
    text = values.get("text") if values.get("type") == "text" else None
    return pb.ContentPart(**_texts(path, _PART, {"text": text}, {"text"}))


def _call(path: str, call: Any) -> pb.ToolCall:
    values = _given(call)
    function = _given(values.get("function"))
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = _json(f"{path}.function.arguments", arguments)
    texts = {"name": function.get("name"), "arguments_json": arguments}
    required = texts.keys()
    own_id = {"id": values["id"]} if "id" in values else {}
    return pb.ToolCall(**_texts(path, _CALL, texts | own_id, required, {"id"}))


def _tool(path: str, tool: Any) -> pb.Tool:
    function = _given(_given(tool).get("function"))
    strict, parameters = function.pop("strict", None), function.pop("parameters", None)
    if not isinstance(strict, bool | None):
        raise ValueError(f"{path} must be {_TOOL}")
    texts = _texts(path, _TOOL, function, {"name"}, {"description"})
    if parameters is not None:
        texts["parameters_json"] = _json(f"{path}.function.parameters", parameters)
    return pb.Tool(**texts, strict=strict)


def _texts(
    path: str,
    form: str,
    values: Mapping[str, Any],
    required: Set[str],
    optional: Set[str] = frozenset(),
) -> dict[str, Any]:
    """Values that must be texts, of which none may be missing and there may be no others."""
    is_complete = required <= values.keys() <= required | optional
    if not (is_complete and all(isinstance(value, str) for value in values.values())):
        raise ValueError(f"{path} must be {form}")
    return {name: encodable(value) for name, value in values.items()}


def _given(value: Any) -> dict[str, Any]:
    """The entries of a mapping that are not None; none of anything else."""
    entries = value.items() if isinstance(value, Mapping) else ()
    return {name: entry for name, entry in entries if entry is not None}


def _json(path: str, value: object) -> str:
    try:
        if not isinstance(value, Mapping):
            raise TypeError(f"got {type(value).__name__}")
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must be a JSON object: {error}") from None
