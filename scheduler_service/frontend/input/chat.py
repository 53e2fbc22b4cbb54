"""Conversations: checked, and rendered to the text of a prompt."""

import json
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.chat_formats.values import completed_object
from scheduler_service.frontend.models.frontend_model import FrontendModel
from scheduler_service.frontend.models.message_forms import Content, features_of

logger = logging.getLogger(__name__)

MAX_JSON_CHARS = 1 << 20
"""Maximum size of one JSON text: it is parsed in one piece, with the interpreter's lock held."""
MAX_JSON_CONTAINERS = 1 << 18
"""Objects and arrays in all JSON texts of a conversation, counted by their opening brackets: the
garbage collector visits all of them in one piece."""

_STANDARD_VARIABLES = {"messages", "tools", "add_generation_prompt", "continue_final_message"}

_END = "\uffff"
"""Appended, with a space after it, to the text of a turn that the model continues, to find the
text's end in the rendered prompt: the template's own words may contain the same text. No character
has this code. If the space is missing there, the template strips its turns."""


def check_chat(chat: inference_pb.Chat) -> None:
    """Raise InvalidArgument unless each turn of a conversation has a role and its JSON texts are
    JSON objects, except for the arguments of calls. The conversation must be within the limits that
    the protos declare."""
    num_containers = sum(text.count("{") + text.count("[") for text in _json_texts(chat))
    if num_containers > MAX_JSON_CONTAINERS:
        raise InvalidArgument(
            "chat",
            f"expected JSON with at most {MAX_JSON_CONTAINERS} objects and arrays, "
            f"got {num_containers}",
        )
    for index, message in enumerate(chat.messages):
        path = f"chat.messages[{index}]"
        if not message.role:
            raise InvalidArgument(f"{path}.role", "expected a role")
        if message.content and message.content_parts:
            raise InvalidArgument(f"{path}.content_parts", "expected none beside content")
        for number, call in enumerate(message.tool_calls):
            _check_size(call.arguments_json, f"{path}.tool_calls[{number}].arguments_json")
    for index, tool in enumerate(chat.tools):
        if not tool.name:
            raise InvalidArgument(f"chat.tools[{index}].name", "expected a name")
        _parse_object(tool.parameters_json, f"chat.tools[{index}].parameters_json")
    variables = _parse_object(chat.template_arguments_json, "chat.template_arguments_json")
    for name in sorted(_STANDARD_VARIABLES & set(variables)):
        raise InvalidArgument(
            "chat.template_arguments_json", f"expected no {name!r}, which has a field of its own"
        )
    if chat.continue_final_message:
        _check_continued(chat)


def _json_texts(chat: inference_pb.Chat) -> Iterator[str]:
    """All JSON in a conversation."""
    yield chat.template_arguments_json
    yield from (tool.parameters_json for tool in chat.tools)
    yield from (call.arguments_json for message in chat.messages for call in message.tool_calls)


def chat_text(chat: inference_pb.Chat, model: FrontendModel) -> str:
    """A checked conversation as the model's chat template renders it, special tokens included.

    Raises UnsupportedByModel without tokenizer or template, InvalidArgument if the template refuses
    the conversation.
    """
    tokenizer = model.require_tokenizer("chat prompt")
    if chat.HasField("add_generation_prompt"):
        add_generation_prompt = chat.add_generation_prompt
    else:
        add_generation_prompt = not chat.continue_final_message
    messages = [_message(message) for message in chat.messages]
    tools = [_tool(tool) for tool in chat.tools] or None
    template = tokenizer.chat_template(with_tools=tools is not None)
    for feature in sorted(template.forms.drops & features_of(messages, tools)):
        _warn_about_drop(feature, model.info.name)
    if chat.continue_final_message:
        messages[-1]["content"] = _marked(messages[-1]["content"])
    text = template.render(
        messages,
        tools=tools,
        variables=_parse_object(chat.template_arguments_json, "chat.template_arguments_json"),
        add_generation_prompt=add_generation_prompt,
    )
    if chat.continue_final_message:
        text = _cut_at_end(text, _last_text(chat).strip())
    return text


@lru_cache(maxsize=1024)
def _warn_about_drop(feature: str, model: str) -> None:
    """Log once what a model's template drops."""
    logger.warning("the chat template does not show %s model=%s", feature, model)


def _message(message: inference_pb.ChatMessage) -> dict[str, Any]:
    """A turn as in OpenAI's API; absent fields stay absent, as templates test for them."""
    content: Content = message.content
    if message.content_parts:
        content = [{"type": "text", "text": part.text} for part in message.content_parts]
    turn: dict[str, Any] = {"role": message.role, "content": content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.HasField(name):
            turn[name] = getattr(message, name)
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: inference_pb.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": _arguments(call.arguments_json)}
    own_id = {"id": call.id} if call.id else {}
    return {**own_id, "type": "function", "function": function}


def _arguments(text: str) -> str:
    """The arguments of an earlier call, for the template, as the JSON of an object. A model may
    have written others, or have been cut off; refusing them would end the conversation, because
    they are sent again with each of its turns."""
    try:
        _parse_object(text, "")
    except InvalidArgument:
        return completed_object(text)
    return text or "{}"


def _tool(tool: inference_pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = _parse_object(tool.parameters_json, "chat.tools")
    return {"type": "function", "function": function}


def _check_size(text: str, path: str) -> None:
    if len(text) > MAX_JSON_CHARS:
        raise InvalidArgument(
            path, f"expected at most {MAX_JSON_CHARS} characters of JSON, got {len(text)}"
        )


def _parse_object(text: str, path: str) -> dict[str, Any]:
    """The JSON object in `text`; an empty text stands for an empty object."""
    _check_size(text, path)
    try:
        value = json.loads(text) if text else {}
        if "\\u" in text:  # templates write it out, and an unpaired surrogate cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgument(path, "contains an unpaired surrogate") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(path, f"expected JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(path, "expected a JSON object")
    return cast(dict[str, Any], value)


def _check_continued(chat: inference_pb.Chat) -> None:
    path = "chat.continue_final_message"
    if chat.add_generation_prompt:
        raise InvalidArgument(path, "expected to be absent with add_generation_prompt")
    if chat.messages[-1].role != "assistant" or not _last_text(chat).strip():
        raise InvalidArgument(path, "expected the last message to be an assistant's with a text")


def _last_text(chat: inference_pb.Chat) -> str:
    """The text that the model continues: the last part of the last turn."""
    last = chat.messages[-1]
    return last.content_parts[-1].text if last.content_parts else last.content


def _marked(content: Content) -> Content:
    """The content with its end marked."""
    if isinstance(content, str):
        return f"{content}{_END} "
    return [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{_END} "}]


def _cut_at_end(text: str, content: str) -> str:
    """The prompt up to the end of the last turn's text, which `_END` marks; without white space
    after it if the template strips turns."""
    head, _, tail = text.rpartition(_END)
    if not head.rstrip().endswith(content):
        raise InvalidArgument(
            "chat.continue_final_message", "the model's chat template changes the text of turns"
        )
    return head if tail.startswith(" ") else head.rstrip()
