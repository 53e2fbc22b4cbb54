"""One answer of a chat, as it grows: its text, and the calls in it."""

import secrets
from collections.abc import Iterable
from typing import Any

from scheduler_service.frontend.http.tool_choice import ToolPlan
from scheduler_service.frontend.http.tool_parsers.base import (
    CallArguments,
    CallStart,
    Content,
    Event,
)

Piece = dict[str, Any]
"""A `delta` of OpenAI's chunks."""

_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


class Message:
    """Text in, pieces out; `body` is all of them joined."""

    def __init__(self, plan: ToolPlan, *, one_call: bool) -> None:
        self._parser = plan.make_parser() if plan.make_parser is not None else None
        self._one_call = one_call
        self._texts: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._arguments: list[list[str]] = []
        self._drops_call = False

    @property
    def has_calls(self) -> bool:
        """Whether the model asks for a call."""
        return bool(self._calls)

    def push(self, text: str) -> list[Piece]:
        """What the next text tells."""
        if self._parser is None:
            self._texts.append(text)
            return [{"content": text}]
        return self._pieces(self._parser.push(text))

    def finish(self) -> list[Piece]:
        """What the end tells."""
        return self._pieces(self._parser.finish()) if self._parser is not None else []

    def body(self) -> dict[str, Any]:
        """The whole message."""
        text = "".join(self._texts)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if self._calls else ""),
            "refusal": None,
        }
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(arguments)},
                }
                for call, arguments in zip(self._calls, self._arguments, strict=True)
            ]
        return message

    def _pieces(self, events: Iterable[Event]) -> list[Piece]:
        pieces: list[Piece] = []
        for event in _merged(events):
            if isinstance(event, Content):
                self._texts.append(event.text)
                pieces.append({"content": event.text})
            elif isinstance(event, CallStart):
                pieces += self._start_call(event)
            elif not self._drops_call:
                self._arguments[-1].append(event.text)
                pieces.append(self._call_piece({"function": {"arguments": event.text}}))
        return pieces

    def _start_call(self, event: CallStart) -> list[Piece]:
        self._drops_call = self._one_call and self.has_calls
        if self._drops_call:
            return []
        call_id = _draw_call_id()
        self._calls.append({"id": call_id, "name": event.name})
        self._arguments.append([])
        function = {"name": event.name, "arguments": ""}
        return [self._call_piece({"id": call_id, "type": "function", "function": function})]

    def _call_piece(self, call: dict[str, Any]) -> Piece:
        return {"tool_calls": [{"index": len(self._calls) - 1} | call]}


def _merged(events: Iterable[Event]) -> list[Event]:
    """The same with pieces of arguments, and of text, that follow each other in one."""
    merged: list[Event] = []
    run: list[str] = []
    for event in events:
        former = merged[-1] if merged else None
        if isinstance(event, CallArguments | Content) and type(event) is type(former):
            run.append(event.text)
            continue
        _close_run(merged, run)
        merged.append(event)
        if isinstance(event, CallArguments | Content):
            run.append(event.text)
    _close_run(merged, run)
    return merged


def _close_run(merged: list[Event], run: list[str]) -> None:
    if run:
        merged[-1] = type(merged[-1])("".join(run))
        run.clear()


def _draw_call_id() -> str:
    """Nine letters and digits: Mistral's templates refuse anything else, the others do not care."""
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))
