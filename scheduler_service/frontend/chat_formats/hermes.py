"""Calls as Hermes and Qwen write them: one JSON object between two tags each."""

from collections.abc import Collection

from scheduler_service.frontend.chat_formats.events import Content, Event, partial_marker
from scheduler_service.frontend.chat_formats.partial_json import JsonCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser:
    """See `MessageParser`."""

    in_reasoning = False

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._text = ""
        self._call: JsonCall | None = None

    def push(self, text: str) -> list[Event]:
        """Text up to a tag, and calls."""
        self._text += text
        events: list[Event] = []
        while self._text and (found := self._step()) is not None:
            events += found
        return events

    def finish(self) -> list[Event]:
        """An incomplete tag is text; an incomplete call stays incomplete."""
        rest, call = self._text, self._call
        self._text, self._call = "", None
        if call is not None and not call.has_begun:
            return [Content(OPEN + call.held + rest)]
        return _content(rest) if call is None else []

    def _step(self) -> list[Event] | None:
        """Take a part of the text; None if more is needed to know what it is."""
        if self._call is None:
            return self._find_open()
        if self._call.is_done:
            return self._find_close()
        events, self._text = self._call.read(self._text)
        if self._call.is_invalid:
            events.append(Content(OPEN + self._call.held))
            self._call = None
        return events

    def _find_open(self) -> list[Event] | None:
        before, tag, after = self._text.partition(OPEN)
        if tag:
            self._text, self._call = after, JsonCall(self._names)
            return _content(before.rstrip())
        # Space before a tag, and between calls, is not content.
        held = partial_marker(before, OPEN)
        shown = before[: len(before) - held].rstrip()
        self._text = before[len(shown) :]
        return _content(shown) or None

    def _find_close(self) -> list[Event] | None:
        _, tag, after = self._text.partition(CLOSE)
        if tag:
            self._text, self._call = after.lstrip(), None
            return []
        self._text = self._text[len(self._text) - partial_marker(self._text, CLOSE) :]
        return None


def _content(text: str) -> list[Event]:
    return [Content(text)] if text.strip() else []
