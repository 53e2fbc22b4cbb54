"""A request's prompt as token ids: given, tokenized, or rendered from a chat."""

import json
from typing import Any, cast

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.served_models import FrontendModel

_END = "\uffff"
"""Put behind the text of a turn that is to be continued, to find its end in what a template makes
of it: the text may stand in the template's own words behind it, too. No character has this code."""


def check_chat(chat: inference_pb.Chat) -> None:
    """Raise InvalidArgument unless the conversation has turns, each with a role, and all JSON in it
    is some."""
    if not chat.messages:
        raise InvalidArgument("chat.messages", "expected at least one message")
    for index, message in enumerate(chat.messages):
        path = f"chat.messages[{index}]"
        if not message.role:
            raise InvalidArgument(f"{path}.role", "expected a role")
        for number, call in enumerate(message.tool_calls):
            _parse_object(call.arguments_json, f"{path}.tool_calls[{number}].arguments_json")
    for index, tool in enumerate(chat.tools):
        if not tool.name:
            raise InvalidArgument(f"chat.tools[{index}].name", "expected a name")
        _parse_object(tool.parameters_json, f"chat.tools[{index}].parameters_json")
    _parse_object(chat.template_arguments_json, "chat.template_arguments_json")
    if chat.continue_final_message:
        _check_continued(chat)


def chat_tokens(chat: inference_pb.Chat, model: FrontendModel) -> list[int]:
    """A checked conversation as token ids.

    Raises UnsupportedByModel without tokenizer or template, InvalidArgument if the template refuses
    the conversation.
    """
    tokenizer = model.require_tokenizer("chat prompt")
    if chat.HasField("add_generation_prompt"):
        add_generation_prompt = chat.add_generation_prompt
    else:
        add_generation_prompt = not chat.continue_final_message
    messages = [_message(message) for message in chat.messages]
    if chat.continue_final_message:
        messages[-1]["content"] = messages[-1]["content"].rstrip() + _END
    text = tokenizer.render_chat(
        messages,
        tools=[_tool(tool) for tool in chat.tools] or None,
        variables=_parse_object(chat.template_arguments_json, "chat.template_arguments_json"),
        add_generation_prompt=add_generation_prompt,
    )
    if chat.continue_final_message:
        text = _cut_at_end(text, chat.messages[-1].content.strip())
    return tokenizer.encode(text, add_special_tokens=False)


def _message(message: inference_pb.ChatMessage) -> dict[str, Any]:
    """What is absent stays so: templates ask whether a key is there."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.HasField(name):
            turn[name] = getattr(message, name)
    if message.tool_calls:
        turn["tool_calls"] = [_call(call) for call in message.tool_calls]
    return turn


def _call(call: inference_pb.ToolCall) -> dict[str, Any]:
    arguments = _parse_object(call.arguments_json, "chat.messages")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _tool(tool: inference_pb.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters_json"):
        function["parameters"] = _parse_object(tool.parameters_json, "chat.tools")
    return {"type": "function", "function": function}


def _parse_object(text: str, path: str) -> dict[str, Any]:
    """The object that `text` tells; an empty text is an empty one."""
    try:
        value = json.loads(text) if text else {}
        if "\\u" in text:  # templates write it out, and half a character is no text
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgument(path, "expected no half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(path, f"expected JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidArgument(path, "expected a JSON object")
    return cast(dict[str, Any], value)


def _check_continued(chat: inference_pb.Chat) -> None:
    path = "chat.continue_final_message"
    if chat.add_generation_prompt:
        raise InvalidArgument(path, "expected to be absent with add_generation_prompt")
    last = chat.messages[-1]
    if last.role != "assistant" or not last.content.strip():
        raise InvalidArgument(path, "expected the last message to be an assistant's with a text")


def _cut_at_end(text: str, content: str) -> str:
    """The prompt up to the end of the last turn's text, which is marked."""
    text, _, _ = text.rpartition(_END)
    if not text.endswith(content):
        raise InvalidArgument(
            "chat.continue_final_message", "the model's chat template changes the text of turns"
        )
    return text


def prompt_tokens(request: inference_pb.GenerateRequest, model: FrontendModel) -> list[int]:
    """The tokens that the model is given. Tokenizing takes a while for long texts; call it off the
    loop."""
    tokens = _whole_prompt(request, model)
    params = request.sampling_params
    if not params.HasField("truncate_prompt_tokens"):
        return tokens
    return tokens[-(params.truncate_prompt_tokens or _fitting(params, model)) :]


def _whole_prompt(request: inference_pb.GenerateRequest, model: FrontendModel) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return list(request.token_ids.ids)
    if kind == "text":
        adds = not request.HasField("add_special_tokens") or request.add_special_tokens
        tokenizer = model.require_tokenizer("text prompt")
        tokens = tokenizer.encode(request.text, add_special_tokens=adds)
    else:
        tokens = chat_tokens(request.chat, model)
    if not tokens:
        field = "text" if kind == "text" else "chat.messages"
        raise InvalidArgument(field, "expected a prompt of at least one token; this one has none")
    return tokens


def _fitting(params: sampling_pb2.SamplingParams, model: FrontendModel) -> int:
    """Most prompt tokens beside which the output has the room that it asks for."""
    max_model_len = model.info.max_model_len
    num_output = params.max_tokens if params.HasField("max_tokens") else 1
    if num_output >= max_model_len:
        raise InvalidArgument(
            "sampling_params.max_tokens",
            f"expected to leave room for a prompt within {max_model_len} tokens",
        )
    return max_model_len - num_output
