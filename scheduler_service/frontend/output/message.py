"""One choice's answer in parts: its reasoning, its content and its tool calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from typing import Literal

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.chat_formats.events import (
    CallArguments,
    CallStart,
    Event,
    MessageParser,
    Reasoning,
)

_ORDER = ("reasoning", "text", "tool_calls")
"""Fields of a ChoiceDelta in the order in which a reader appends them."""

_RECEIVED = {
    "text": "num_chars",
    "reasoning": "num_reasoning_chars",
    "call": "num_tool_calls",
    "arguments": "num_argument_chars",
}
"""Field of ResumedChoice that counts the pieces of each kind."""

_ID_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
_ID_LENGTH = 9


def call_id(request_id: str, choice: int, call: int) -> str:
    """The id of a call, the same on every frontend, so that a resumed stream repeats it.

    Nine letters and digits: Mistral's templates refuse anything else; others accept it.
    """
    key = f"{request_id}/{choice}/{call}".encode()
    number = int.from_bytes(blake2b(key, digest_size=8).digest(), "big")
    base = len(_ID_ALPHABET)
    return "".join(_ID_ALPHABET[number // base**place % base] for place in range(_ID_LENGTH))


@dataclass(frozen=True, slots=True)
class _Piece:
    kind: Literal["reasoning", "text", "call", "arguments"]
    text: str
    """The text to append; the name of the function where a call begins."""
    call: int = 0
    """Number of the call, of its parts."""
    id: str = ""
    """The call's id, where it begins."""

    @property
    def field(self) -> str:
        """The field of a ChoiceDelta that contains it."""
        return self.kind if self.kind in _ORDER else "tool_calls"

    @property
    def size(self) -> int:
        """What `ResumedChoice` counts of it."""
        return 1 if self.kind == "call" else len(self.text)


class MessageStream:
    """What the text of one choice contains, and the part of it that has not been sent."""

    def __init__(
        self,
        parser: MessageParser | None,
        request_id: str,
        choice: int,
        *,
        include_reasoning: bool = True,
        max_calls: int | None = None,
    ) -> None:
        """Without a parser all text is content; calls after the first `max_calls` are dropped."""
        self._parser = parser
        self._request_id = request_id
        self._choice = choice
        self._include_reasoning = include_reasoning
        self._max_calls = max_calls
        self._num_calls = 0
        self._pending: list[_Piece] = []

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the model's reasoning."""
        return self._parser is not None and self._parser.in_reasoning

    @property
    def has_pending(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._pending)

    def push(self, text: str) -> None:
        """Add the next text of the choice."""
        if self._parser is None:
            self._pending.append(_Piece("text", text))
        else:
            self._add(self._parser.push(text))

    def finish(self) -> None:
        """Add what was held back, at the end of the choice."""
        if self._parser is not None:
            self._add(self._parser.finish())

    def skip(self, resumed: inference_pb.ResumedChoice, field: str) -> None:
        """Omit what a client already has; nothing must have been written. `field` names it in
        errors.

        A parser's events, joined by kind, do not depend on how the text was cut, so counts of what
        was received determine the rest exactly. Raises InvalidArgument if there is less.
        """
        left = {kind: getattr(resumed, name) for kind, name in _RECEIVED.items()}
        kept = []
        for piece in self._pending:
            skipped = min(piece.size, left[piece.kind])
            left[piece.kind] -= skipped
            if skipped < piece.size:
                kept.append(replace(piece, text=piece.text[skipped:]) if skipped else piece)
        for kind, name in _RECEIVED.items():
            if left[kind]:
                most = getattr(resumed, name) - left[kind]
                raise InvalidArgument(f"{field}.{name}", f"expected at most {most}, by its tokens")
        self._pending = kept

    def write(self, delta: inference_pb.ChoiceDelta) -> list[inference_pb.ChoiceDelta]:
        """Move all that is pending to a delta, and to further ones where it is not in the order of
        the fields. Returns all of them."""
        deltas = [delta]
        place = 0
        runs = groupby(self._pending, lambda piece: (piece.field, piece.call))
        for (field, call), pieces in runs:
            if _ORDER.index(field) < place:
                deltas.append(inference_pb.ChoiceDelta(index=delta.index))
            place = _ORDER.index(field)
            if field == "tool_calls":
                deltas[-1].tool_calls.append(_call_delta(call, pieces))
            else:
                setattr(deltas[-1], field, "".join(piece.text for piece in pieces))
        self._pending = []
        return deltas

    def _add(self, events: Iterable[Event]) -> None:
        self._pending += self._pieces(events)

    def _pieces(self, events: Iterable[Event]) -> Iterator[_Piece]:
        for event in events:
            if isinstance(event, CallStart):
                self._num_calls += 1
            call = self._num_calls - 1
            if isinstance(event, CallStart | CallArguments):
                if self._max_calls is not None and call >= self._max_calls:
                    continue
                if isinstance(event, CallArguments):
                    yield _Piece("arguments", event.text, call)
                else:
                    written = event.call_id or call_id(self._request_id, self._choice, call)
                    yield _Piece("call", event.name, call, written)
            elif not isinstance(event, Reasoning):
                yield _Piece("text", event.text)
            elif self._include_reasoning:
                yield _Piece("reasoning", event.text)


def _call_delta(call: int, pieces: Iterable[_Piece]) -> inference_pb.ToolCallDelta:
    delta = inference_pb.ToolCallDelta(index=call)
    arguments = []
    for piece in pieces:
        if piece.kind == "call":
            delta.name, delta.id = piece.text, piece.id
        else:
            arguments.append(piece.text)
    delta.arguments = "".join(arguments)
    return delta
