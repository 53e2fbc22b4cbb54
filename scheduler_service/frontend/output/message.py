"""One choice's answer in parts: its reasoning, its content and its tool calls."""

from bisect import bisect_right
from collections.abc import Iterable
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter

from pagewire.v1 import inference_service_pb2 as inference_pb
from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.chat_formats.events import Part
from scheduler_service.frontend.chat_formats.parser import FormatParser

_PLACES = {"reasoning": 0, "text": 1, "call": 2, "arguments": 2}
"""The order in which a reader appends the fields of a ChoiceDelta that contain parts."""

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


def _size(part: Part) -> int:
    """What `ResumedChoice` counts of a part."""
    return 1 if part.kind == "call" else len(part.text)


def _field(part: Part) -> tuple[int, int]:
    return _PLACES[part.kind], part.call


class MessageStream:
    """What the text of one choice contains, and the part of it that has not been sent."""

    def __init__(
        self,
        parser: FormatParser | None,
        request_id: str,
        choice: int,
        *,
        include_reasoning: bool = True,
        max_calls: int | None = None,
        has_only_calls: bool = False,
    ) -> None:
        """Without a parser all text is content; calls after the first `max_calls` are dropped, and
        so is text that is no call if `has_only_calls`: the answer ended before it was one."""
        self._parser = parser
        self._request_id = request_id
        self._choice = choice
        self._include_reasoning = include_reasoning
        self._max_calls = max_calls
        self._has_only_calls = has_only_calls
        self.num_tokens = 0
        """Tokens of the choice so far; a part comes with the last of them."""
        self._pending: list[tuple[int, Part]] = []
        """Parts, each with the number of tokens with which it came."""
        self.follows_thought = self.in_reasoning
        """Whether nothing else has come since the reasoning began."""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the model's reasoning."""
        return self._parser is not None and self._parser.in_reasoning

    @property
    def may_think(self) -> bool:
        """Whether reasoning is kept apart from other text."""
        return self._parser is not None and self._parser.has_reasoning

    @property
    def has_pending(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._pending)

    def push(self, text: str) -> None:
        """Add the next text of the choice."""
        if self._parser is None:
            self._pending.append((self.num_tokens, Part("text", text)))
        else:
            self._add(self._parser.push(text))
            self.follows_thought |= self._parser.in_reasoning

    def finish(self) -> None:
        """Add what was held back, at the end of the choice."""
        if self._parser is not None:
            self._add(self._parser.finish())

    def skip(self, resumed: inference_pb.ResumedChoice, field: str) -> None:
        """Omit what a client already has; nothing must have been written. `field` names it in
        errors.

        A parser's parts, joined by kind, do not depend on how the text was cut, so counts of what
        was received determine the rest exactly. Raises InvalidArgument if there is less.
        """
        remaining = {kind: getattr(resumed, name) for kind, name in _RECEIVED.items()}
        kept = []
        for num_tokens, part in self._pending:
            skipped = min(_size(part), remaining[part.kind])
            remaining[part.kind] -= skipped
            if skipped < _size(part):
                rest = part._replace(text=part.text[skipped:]) if skipped else part
                kept.append((num_tokens, rest))
        for kind, name in _RECEIVED.items():
            if remaining[kind]:
                limit = getattr(resumed, name) - remaining[kind]
                raise InvalidArgument(f"{field}.{name}", f"expected at most {limit}, by its tokens")
        self._pending = kept

    def events(self) -> list[tuple[int, bool]]:
        """The numbers of tokens with which anything pending came, ascending, each with whether it
        is text alone."""
        by_number = groupby(self._pending, itemgetter(0))
        return [(number, all(p.kind == "text" for _, p in came)) for number, came in by_number]

    def write(
        self, delta: inference_pb.ChoiceDelta, num_tokens: int | None = None
    ) -> list[inference_pb.ChoiceDelta]:
        """Move what is pending to a delta, and to further ones where it is not in the order of the
        fields. Returns all of them. num_tokens: up to what came with this one; None: all."""
        end = len(self._pending)
        if num_tokens is not None:
            end = bisect_right(self._pending, num_tokens, key=itemgetter(0))
        written, self._pending = self._pending[:end], self._pending[end:]
        deltas = [delta]
        last = 0
        for (place, _), group in groupby((part for _, part in written), _field):
            if place < last:
                deltas.append(inference_pb.ChoiceDelta(index=delta.index))
            last = place
            parts = list(group)
            if place == _PLACES["call"]:
                deltas[-1].tool_calls.append(self._call_delta(parts))
            else:
                setattr(deltas[-1], parts[0].kind, "".join(part.text for part in parts))
        return deltas

    def _call_delta(self, parts: list[Part]) -> inference_pb.ToolCallDelta:
        call, text = parts[0], "".join(part.text for part in parts if part.kind == "arguments")
        delta = inference_pb.ToolCallDelta(index=call.call, arguments=text)
        if call.kind == "call":
            delta.name = call.text
            delta.id = call.call_id or call_id(self._request_id, self._choice, call.call)
        return delta

    def _add(self, parts: Iterable[Part]) -> None:
        for part in parts:
            if part.kind == "reasoning":
                is_sent = self._include_reasoning
            else:
                self.follows_thought = False
                is_sent = part.kind != "text" or not self._has_only_calls
                is_sent &= self._max_calls is None or part.call < self._max_calls
            if is_sent:
                self._pending.append((self.num_tokens, part))
