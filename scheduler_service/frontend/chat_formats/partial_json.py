"""Reads one call written as a JSON object, character by character.

    {"name": "get_weather", "arguments": {"city": "Paris"}}

The arguments are passed on as they are written, without waiting for their end, once the name is
known. Until then everything is held back: an object that names none of the functions is not a call.
A parser of partial JSON would return values, not the text as the model wrote it.
"""

import json
import re
from collections.abc import Collection
from enum import Enum, auto

from scheduler_service.frontend.chat_formats.events import CallArguments, CallStart, Event

ARGUMENT_KEYS = ("arguments", "parameters")
SPACE = " \t\r\n"

_HALVES = re.compile("[\ud800-\udfff]")
"""Surrogates: an unpaired one cannot be sent as UTF-8."""


class JsonValue:
    """Finds the end of a JSON value, character by character."""

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._last = ""
        self._depth = 0
        self._in_string = False
        self._is_escaped = False

    @property
    def text(self) -> str:
        """All characters taken, without leading space."""
        return "".join(self._chars)

    @property
    def is_text(self) -> bool:
        """Whether it is a string."""
        return self._chars[:1] == ['"']

    @property
    def is_empty(self) -> bool:
        """Whether nothing but space was taken."""
        return not self._chars

    @property
    def is_closed(self) -> bool:
        """Whether an object, a list or a string has ended."""
        return self._depth == 0 and not self._in_string and self._last in ('"', "}", "]")

    def takes(self, char: str) -> bool:
        """Whether `char` belongs to the value; if so it is taken."""
        if self._in_string:
            self._take_in_string(char)
        elif char in SPACE:
            if not self._chars:
                return True
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 0:
                return False
            self._depth -= 1
        elif char == "," and self._depth == 0:
            return False
        self._chars.append(char)
        self._last = char if char not in SPACE else self._last
        return True

    def _take_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False


class _State(Enum):
    BEFORE = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    DONE = auto()
    INVALID = auto()


class JsonCall:
    """One call. `push` its characters until it `is_done` or `is_invalid`."""

    def __init__(self, names: Collection[str]) -> None:
        self._held: list[str] = []
        self._names = names
        self._state = _State.BEFORE
        self._key = JsonValue()
        self._value = JsonValue()
        self._arguments: JsonValue | None = None
        self._is_arguments = False
        """Whether the present key's value is the arguments."""
        self._num_sent = 0
        self._name: str | None = None

    @property
    def held(self) -> str:
        """All characters taken, until it is clear that they are a call."""
        return "".join(self._held)

    @property
    def is_done(self) -> bool:
        """Whether the object has ended, and was a call."""
        return self._state is _State.DONE

    @property
    def is_invalid(self) -> bool:
        """Whether it is not a call; `held` is then plain text."""
        return self._state is _State.INVALID

    @property
    def has_begun(self) -> bool:
        """Whether the start of a call has been reported."""
        return self._name is not None

    def read(self, text: str) -> tuple[list[Event], str]:
        """Take a text up to the call's end; returns the events in it, and the rest of the text."""
        events: list[Event] = []
        for place, char in enumerate(text, start=1):
            events += self.push(char)
            if self.is_done or self.is_invalid:
                return events, text[place:]
        return events, ""

    def push(self, char: str) -> list[Event]:
        """Take the next character."""
        if self._name is None:
            self._held.append(char)
        match self._state:
            case _State.BEFORE:
                self._expect(char, "{", _State.KEY)
            case _State.KEY:
                return self._push_key(char)
            case _State.COLON:
                self._expect(char, ":", _State.VALUE)
            case _State.VALUE:
                return self._push_value(char)
        return []

    def _expect(self, char: str, wanted: str, following: _State) -> None:
        if char == wanted:
            self._state = following
        elif char not in SPACE:
            self._state = _State.INVALID

    def _push_key(self, char: str) -> list[Event]:
        if self._key.is_empty:
            if char == "}":
                return self._end()
            if char in SPACE or char == ",":
                return []
            if char != '"':
                self._state = _State.INVALID
                return []
        self._key.takes(char)
        if self._key.is_closed:
            self._state = _State.COLON
            self._is_arguments = _parsed(self._key.text) in ARGUMENT_KEYS
        return []

    def _push_value(self, char: str) -> list[Event]:
        if self._value.takes(char):
            return self._stream(char)
        events = self._end_value()
        if char == "}" and self._state is not _State.INVALID:
            return events + self._end()
        return events

    def _end_value(self) -> list[Event]:
        """Handle the end of a key's value."""
        key, value = _parsed(self._key.text), self._value
        self._key, self._value, self._state = JsonValue(), JsonValue(), _State.KEY
        if self._is_arguments:
            self._arguments = value
            return self._send(value)
        if key != "name" or self._name is not None:
            return []
        name = _parsed(value.text)
        if name not in self._names:
            self._state = _State.INVALID
            return []
        self._name = name
        return [CallStart(name), *(self._send(self._arguments) if self._arguments else [])]

    def _stream(self, char: str) -> list[Event]:
        """Pass the arguments on as they come; those that are a string with JSON in it, at their
        end."""
        if not self._is_arguments or self._name is None:
            return []
        if self._value.is_empty or self._value.is_text:
            return []
        self._num_sent += 1
        return [CallArguments(char)]

    def _send(self, value: JsonValue) -> list[Event]:
        """The part of whole arguments that was not sent, once the name is known."""
        if self._name is None:
            return []
        text = (_parsed(value.text) or "{}") if value.is_text else value.text
        new = text[self._num_sent :]
        self._num_sent = len(text)
        return [CallArguments(new)] if new else []

    def _end(self) -> list[Event]:
        if self._name is None:
            self._state = _State.INVALID
            return []
        self._state = _State.DONE
        return [] if self._num_sent else [CallArguments("{}")]


def _parsed(text: str) -> str:
    """The text of a JSON string, with U+FFFD for an unpaired surrogate; empty if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return _HALVES.sub("\ufffd", value) if isinstance(value, str) else ""
