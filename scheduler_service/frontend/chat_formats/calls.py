"""Readers of one call: from what names the function to the end of its arguments.

Arguments are passed on as they come. Once the function is known the call is one, whatever follows:
arguments that cannot go on are completed, and what is no part of them is left to be read as text.
"""

import json
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

from scheduler_service.frontend.chat_formats.events import CallArguments, CallStart, Event
from scheduler_service.frontend.chat_formats.schemas import parameter_schemas, typed_value
from scheduler_service.frontend.chat_formats.source import Source, marks_of
from scheduler_service.frontend.chat_formats.syntax import JSON, CallFormat, Dialect
from scheduler_service.frontend.chat_formats.values import ValueReader

Functions = Mapping[str, Mapping[str, Any] | None]
"""The functions that may be called: the JSON schema of the parameters of each, by name."""

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type", "function", "tool_call_id", "index")
"""Of an object that is a call; no object with further keys is one."""
MAX_HEAD_CHARS = 256
"""A head longer than this is none."""

_HALVES = re.compile("[\ud800-\udfff]")
"""Surrogates: an unpaired one cannot be sent as UTF-8."""


class Step(Enum):
    """How reading went."""

    NEXT = auto()
    """It can go on."""
    WAIT = auto()
    """More text is needed."""
    END = auto()
    """The call is over."""
    NO_CALL = auto()
    """The text is no call."""


class CallReader:
    """Reads one call; a state is a method that reads a part."""

    def __init__(
        self, source: Source, form: CallFormat, functions: Functions, events: list[Event]
    ) -> None:
        self._source = source
        self._form = form
        self._functions = functions
        self._events = events
        self._name: str | None = None
        """The function's, once it is known."""
        self._has_arguments = False
        self._state: Callable[[], Step]

    def read(self) -> Step:
        """Read a part of the call."""
        return self._state()

    def _start(self, name: str, call_id: str | None) -> bool:
        """Report the start of the call, if there is such a function."""
        if name not in self._functions:
            return False
        self._name = name
        self._source.release()
        self._events.append(CallStart(name, call_id))
        return True

    def _send(self, arguments: str) -> None:
        if arguments:
            self._has_arguments = True
            self._events.append(CallArguments(arguments))

    def _end(self) -> Step:
        """The call is over; text that is kept is no part of it."""
        if not self._has_arguments:
            self._send("{}")
        self._source.restore()
        return Step.END

    def _cut(self, rest: str = "") -> Step:
        """The text ends within the arguments."""
        self._send(rest)
        self._source.at = len(self._source.text)
        self._source.release()
        return Step.END

    # Arguments as a value.

    def _begin_value(self, dialect: Dialect, following: Callable[[], Step]) -> None:
        self._value = ValueReader(dialect)
        self._following = following
        self._completion: str | None = None
        """What completes the arguments if the mark in them was the call's end."""
        self._source.keep()
        self._state = self._read_value

    def _read_value(self) -> Step:
        """Arguments, passed on as they come. A mark that ends calls is part of them within a
        string, if the text after it agrees."""
        source, value = self._source, self._value
        end, is_mark = len(source.text), False
        if self._completion is None:
            end, is_mark = self._find_end()
        source.at = value.read(source.text, source.at, end)
        if is_mark and source.at == end and not value.in_string and not value.has_failed:
            source.at = value.read(source.text, end, end + 1)
        if self._completion is None or value.is_done:
            self._send_value()
        if value.is_done:
            source.release()
            self._state = self._following
            return Step.NEXT
        if value.has_failed or (is_mark and source.at != end):
            return self._break_value()
        if is_mark:
            self._completion = value.completion()
            value.is_strict = True
            return Step.NEXT
        return self._cut_value() if source.is_last else Step.WAIT

    def _find_end(self) -> tuple[int, bool]:
        """How far the arguments can be read before a mark; whether the mark is complete."""
        source, marks = self._source, marks_of(self._form.all_closings)
        found = marks.search(source.text, source.at)
        end = len(source.text)
        end = end if source.is_last else marks.partial(source.text, source.at, end)
        return (found.start(), True) if found and found.start() <= end else (end, False)

    def _send_value(self) -> None:
        value = self._value
        self._send("".join(value.out))
        value.out.clear()
        if value.safe_end >= 0:
            self._source.keep(value.safe_end)
            value.safe_end = -1

    def _break_value(self) -> Step:
        """End arguments that cannot go on."""
        self._send(self._value.completion() if self._completion is None else self._completion)
        return self._end()

    def _cut_value(self) -> Step:
        rest = self._value.rest(self._source.text[self._source.at :])
        if rest is None or self._completion is not None:
            return self._break_value()
        return self._cut(rest)


