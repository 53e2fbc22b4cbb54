"""The incremental parser: text, thoughts and sections of calls, in any format.

A state is a method that reads the text from where it is and returns whether it could go on. What
may turn out not to be a call is kept, and is read again as text if it is none.
"""

from collections.abc import Callable

from scheduler_service.frontend.chat_formats.calls import (
    CallReader,
    Functions,
    HeadedCall,
    ObjectCall,
    Step,
)
from scheduler_service.frontend.chat_formats.events import (
    Content,
    Event,
    MessageParser,
    Reasoning,
)
from scheduler_service.frontend.chat_formats.source import Source
from scheduler_service.frontend.chat_formats.syntax import (
    NO_CALLS,
    NO_REASONING,
    CallFormat,
    ReasoningFormat,
)

MAX_READS = 8
"""How often, on average, a text may be read again because it was no call."""


class _Text:
    """The text of one kind. White space beside a thought or a call is no part of it, but separates
    what is before from what follows."""

    def __init__(
        self, kind: type[Content] | type[Reasoning], events: list[Event], *, trims: bool
    ) -> None:
        self._kind = kind
        self._events = events
        self._trims = trims
        """Whether no text has come since the last thought or call."""
        self._spaces: list[str] = []
        self._separator = ""
        """The space before that thought or call."""
        self._joiner = ""
        """What is between two texts without space around what separates them."""
        self._has_text = False

    def add(self, text: str) -> None:
        """Add the next piece; space at its end waits for more."""
        body = text.rstrip()
        if not body:
            self._spaces.append(text)
            return
        joined = "".join(self._spaces) + body
        if self._trims:
            trimmed = joined.lstrip()
            space = self._separator or joined[: len(joined) - len(trimmed)] or self._joiner
            joined = (space if self._has_text else "") + trimmed
        self._events.append(self._kind(joined))
        self._spaces = [text[len(body) :]]
        self._has_text, self._trims = True, False

    def interrupt(self, joiner: str = "") -> None:
        """A thought or a call comes, or another message."""
        self._joiner = joiner
        if not self._trims:
            self._separator = "".join(self._spaces)
        self._spaces, self._trims = [], True

    def finish(self) -> None:
        """Add the space at the end, unless it follows a thought or a call."""
        space = "".join(self._spaces)
        if space and not self._trims:
            self._events.append(self._kind(space))


