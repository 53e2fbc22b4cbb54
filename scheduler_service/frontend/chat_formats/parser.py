"""The incremental parser: text, thoughts and sections of calls, in any format.

Generators read the text from where it is and yield where they need more. What may turn out not to
be a call is kept, and is read again as text if it is none.
"""

from scheduler_service.frontend.chat_formats.calls import CallReader
from scheduler_service.frontend.chat_formats.events import Functions, Kind, Part
from scheduler_service.frontend.chat_formats.source import Reading, Source, Texts, marks_of
from scheduler_service.frontend.chat_formats.syntax import (
    JSON,
    NO_CALLS,
    NO_REASONING,
    CallFormat,
    ReasoningFormat,
)
from scheduler_service.frontend.chat_formats.values import BrokenValue, ValueReader

MAX_READ_AGAIN = 2**20
"""Characters of a message that may be read again because they were no call."""


class _Text:
    """The text of one kind. White space beside a thought or a call is no part of it, but separates
    what is before from what follows."""

    def __init__(self, kind: Kind, parts: list[Part], *, trims: bool, continues: bool) -> None:
        """`continues`: it goes on with a text that is in the prompt."""
        self._kind = kind
        self._parts = parts
        self._trims = trims and not continues
        """Whether no text has come since the last thought or call."""
        self._spaces = ""
        """The last of the text, which waits for more."""
        self._separator = ""
        """The space before that thought or call."""
        self._joiner = ""
        """What is between two texts without space around what separates them."""
        self._has_text = continues

    def add(self, text: str) -> None:
        """Add the next piece; space at its end waits for more."""
        body = text.rstrip()
        if not body:
            self._spaces += text
            return
        joined = self._spaces + body
        if self._trims:
            trimmed = joined.lstrip()
            space = self._separator or joined[: len(joined) - len(trimmed)] or self._joiner
            joined = (space if self._has_text else "") + trimmed
            self._trims = False
        self._has_text = True
        self._parts.append(Part(self._kind, joined))
        self._spaces = text[len(body) :]

    def interrupt(self, joiner: str = "") -> None:
        """A thought or a call comes, or another message."""
        self._joiner = joiner
        if not self._trims:
            self._separator = self._spaces
        self._spaces, self._trims = "", True

    def finish(self) -> None:
        """Add the space at the end, unless it follows a thought or a call."""
        if self._spaces and not self._trims:
            self._parts.append(Part(self._kind, self._spaces))