class HeadedCall(CallReader):
    """A head with the name, and then the arguments: one value, or one by one between tags."""

    def __init__(
        self, source: Source, form: CallFormat, functions: Functions, events: list[Event]
    ) -> None:
        super().__init__(source, form, functions, events)
        self._state = self._read_head

    def _read_head(self) -> Step:
        source, form = self._source, self._form
        limit = source.at + MAX_HEAD_CHARS
        found = re.compile(form.head).match(source.text, source.at, limit)
        if found is None:
            so_far = re.compile(form.head_so_far or "(?s:.*)")
            is_over = source.is_last or len(source.text) >= limit
            is_over |= so_far.fullmatch(source.text, source.at, limit) is None
            return Step.NO_CALL if is_over else Step.WAIT
        if not self._start(found["name"], found.groupdict().get("id")):
            return Step.NO_CALL
        source.at = found.end()
        if form.parameters.opening:
            self._state = self._read_parameters
        elif source.char in ("{", "("):
            self._begin_value(form.dialect, self._end)
        else:
            return self._end()
        return Step.NEXT

    def _read_parameters(self) -> Step:
        """A parameter, or the end of the call."""
        source, opening = self._source, self._form.parameters.opening
        if not source.keeps_text:
            source.keep()
        source.skip_space()
        mark = source.peek((opening, *self._form.all_closings))
        if mark is None or (source.is_empty and source.is_last):
            return self._cut() if source.is_last else Step.WAIT
        if mark != opening:
            return self._end_parameters()
        source.at += len(mark)
        self._state = self._read_key
        return Step.NEXT

    def _end_parameters(self) -> Step:
        self._send("}" if self._has_arguments else "")
        return self._end()

    def _read_key(self) -> Step:
        source = self._source
        limit = source.at + MAX_HEAD_CHARS
        found = re.compile(self._form.parameters.key).match(source.text, source.at, limit)
        if found is None:
            is_over = source.is_last or len(source.text) >= limit
            return self._end_parameters() if is_over else Step.WAIT
        source.at = found.end()
        self._key = found["key"]
        self._texts: list[str] = []
        self._complete: list[str] | None = None
        """The value's texts, if the first mark in it was the call's end."""
        self._state = self._read_text
        return Step.NEXT

    def _read_text(self) -> Step:
        """A value up to its end. One that lacks its end ends where the call does."""
        source, tags = self._source, self._form.parameters
        before, mark = source.split((tags.closing, tags.opening, *self._form.all_closings))
        self._texts.append(before)
        if mark == tags.closing:
            self._source.release()
            self._send_parameter(self._texts)
        elif mark == tags.opening or (not mark and source.is_last):
            return self._end_text(mark)
        elif not mark:
            return Step.WAIT
        else:
            if self._complete is None:
                self._complete = [*self._texts]
                source.keep(source.at - len(mark))
            self._texts.append(mark)
        return Step.NEXT

    def _end_text(self, mark: str) -> Step:
        """End a value before another parameter, or at the end of the text."""
        if self._complete is not None:
            self._send_parameter(self._complete)
            return self._end_parameters()
        if not mark:
            text = "".join(self._texts).removeprefix("\n")
            return self._cut(self._parameter(_json_text(text)[:-1]))
        self._source.at -= len(mark)
        self._source.release()
        self._send_parameter(self._texts)
        return Step.NEXT

    def _send_parameter(self, texts: list[str]) -> None:
        schemas = parameter_schemas(self._functions[self._name or ""], self._key)
        self._send(self._parameter(typed_value("".join(texts), schemas)))
        self._state = self._read_parameters

    def _parameter(self, value: str) -> str:
        return f"{', ' if self._has_arguments else '{'}{_json_text(self._key)}: {value}"