class FormatParser:
    """See `MessageParser`."""

    def __init__(
        self,
        reasoning: ReasoningFormat | None,
        calls: CallFormat | None,
        functions: Functions,
        *,
        thought: str | None = None,
        has_thought: bool = False,
        answer: MessageParser | None = None,
    ) -> None:
        """`thought` is the thought in which the prompt ends; `has_thought` says that one is over in
        it. `answer` reads what follows the thoughts instead of this parser."""
        self._reasoning = reasoning or NO_REASONING
        self._calls = calls or NO_CALLS
        self._functions = functions
        self._answer = answer
        self._source = Source()
        self._events: list[Event] = []
        self._content = _Text(Content, self._events, trims=has_thought)
        is_new = thought is None or not thought.strip()
        self._thought = _Text(Reasoning, self._events, trims=is_new)
        self._num_read_again = 0
        self._misleading = 0
        """The length of the mark that is text if what follows is no call."""
        self._answer_mark = ""
        """The mark that begins the answer, or ends it."""
        self._has_unclosed = False
        """Whether marks that end calls are no text."""
        self._in_list = self._is_separated = False
        self._num_calls = 0
        """Calls in the present section."""
        self._call: CallReader
        self._state: Callable[[], bool] = self._read_start
        if thought is not None:
            self._state = self._read_thought
        elif self._reasoning.starts_unmarked and not has_thought:
            self._state = self._read_first

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._state in (self._read_thought, self._read_first, self._read_unmarked)

    def push(self, text: str) -> list[Event]:
        """The events in the next piece of text."""
        self._source.push(text)
        while not self._source.is_empty and self._state():
            pass
        return self._pop()

    def finish(self) -> list[Event]:
        """The events of the text that was held back, at its end."""
        self._source.is_last = True
        while self._state():
            pass
        self._content.finish()
        return self._pop() + (self._answer.finish() if self._answer is not None else [])

    def _pop(self) -> list[Event]:
        events = self._events[:]
        self._events.clear()
        return events

    # Text and thoughts.

    def _read_start(self) -> bool:
        """What may begin a message, or follow a thought or a call."""
        source, reasoning = self._source, self._reasoning
        if space := source.skip_space():
            self._content.add(space)
        opening = self._answer_mark if self._answer_mark == reasoning.answer[0] else ""
        openings = (*reasoning.openings, opening, *self._calls.all_openings)
        mark = source.peek((*openings, *reasoning.framing))
        if mark is None or source.is_empty:
            return False
        if mark and (mark in reasoning.openings or mark in reasoning.framing or mark == opening):
            source.at += len(mark)
            if mark in reasoning.openings:
                self._state = self._read_thought
            elif mark == opening:
                self._answer_mark = reasoning.answer[1]
        elif self._answer is not None:
            self._state = self._read_answer
        elif not mark and source.char == self._calls.unmarked:
            self._begin_section("")
        else:
            self._state = self._read_text
        return True

    def _read_text(self) -> bool:
        """Text up to a mark."""
        calls = self._calls
        closings = calls.all_closings if self._has_unclosed else ()
        end = "" if self._answer_mark == self._reasoning.answer[0] else self._answer_mark
        marks = (*calls.all_openings, *closings, *self._reasoning.framing, end)
        before, mark = self._source.split(marks)
        if before:
            self._content.add(before)
        if mark in calls.all_openings:
            self._source.at -= len(mark)
            self._begin_section(mark)
        elif mark:
            if mark in closings:
                self._has_unclosed = mark not in calls.closings and bool(calls.closings)
            elif mark == end:
                self._answer_mark = ""
            self._content.interrupt("\n" if mark in self._reasoning.framing else "")
            self._state = self._read_start
        return bool(mark)

    def _read_thought(self) -> bool:
        before, mark = self._source.split(self._reasoning.closings)
        if before:
            self._thought.add(before)
        if mark:
            self._end_thought(mark)
        return bool(mark)

    def _end_thought(self, mark: str) -> None:
        if mark in self._reasoning.framing:
            self._source.at -= len(mark)
        self._answer_mark = self._reasoning.answer[0]
        self._thought.interrupt("\n")
        self._content.interrupt("\n")
        self._state = self._read_start

    def _read_first(self) -> bool:
        """Whether the first thought is marked."""
        source = self._source
        source.keep()
        source.skip_space()
        mark = source.peek(self._reasoning.openings)
        source.restore()
        if mark == "":
            source.keep()
        self._state = self._read_start if mark else self._read_unmarked
        if mark is None:
            self._state = self._read_first
        return mark is not None

    def _read_unmarked(self) -> bool:
        """What is a thought if its end comes, and otherwise text."""
        source = self._source
        _, mark = source.split(self._reasoning.closings)
        if mark:
            self._thought.add(source.release()[: -len(mark)])
            self._end_thought(mark)
        elif source.is_last:
            source.restore()
            self._state = self._read_start
        return bool(mark) or source.is_last

    def _read_answer(self) -> bool:
        source = self._source
        if self._answer is not None and not source.is_empty:
            self._events += self._answer.push(source.text[source.at :])
            source.at = len(source.text)
        return False

    # Calls.

    def _begin_section(self, mark: str) -> None:
        """Read calls after a mark, which is text if there are none."""
        self._source.keep()
        self._misleading = len(mark)
        self._source.at += len(mark) if mark in self._calls.openings else 0
        self._num_calls = 0
        self._in_list = self._is_separated = False
        self._state = self._read_section

    def _read_section(self) -> bool:
        """What is before, between and after the calls of a section."""
        source, calls = self._source, self._calls
        space = source.skip_space()
        if space and not source.keeps_text:
            self._content.add(space)
        mark = source.peek((*calls.all_closings, *calls.call_openings))
        if mark is None:
            return False
        if mark in calls.call_openings:
            self._begin_call(HeadedCall, mark)
        elif mark and self._num_calls and not self._is_separated:
            source.at += len(mark)
            if mark in calls.closings or not calls.closings:
                self._has_unclosed = False
                self._state = self._read_start
        elif source.char in "[],;" and self._read_list(source.char):
            source.at += len(source.char)
        elif source.char == "{" and calls.has_objects:
            self._begin_call(ObjectCall, "")
        elif source.char and self._may_have_head():
            self._begin_call(HeadedCall, "")
        elif source.keeps_text:
            self._fail()
        else:
            self._state = self._read_start
        return True

    def _read_list(self, char: str) -> bool:
        """Whether a bracket or a separator belongs to the list of calls."""
        follows_call = bool(self._num_calls) and not self._is_separated
        if char == "[":
            fits = not self._num_calls and not self._in_list
            self._in_list |= fits
        elif char == "]":
            fits = self._in_list and follows_call
            self._in_list &= not fits
        else:
            fits = bool(char) and follows_call
            if fits:
                self._source.keep()
                self._misleading = 0
            self._is_separated |= fits
        return fits

    def _may_have_head(self) -> bool:
        calls = self._calls
        in_list = self._is_separated or calls.dialect.in_parentheses
        return bool(calls.head) and not calls.call_openings and (in_list or not self._num_calls)

    def _begin_call(self, reader: type[HeadedCall | ObjectCall], mark: str) -> None:
        """Read what may be a call; text from here on is kept, unless earlier text is already."""
        if self._num_calls and not self._is_separated:
            self._source.keep()
            self._misleading = len(mark)
        self._source.at += len(mark)
        self._call = reader(self._source, self._calls, self._functions, self._events)
        self._state = self._read_call

    def _read_call(self) -> bool:
        step = self._call.read()
        if step is Step.END:
            self._num_calls += 1
            self._is_separated = False
            self._has_unclosed = True
            self._content.interrupt()
            self._state = self._read_section
        elif step is Step.NO_CALL:
            self._fail()
        return step is not Step.WAIT

    def _fail(self) -> None:
        """Read again as text what is no call, without the mark that was misleading."""
        source = self._source
        self._num_read_again += source.num_kept
        too_often = self._num_read_again > MAX_READS * source.num_read
        length = source.num_kept if too_often else self._misleading
        source.restore()
        self._content.add(source.text[source.at : source.at + length])
        source.at += length
        self._state = self._read_text
