"""Reads one call: from what names the function to the end of its arguments.

Arguments are passed on as they come. Once the function is known the call is one, whatever follows:
arguments that cannot go on are completed, and what is no part of them is left to be read as text.
"""

import json
import re

from scheduler_service.frontend.chat_formats.events import Functions, Part
from scheduler_service.frontend.chat_formats.schemas import parameter_types, typed_value
from scheduler_service.frontend.chat_formats.source import Reading, Source
from scheduler_service.frontend.chat_formats.syntax import JSON, CallFormat, Dialect
from scheduler_service.frontend.chat_formats.values import BrokenValue, ValueReader, converted

NAME_KEYS = ("name", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters")
OTHER_KEYS = ("id", "type", "function", "tool_call_id", "index")
"""Of an object that is a call; no object with further keys is one."""
MAX_HEAD_CHARS = 256
"""A head longer than this is none."""

_HALVES = re.compile("[\ud800-\udfff]")
"""Surrogates: an unpaired one cannot be sent as UTF-8."""


class _CutArguments(BrokenValue):
    """The text ends within the arguments; `rest` is the JSON that was not passed on."""


class CallReader:
    """Reads one call."""

    def __init__(
        self, source: Source, form: CallFormat, functions: Functions, parts: list[Part], number: int
    ) -> None:
        """`parts` gets those of the call, which is the message's call of this number."""
        self._source = source
        self._form = form
        self._functions = functions
        self._parts = parts
        self._number = number
        self._name: str | None = None
        """The function's, once it is known."""
        self._id = ""
        self._has_arguments = False
        self._early = ""
        """Arguments that came before the name."""
        self._depth = 0
        """Of the object that is the call."""
        self._collected: list[str] = []
        """JSON of a value in it that is not passed on."""

    def read(self, *, has_head: bool) -> Reading[bool]:
        """Read a call, which has a head or is an object whose brace was read; returns whether there
        is one.

        Text that is kept is no part of it and remains to be read.
        """
        source = self._source
        try:
            yield from self._read_headed() if has_head else self._read_object()
        except _CutArguments as cut:
            self._send(cut.rest or "")
            source.at = len(source.text)
            source.release()
            return True
        except BrokenValue:
            if self._name is None:
                return False
        if not self._has_arguments:
            self._send("{}")
        source.restore()
        return True

    def _start(self, name: str) -> None:
        """Report the start of the call, if there is such a function."""
        if name not in self._functions:
            raise BrokenValue
        self._name = name
        self._source.release()
        self._parts.append(Part("call", name, self._number, self._id))

    def _send(self, arguments: str) -> None:
        if arguments:
            self._has_arguments = True
            self._parts.append(Part("arguments", arguments, self._number))

    def _send_value(self, arguments: str) -> None:
        self._send(arguments)
        self._source.keep()

    def _read_value(self, dialect: Dialect) -> Reading[None]:
        """Arguments as one value. A mark that ends calls is part of them within a string, if the
        text after it agrees."""
        self._source.keep()
        value = ValueReader(self._source, dialect, self._send_value, self._form.all_closings)
        try:
            yield from value.read()
        except BrokenValue as broken:
            if broken.rest is not None and value.completion is None:
                raise _CutArguments(broken.rest) from None
            self._send(value.complete())
            raise
        self._source.release()

    # A head with the name, and then the arguments: one value, or one by one between tags.

    def _read_headed(self) -> Reading[None]:
        source, form = self._source, self._form
        found = yield from source.match(form.head, form.head_so_far, MAX_HEAD_CHARS)
        if found is None:
            raise BrokenValue
        self._id = found.groupdict().get("id") or ""
        self._start(found["name"])
        source.at = found.end()
        if form.parameters.opening:
            yield from self._read_parameters()
        elif source.char in ("{", "("):
            yield from self._read_value(form.dialect)

    def _read_parameters(self) -> Reading[None]:
        source, tags = self._source, self._form.parameters
        while True:
            source.keep()
            yield from source.skip_space()
            mark = yield from source.peek((tags.opening, *self._form.all_closings))
            if source.is_empty:
                raise _CutArguments("")
            if mark != tags.opening:
                break
            source.at += len(mark)
            found = yield from source.match(tags.key, "(?s:.*)", MAX_HEAD_CHARS)
            if found is None:
                break
            source.at = found.end()
            if not (yield from self._read_parameter(found["key"])):
                break
        self._send("}" if self._has_arguments else "")

    def _read_parameter(self, key: str) -> Reading[bool]:
        """Read a value up to its end, or the next parameter. Formats have no escapes: an end is
        part of the value if neither a parameter nor the end of calls follows it, and the value has
        a later end. One without any end stops at the first mark that ends calls; then returns
        False."""
        source, tags = self._source, self._form.parameters
        texts: list[str] = []
        doubtful: int | None = None
        """How many of them are before the end that counts if no certain one comes."""
        has_end = False
        """Whether that is the parameter's own."""
        while True:
            text, mark = source.split((tags.closing, tags.opening, *self._form.all_closings))
            texts.append(text)
            if mark == tags.closing:
                if not has_end:
                    doubtful, has_end = len(texts), True
                    source.keep()
                space = yield from source.skip_space()
                follows = yield from source.peek((tags.opening, *self._form.all_closings))
                if follows or source.is_empty:
                    source.at -= len(space)
                    break
                texts += [mark, space]
            elif mark == tags.opening or (mark and has_end):
                break
            elif mark:
                if doubtful is None:
                    doubtful = len(texts)
                    source.keep(source.at - len(mark))
                texts.append(mark)
            elif source.is_last:
                break
            else:
                yield
        if mark != tags.closing and doubtful is not None:
            self._send_parameter(key, texts[:doubtful])
            if has_end:
                source.restore()
            return has_end
        if not mark:
            text = "".join(texts).removeprefix(self._form.parameters.padding)
            raise _CutArguments(self._parameter(key, _json_text(text)[:-1]))
        source.at -= len(mark) if mark == tags.opening else 0
        self._send_parameter(key, texts)
        return True

    def _send_parameter(self, key: str, texts: list[str]) -> None:
        types = parameter_types(self._functions[self._name or ""], key)
        text, padding = "".join(texts), self._form.parameters.padding
        text = text.removeprefix(padding).removesuffix(padding)
        self._send(self._parameter(key, typed_value(text, types)))

    def _parameter(self, key: str, value: str) -> str:
        return f"{', ' if self._has_arguments else '{'}{_json_text(key)}: {value}"

    # A JSON object with the name and the arguments, which may come first, or be a text with JSON
    # in it.

    def _read_object(self) -> Reading[None]:
        """Read the members of an object, after its brace."""
        source, tokens = self._source, ValueReader(self._source, JSON, self._collected.append)
        self._depth += 1
        while True:
            if self._name is not None:
                source.keep()
            while (token := (yield from tokens.next())) == ",":
                pass
            if token == "}" and (self._depth > 1 or self._name is not None):
                break
            if token != '"':
                raise BrokenValue
            key = _decoded((yield from self._collect(tokens, token)))
            if not self._may_have(key) or (yield from tokens.next()) != ":":
                raise BrokenValue
            token = yield from tokens.next()
            if key == "function" and token == "{":
                yield from self._read_object()
            elif key in ARGUMENT_KEYS and self._name is not None and token in ("{", "["):
                source.at -= 1
                yield from self._read_value(JSON)
            else:
                self._receive(key, (yield from self._collect(tokens, token)))
        self._depth -= 1
        if self._depth == 0:
            source.release()

    def _collect(self, tokens: ValueReader, token: str) -> Reading[str]:
        """The JSON of the value that begins with a token."""
        yield from tokens.read(token)
        value = "".join(self._collected).strip()
        self._collected.clear()
        return value

    def _may_have(self, key: str) -> bool:
        if key in NAME_KEYS:
            return self._name is None
        if key in ARGUMENT_KEYS:
            return not self._has_arguments and not self._early
        return key in OTHER_KEYS

    def _receive(self, key: str, value: str) -> None:
        if key in NAME_KEYS:
            self._start(_decoded(value))
            self._send(self._early)
        elif key in ARGUMENT_KEYS and self._name is None:
            self._early = _unpacked(value)
        elif key in ARGUMENT_KEYS:
            self._send(_unpacked(value))
        elif key == "id":
            self._id = _decoded(value)


def _decoded(text: str) -> str:
    """The text of a JSON string, with U+FFFD for an unpaired surrogate; empty if it is not one."""
    return _HALVES.sub("\ufffd", json.loads(text)) if text.startswith('"') else ""


def _unpacked(value: str) -> str:
    """Arguments that are a string with JSON in it as that JSON."""
    inner = converted(_decoded(value), JSON)
    return value if inner is None else inner


def _json_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
