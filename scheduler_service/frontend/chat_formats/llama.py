"""Calls as Llama 3 writes them: the whole answer is a JSON object, or several with `;` between."""

from collections.abc import Collection

from scheduler_service.frontend.chat_formats.events import Content, Event, partial_marker
from scheduler_service.frontend.chat_formats.partial_json import SPACE, JsonCall

PYTHON_TAG = "<|python_tag|>"
_BETWEEN = SPACE + ";,"


class LlamaParser:
    """See `MessageParser`."""

    in_reasoning = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._start = ""
        """The text, until it is clear whether it is a call."""
        self._is_content = False
        self._has_called = False
        self._call: JsonCall | None = None

    def push(self, text: str) -> list[Event]:
        """Calls, if the text begins with one; otherwise the text."""
        if self._is_content:
            return [Content(text)]
        if self._call is None:
            self._start += text
            return self._look()
        return self._read(text)

    def finish(self) -> list[Event]:
        """The text that was held back; an incomplete call stays incomplete."""
        if self._is_content or (self._call is not None and self._call.has_begun):
            return []
        rest = self._start + (self._call.held if self._call is not None else "")
        return [Content(rest)] if rest.strip() else []

    def _look(self) -> list[Event]:
        """Whether the text begins with a call."""
        if self._has_called:
            self._start = self._start.lstrip(_BETWEEN)
        begin = self._start.lstrip()
        if partial_marker(begin, PYTHON_TAG) == len(begin):
            return []
        rest = begin.removeprefix(PYTHON_TAG).lstrip(_BETWEEN)
        if not rest:
            return []
        if rest[0] != "{":
            self._is_content = True
            text, self._start = self._start, ""
            return [Content(text)]
        self._start = self._start[: len(self._start) - len(rest)]
        self._call = JsonCall(self._names)
        return self._read(rest)

    def _read(self, text: str) -> list[Event]:
        assert self._call is not None
        events, rest = self._call.read(text)
        if self._call.is_invalid:
            self._is_content = True
            return [*events, Content(self._start + self._call.held + rest)]
        if self._call.is_done:
            self._call, self._start, self._has_called = None, rest, True
            return events + self._look()
        return events