class ObjectCall(CallReader):
    """A JSON object with the name and the arguments, which may come first, or be a text with JSON
    in it."""

    def __init__(
        self, source: Source, form: CallFormat, functions: Functions, events: list[Event]
    ) -> None:
        super().__init__(source, form, functions, events)
        self._depth = 0
        self._key = ""
        self._id: str | None = None
        self._early = ""
        """Arguments that came before the name."""
        self._state = self._open

    def _open(self) -> Step:
        self._source.at += 1
        self._depth += 1
        self._state = self._begin_member
        return Step.NEXT

    def _begin_member(self) -> Step:
        if self._name is not None:
            self._source.keep()
        self._state = self._read_member
        return Step.NEXT

    def _read_member(self) -> Step:
        """A key, or the end of the object."""
        char = self._next_char(",")
        if char == '"':
            self._collect(self._end_key)
        elif char == "}" and (self._depth > 1 or self._name is not None):
            self._source.at += 1
            self._depth -= 1
            if self._depth == 0:
                self._source.release()
                return self._end()
        else:
            return self._fail() if char or self._source.is_last else Step.WAIT
        return Step.NEXT

    def _next_char(self, skipped: str = "") -> str:
        source = self._source
        while source.char and source.char in " \t\r\n" + skipped:
            source.at += 1
        return source.char

    def _collect(self, receive: Callable[[str], Step]) -> None:
        self._value = ValueReader(JSON)
        self._receive = receive
        self._state = self._read_collected

    def _read_collected(self) -> Step:
        source, value = self._source, self._value
        source.at = value.read(source.text, source.at, len(source.text))
        if value.is_done:
            return self._receive("".join(value.out))
        return self._fail() if value.has_failed or source.is_last else Step.WAIT

    def _end_key(self, key: str) -> Step:
        self._key = _decoded(key)
        is_new = self._key in OTHER_KEYS
        is_new |= self._key in NAME_KEYS and self._name is None
        is_new |= self._key in ARGUMENT_KEYS and not self._has_arguments and not self._early
        self._state = self._read_colon
        return Step.NEXT if is_new else self._fail()

    def _read_colon(self) -> Step:
        char = self._next_char()
        if char != ":":
            return self._fail() if char or self._source.is_last else Step.WAIT
        self._source.at += 1
        self._state = self._read_member_value
        return Step.NEXT

    def _read_member_value(self) -> Step:
        char = self._next_char()
        if not char:
            return self._fail() if self._source.is_last else Step.WAIT
        if self._key == "function" and char == "{":
            return self._open()
        if self._key in ARGUMENT_KEYS and self._name is not None and char in "{[":
            self._begin_value(JSON, self._begin_member)
        else:
            self._collect(self._end_member)
        return Step.NEXT

    def _end_member(self, value: str) -> Step:
        self._state = self._begin_member
        if self._key in NAME_KEYS:
            if not self._start(_decoded(value), self._id):
                return Step.NO_CALL
            self._send(self._early)
        elif self._key in ARGUMENT_KEYS and self._name is None:
            self._early = _unpacked(value)
        elif self._key in ARGUMENT_KEYS:
            self._send(_unpacked(value))
        elif self._key == "id":
            self._id = _decoded(value) or None
        return Step.NEXT

    def _fail(self) -> Step:
        return Step.NO_CALL if self._name is None else self._end()


def _decoded(text: str) -> str:
    """The text of a JSON string, with U+FFFD for an unpaired surrogate; empty if it is not one."""
    return _HALVES.sub("\ufffd", json.loads(text)) if text.startswith('"') else ""


def _unpacked(value: str) -> str:
    """Arguments that are a string with JSON in it as that JSON."""
    text = _decoded(value)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return value
    return text


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