class FormatParser:
    """Reads the text of one choice."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        functions: Functions,
        *,
        thought: str | None = None,
        has_thought: bool = False,
        continues: bool = False,
        required: str = "",
    ) -> None:
        """`thought` is the thought in which the prompt ends; `has_thought` says that one is over in
        it, and `continues` that it ends in content that goes on. What follows the thoughts is the
        arguments of the function `required`, if that is not empty."""
        self._reasoning = reasoning or NO_REASONING
        self._calls = calls or NO_CALLS
        self._framing = (*self._reasoning.framing, *self._calls.framing)
        self._functions = functions
        self._required = required
        self._source = Source()
        self._parts: list[Part] = []
        has_begun = thought is not None and bool(thought.strip())
        self._content = _Text("text", self._parts, trims=has_thought, continues=continues)
        self._thought = _Text("reasoning", self._parts, trims=True, continues=has_begun)
        self.in_reasoning = thought is not None or (
            self._reasoning.starts_unmarked and not has_thought
        )
        """Whether the text so far ends inside a thought."""
        self._answer_mark = ""
        """The mark that begins the answer, or ends it."""
        self._num_read_again = 0
        self._num_calls = 0
        self._has_unclosed = False
        """Whether marks that end calls are no text."""
        self._open: _Text | None = None
        """The text that is being read, if none of it is held back."""
        self._may_end = marks_of(()).first_character
        """What may begin its end: a piece without it goes straight to the text."""
        self._reading = self._read_message()
        next(self._reading)

    @property
    def has_reasoning(self) -> bool:
        """Whether the format has thoughts."""
        return self._reasoning is not NO_REASONING

    def push(self, text: str) -> list[Part]:
        """The parts in the next piece of text."""
        if self._open is not None and not self._may_end.search(text):
            self._open.add(text)
        else:
            self._open = None
            self._source.push(text)
            next(self._reading, None)
        return self._pop()

    def finish(self) -> list[Part]:
        """The parts of the text that was held back, at its end."""
        self._source.is_last = True
        next(self._reading, None)
        self._content.finish()
        return self._pop()

    def _pop(self) -> list[Part]:
        parts = self._parts[:]
        self._parts.clear()
        return parts

    # Text and thoughts.

    def _read_message(self) -> Reading[None]:
        """Read what may begin a message, or follow a thought or a call; then what comes."""
        source, reasoning = self._source, self._reasoning
        if self.in_reasoning:
            self._thought.add((yield from source.skip_space()))
            source.at += len((yield from source.peek(reasoning.openings)))
            yield from self._read_thought()
        while True:
            self._content.add((yield from source.skip_space()))
            begin = self._answer_mark if self._answer_mark == reasoning.answer[0] else ""
            marks = (*reasoning.openings, begin, *self._calls.all_openings, *self._framing)
            mark = yield from source.peek(marks)
            if source.is_empty:
                return
            if mark and mark in reasoning.openings:
                source.at += len(mark)
                yield from self._read_thought()
            elif mark and (mark in self._framing or mark == begin):
                source.at += len(mark)
                self._answer_mark = reasoning.answer[1] if mark == begin else self._answer_mark
            elif self._required:
                yield from self._read_arguments(self._required)
            else:
                yield from self._read_text(not mark and source.char == self._calls.unmarked)

    def _read_thought(self) -> Reading[None]:
        self.in_reasoning = True
        mark = yield from self._read_until(self._thought, self._reasoning.closings)
        if not mark:
            return
        self.in_reasoning = False
        if mark in self._framing:
            self._source.at -= len(mark)
        self._answer_mark = self._reasoning.answer[0]
        self._thought.interrupt("\n")
        self._content.interrupt("\n")

    def _read_until(self, text: _Text, marks: Texts) -> Reading[str]:
        """Read text up to a mark, which is empty if no more comes."""
        source, self._may_end = self._source, marks_of(marks).first_character
        while True:
            before, mark = source.split(marks)
            if before:
                text.add(before)
            if mark or source.is_last:
                return mark
            self._open = text if source.is_empty else None
            yield

    def _read_arguments(self, name: str) -> Reading[None]:
        """Read all text as the arguments of a call."""
        self._content.interrupt()
        self._parts.append(Part("call", name))

        def send(text: str) -> None:
            self._parts.append(Part("arguments", text))

        try:
            yield from ValueReader(self._source, JSON, send).copy()
        except BrokenValue as cut:
            send(cut.rest or "")
            self._source.at = len(self._source.text)

    def _read_text(self, begins_unmarked: bool) -> Reading[None]:
        """Read text up to what follows a call or a mark; it may begin with calls without one."""
        source, calls = self._source, self._calls
        if begins_unmarked and (yield from self._read_section("")):
            return
        end = "" if self._answer_mark == self._reasoning.answer[0] else self._answer_mark
        while True:
            closings = calls.all_closings if self._has_unclosed else ()
            marks = (*calls.all_openings, *closings, *self._framing, end)
            mark = yield from self._read_until(self._content, marks)
            if not mark:
                return
            if mark not in calls.all_openings:
                break
            source.at -= len(mark)
            if (yield from self._read_section(mark)):
                return
        if mark in closings:
            self._has_unclosed = mark not in calls.closings and bool(calls.closings)
        elif mark == end:
            self._answer_mark = ""
        self._content.interrupt("\n" if mark in self._framing else "")

    # Calls.

    def _read_section(self, mark: str) -> Reading[bool]:
        """Read calls after a mark; what is none is text, and so is the mark without any. Returns
        whether what follows the calls is no text for certain."""
        source, calls = self._source, self._calls
        source.keep()
        misleading = len(mark)
        source.at += len(mark) if mark in calls.openings else 0
        num_calls = 0
        in_list = is_separated = False
        while True:
            follows_call = num_calls > 0 and not is_separated
            space = yield from source.skip_space()
            if follows_call:
                self._content.add(space)
            mark = yield from source.peek((*calls.all_closings, *calls.call_openings))
            char = "" if mark else source.char
            if follows_call and mark and mark in calls.all_closings:
                source.at += len(mark)
                if mark in calls.closings or not calls.closings:
                    self._has_unclosed = False
                    return True
            elif char == "[" and not num_calls and not in_list:
                source.at += 1
                in_list = True
            elif char == "]" and in_list and follows_call:
                source.at += 1
                in_list = False
            elif char in (",", ";") and follows_call:
                source.keep()
                misleading = 0
                source.at += 1
                is_separated = True
            elif follows_call and not self._may_begin(mark, char, False):
                return True
            else:
                if follows_call:
                    source.keep()
                    misleading = len(mark)
                if not (yield from self._read_call(mark, char, is_separated or not num_calls)):
                    self._fail(misleading)
                    return False
                num_calls += 1
                is_separated = False

    def _read_call(self, mark: str, char: str, is_first: bool) -> Reading[bool]:
        """Read a call that begins with a mark or a character, if it does. `is_first`: the first of
        a section, or after a separator."""
        if not self._may_begin(mark, char, is_first):
            return False
        is_object = char == "{" and self._calls.has_objects
        self._source.at += 1 if is_object else len(mark)
        call = CallReader(
            *(self._source, self._calls, self._functions, self._parts, self._num_calls)
        )
        if not (yield from call.read(has_head=not is_object)):
            return False
        self._num_calls += 1
        self._has_unclosed = True
        self._content.interrupt()
        return True

    def _may_begin(self, mark: str, char: str, is_first: bool) -> bool:
        calls = self._calls
        if calls.call_openings or not char:
            return mark in calls.call_openings
        can_follow = is_first or calls.dialect.in_parentheses
        return (char == "{" and calls.has_objects) or (bool(calls.head) and can_follow)

    def _fail(self, misleading: int) -> None:
        """Read again as text what is no call, without the mark that was misleading."""
        source = self._source
        num_kept = source.restore()
        self._num_read_again += num_kept
        length = misleading if self._num_read_again <= MAX_READ_AGAIN else num_kept
        self._content.add(source.text[source.at : source.at + length])
        source.at += length
