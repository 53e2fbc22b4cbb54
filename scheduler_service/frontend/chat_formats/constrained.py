"""Required calls: the schema that the output follows, and its parsers."""

import json
from collections.abc import Collection, Sequence
from typing import Any

from scheduler_service.frontend.chat_formats.events import Part
from scheduler_service.frontend.chat_formats.parser import FormatParser
from scheduler_service.frontend.chat_formats.syntax import CallFormat
from scheduler_service.frontend.structured_output.schemas import moved

NO_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def required_schema(tools: Sequence[tuple[str, dict[str, Any]]], *, one: bool) -> str:
    """JSON schema of a list of calls of these functions (name, parameters), at least one."""
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
        for index, (name, parameters) in enumerate(tools)
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": call_schemas}}
    if one:
        schema["maxItems"] = 1
    return json.dumps(schema)


_CALLS = CallFormat(unmarked="[", has_objects=True)


class RequiredParser(FormatParser):
    """A list of calls of these functions; see `MessageParser`."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(None, _CALLS, dict.fromkeys(names))


class NamedParser:
    """The arguments of a call of one function; see `MessageParser`."""

    in_reasoning = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_started = False

    def push(self, text: str) -> list[Part]:
        """All text is arguments."""
        start = [] if self._has_started else [Part("call", self._name)]
        self._has_started = True
        return [*start, Part("arguments", text)]

    def finish(self) -> list[Part]:
        """Nothing is held back."""
        return []
