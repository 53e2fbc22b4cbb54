"""Conversations: turns, tools and calls as in OpenAI's API, and the message built from them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypeAlias, TypedDict

from pagewire.v1 import inference_service_pb2 as pb


class FunctionCall(TypedDict):
    """A function and its arguments, as JSON text or as an object."""

    name: str
    arguments: str | Mapping[str, object]


class ToolCall(TypedDict):
    """A call that the model requested."""

    id: str
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
    """Ignored."""


class Tool(TypedDict):
    """A tool; functions are the only ones."""

    type: NotRequired[Literal["function"]]
    function: Function


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, object]
"""Of a mapping, as `{"type": "function", "function": {"name": "f"}}`, the function is called."""
Messages: TypeAlias = Sequence[ChatMessage] | Sequence[Mapping[str, object]]
Tools: TypeAlias = Sequence[Tool] | Sequence[Mapping[str, object]]


class ChatPrompt(TypedDict):
    """A conversation as a prompt, with what the model's chat template needs besides messages."""

    messages: Messages
    tools: NotRequired[Tools | None]
    """Functions that the model may request to call."""
    chat_template_kwargs: NotRequired[Mapping[str, object] | None]
    """Additional variables for the template."""
    add_generation_prompt: NotRequired[bool | None]
    """Whether the prompt ends with the beginning of the assistant's turn. None: unless
    `continue_final_message`."""
    continue_final_message: NotRequired[bool]
    """Whether to continue the last message, which must be an assistant's."""
    tool_choice: NotRequired[ToolChoice | None]
    """Whether the model must call a tool. None: it decides."""
    parallel_tool_calls: NotRequired[bool | None]
    """False: one call at most."""
    include_reasoning: NotRequired[bool]
    """Whether the answer contains the model's reasoning, which is generated in any case."""


def chat_proto(
    messages: Messages,
    tools: Tools | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    tool_choice: ToolChoice | None = None,
    parallel_tool_calls: bool | None = None,
    include_reasoning: bool = True,
) -> pb.Chat:
    """The message for a conversation. Raises ValueError that names the wrong part."""
    if isinstance(messages, str | bytes | Mapping):
        kind = type(messages).__name__
        raise ValueError(
            f'messages must be a list of {{"role": text, "content": text}}, not {kind}'
        )
    chat = pb.Chat(
        messages=[_message(f"messages[{i}]", each) for i, each in enumerate(messages)],
        tools=[_tool(f"tools[{i}]", each) for i, each in enumerate(tools or ())],
        add_generation_prompt=add_generation_prompt,
        parallel_tool_calls=parallel_tool_calls,
    )
    if tool_choice == "none":
        del chat.tools[:]
    elif tool_choice not in (None, "auto"):
        chat.tool_choice.CopyFrom(_tool_choice(tool_choice))
    if not include_reasoning:
        chat.include_reasoning = False
    if chat_template_kwargs:
        chat.template_arguments_json = _json("chat_template_kwargs", chat_template_kwargs)
    if continue_final_message:
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
            f"prompt must be Unicode text; position {error.start} holds an unpaired surrogate"
        ) from None
    return text


def _message(path: str, message: Any) -> pb.ChatMessage:
    values = _given(message)
    calls = values.pop("tool_calls", ())
    if (reasoning := values.pop("reasoning", None)) is not None:
        values.setdefault("reasoning_content", reasoning)
    content = values.setdefault("content", "" if calls else None)
    parts = values.pop("content") if isinstance(content, list | tuple) else ()
    names = {"role", "content", "name", "tool_call_id", "reasoning_content"}
    if (
        "role" not in values
        or content is None
        or not all(isinstance(value, str) for value in values.values())
        or not names >= set(values)
    ):
        raise ValueError(
            f'{path} must be {{"role": text, "content": text or parts}}, with or without "name", '
            '"tool_calls" (then content may be absent), "tool_call_id" and "reasoning_content"'
        )
    return pb.ChatMessage(
        **{name: encodable(value) for name, value in values.items()},
        content_parts=[_part(f"{path}.content[{i}]", part) for i, part in enumerate(parts)],
        tool_calls=[_call(f"{path}.tool_calls[{i}]", call) for i, call in enumerate(calls)],
    )


def _part(path: str, part: Any) -> pb.ContentPart:
    values = _given(part)
    if values.get("type") != "text" or not isinstance(values.get("text"), str):
        raise ValueError(f'{path} must be {{"type": "text", "text": text}}')
    return pb.ContentPart(text=encodable(values["text"]))


def _call(path: str, call: Any) -> pb.ToolCall:
    values = _given(call)
    function = _given(values.get("function"))
    arguments = function.get("arguments")
    if not (
        isinstance(values.get("id"), str)
        and isinstance(function.get("name"), str)
        and isinstance(arguments, str | Mapping)
    ):
        raise ValueError(
            f'{path} must be {{"id": text, "type": "function", "function": '
            '{"name": text, "arguments": JSON text or object}}'
        )
    if isinstance(arguments, Mapping):
        arguments = _json(f"{path}.function.arguments", arguments)
    return pb.ToolCall(id=values["id"], name=function["name"], arguments_json=arguments)


def _tool(path: str, tool: Any) -> pb.Tool:
    function = _given(_given(tool).get("function"))
    parameters = function.pop("parameters", None)
    function.pop("strict", None)
    if (
        "name" not in function
        or not {"name", "description"} >= set(function)
        or not all(isinstance(value, str) for value in function.values())
        or not isinstance(parameters, Mapping | None)
    ):
        raise ValueError(
            f'{path} must be {{"type": "function", "function": {{"name": text, "description": '
            'text, "parameters": JSON schema}}'
        )
    if parameters is not None:
        function["parameters_json"] = _json(f"{path}.function.parameters", parameters)
    return pb.Tool(**function)


def _given(value: Any) -> dict[str, Any]:
    """The entries of a mapping that are not None; none of anything else."""
    entries = value.items() if isinstance(value, Mapping) else ()
    return {name: each for name, each in entries if each is not None}


def _json(path: str, value: Mapping[str, object]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} must be a JSON object: {error}") from None
