"""Required tool calls, and how the answer to a conversation is read."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from pagewire.v1 import inference_service_pb2 as inference_pb
from pagewire.v1 import sampling_pb2
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.chat_formats.formats import ChatFormat
from scheduler_service.frontend.chat_formats.parser import FormatParser
from scheduler_service.frontend.structured_output.schemas import closed, moved

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerFormat:
    """How the text of a choice is read; by default all of it is content."""

    make_parser: Callable[[], FormatParser | None] = lambda: None
    kept_tokens: frozenset[str] = field(default_factory=frozenset)
    """Special tokens that the parser needs to see in the text."""
    include_reasoning: bool = True
    max_calls: int | None = None
    """Calls after these are dropped."""
    has_only_calls: bool = False
    """Whether the rest of the answer is calls, the last of which may be cut off anywhere."""
    thought: sampling_pb2.Thought | None = None
    """What precedes the text that a constraint applies to."""


def answer_format(
    request: inference_pb.GenerateRequest, prompt: str, found: ChatFormat
) -> AnswerFormat:
    """How the answers to a checked request are read, which follow the text of its prompt.

    `found` is the model's own format. Only answers to conversations are parsed.
    """
    if not request.HasField("chat"):
        return AnswerFormat()
    chat = request.chat
    functions = {tool.name: _parameters(tool) for tool in chat.tools}
    required = _required(chat)
    if not functions or required is not None:
        # The marks of calls then are text, if they are no special tokens.
        found = replace(found, calls=None)
    if chat.continue_final_message and found.reasoning is not None:
        # The answer has begun: only a thought that is open in its text goes on.
        found = replace(found, reasoning=replace(found.reasoning, starts_unmarked=False))
    thought = found.thought(prompt)

    return AnswerFormat(
        make_parser=lambda: found.parser(
            functions, prompt=prompt, continues=chat.continue_final_message, required=required
        ),
        kept_tokens=found.special_tokens,
        include_reasoning=chat.include_reasoning or not chat.HasField("include_reasoning"),
        max_calls=1 if _allows_one(chat) else None,
        has_only_calls=required is not None,
        thought=sampling_pb2.Thought(**thought._asdict()) if thought is not None else None,
    )


def check_tool_choice(request: inference_pb.GenerateRequest) -> None:
    """Raise InvalidArgument for a required call of a tool that there is not, or whose arguments
    cannot follow their schema because another field constrains the output."""
    chat = request.chat
    required = _required(chat)
    if required is None:
        return
    names = sorted(tool.name for tool in chat.tools)
    if not names:
        raise InvalidArgument("chat.tool_choice", "requires tools")
    if required and required not in names:
        raise InvalidArgument("chat.tool_choice.name", f"expected one of {names}, got {required!r}")
    if request.sampling_params.WhichOneof("structured_output") is not None:
        raise InvalidArgument(
            "chat.tool_choice",
            "requires that no other field constrains the output; leave out json_schema, regex, "
            "grammar and choice (over HTTP: response_format, structured_outputs and the guided_ "
            "fields)",
        )


def with_call_schema(request: inference_pb.GenerateRequest) -> inference_pb.GenerateRequest:
    """A checked request, with the schema of the call that it requires as its constraint.

    Raises InvalidArgument for a schema with too many levels, and for one that allows no object.
    """
    chat = request.chat
    required = _required(chat)
    if required is None:
        return request
    constrained = inference_pb.GenerateRequest()
    constrained.CopyFrom(request)
    try:
        tools = {
            tool.name: _arguments_schema(tool, f"chat.tools[{index}].parameters_json")
            for index, tool in enumerate(chat.tools)
            if required in ("", tool.name)
        }
        constrained.sampling_params.json_schema = (
            json.dumps(tools[required]) if required else _calls_schema(tools, one=_allows_one(chat))
        )
    except RecursionError:
        raise InvalidArgument("chat.tools", "expected schemas with fewer levels") from None
    return constrained


def constraint_field(request: inference_pb.GenerateRequest) -> str:
    """The field of the client's request that constrains its output."""
    if _required(request.chat) is not None:
        return "chat.tools"
    return f"sampling_params.{request.sampling_params.WhichOneof('structured_output')}"


_EXCLUDING = ("allowed_token_ids", "bad_words", "min_tokens")


def fields_that_exclude(request: inference_pb.GenerateRequest) -> list[str]:
    """The fields of the client's request that may exclude tokens, without the messages' names."""
    params = request.sampling_params
    names = [name for name in _EXCLUDING if getattr(params, name)]
    if _required(request.chat) is not None or params.HasField("structured_output"):
        names.insert(0, constraint_field(request).rpartition(".")[2])
        if params.stop_token_ids:  # allowed only where the output may end
            names.append("stop_token_ids")
    return names


def _required(chat: inference_pb.Chat) -> str | None:
    """The tool that must be called; empty for any of them, None if no call is required."""
    kind = chat.tool_choice.WhichOneof("choice")
    if kind == "name":
        return chat.tool_choice.name
    return "" if chat.tool_choice.required else None


def _allows_one(chat: inference_pb.Chat) -> bool:
    return chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls


def _parameters(tool: inference_pb.Tool) -> dict[str, Any] | None:
    return json.loads(tool.parameters_json) if tool.parameters_json else None


def _arguments_schema(tool: inference_pb.Tool, field: str) -> dict[str, Any]:
    """JSON schema of a call's arguments: an object, without properties if the tool names none.
    Raises InvalidArgument, for `field`, if the tool's own allows no object."""
    parameters = _parameters(tool)
    if not parameters:
        return _NO_PARAMETERS
    _check_object(parameters, field)
    is_open = tool.HasField("strict") and not tool.strict
    schema: dict[str, Any] = (moved if is_open else closed)(parameters)
    if not is_open and schema.keys() <= {"type", "title", "description"}:
        return _NO_PARAMETERS
    return {**schema, "type": "object"}


def _check_object(parameters: dict[str, Any], field: str) -> None:
    """Raise InvalidArgument if a schema says that its values are no objects."""
    kinds = parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise InvalidArgument(f"{field}.type", f"expected 'object', got {kinds!r}")
    values = [parameters["const"]] if "const" in parameters else parameters.get("enum")
    if isinstance(values, list) and not any(isinstance(value, dict) for value in values):
        key = "const" if "const" in parameters else "enum"
        raise InvalidArgument(f"{field}.{key}", "expected an object, as the arguments are one")


def _calls_schema(tools: dict[str, dict[str, Any]], *, one: bool) -> str:
    """JSON schema of a list of calls of these functions (parameters by name), at least one."""
    call_schemas = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": moved(parameters, f"/items/anyOf/{index}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, (name, parameters) in enumerate(tools.items())
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": call_schemas}}
    return json.dumps(schema | ({"maxItems": 1} if one else {}))
