"""Calls as Mistral's models write them, in either of their ways.

[TOOL_CALLS][{"name": "f", "arguments": {…}}, …]
[TOOL_CALLS]f{…}[TOOL_CALLS]g[ARGS]{…}
"""

from collections.abc import Collection

from scheduler_service.frontend.chat_formats.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    partial_marker,
)
from scheduler_service.frontend.chat_formats.partial_json import JsonCall, JsonValue

MARKER = "[TOOL_CALLS]"
ARGS = "[ARGS]"
CALL_ID = "[CALL_ID]"


class MistralParser:
    """See `MessageParser`."""

    in_reasoning = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""
        self._read = self._read_content

    def push(self, text: str) -> list[Event]:
        """Text up to the marker, then calls."""
        self._text += text
        events: list[Event] = []
        while self._text and (found := self._read()) is not None:
            events += found
        return events

    def finish(self) -> list[Event]:
        """An incomplete marker is text; an incomplete call stays incomplete."""
        rest, self._text = self._text, ""
        if self._read == self._read_call and not self._call.has_begun:
            rest = self._call.held
        return [Content(rest)] if rest.strip() else []

    # Each takes a part of the text; None if more is needed to know what it is.

    def _read_content(self) -> list[Event] | None:
        before, marker, after = self._text.partition(MARKER)
        if marker:
            self._text, self._read = after, self._read_kind
            return [Content(before)] if before.strip() else []
        held = partial_marker(before, MARKER)
        shown, self._text = before[: len(before) - held], before[len(before) - held :]
        return [Content(shown)] if shown else None

    def _read_kind(self) -> list[Event] | None:
        self._text = self._text.lstrip()
        if not self._text:
            return None
        self._read = self._read_list if self._text[0] == "[" else self._read_name
        return []

    def _read_list(self) -> list[Event] | None:
        """Calls as JSON objects; what stands between them is the list's."""
        begin = self._text.find("{")
        if begin < 0:
            self._text = ""
            return None
        self._text = self._text[begin:]
        self._call = JsonCall(self._names)
        self._read = self._read_call
        return []

    def _read_call(self) -> list[Event] | None:
        events, self._text = self._call.read(self._text)
        if self._call.is_invalid:
            events.append(Content(self._call.held))
        if self._call.is_invalid or self._call.is_done:
            self._read = self._read_list
        return events

    def _read_name(self) -> list[Event] | None:
        begin = self._text.find("{")
        if begin < 0:
            return None
        name = self._text[:begin].partition(ARGS)[0].partition(CALL_ID)[0].strip()
        if name not in self._names:
            text, self._text, self._read = self._text, "", self._read_content
            return [Content(text)]
        self._text = self._text[begin:]
        self._value = JsonValue()
        self._read = self._read_arguments
        return [CallStart(name)]

    def _read_arguments(self) -> list[Event] | None:
        for place, char in enumerate(self._text):
            self._value.takes(char)
            if self._value.is_closed:
                arguments, self._text = self._text[: place + 1], self._text[place + 1 :]
                self._read = self._read_content
                return [CallArguments(arguments)]
        arguments, self._text = self._text, ""
        return [CallArguments(arguments)]
