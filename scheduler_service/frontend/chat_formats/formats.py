"""Which format of `formats.toml` a model uses for its thoughts and calls.

A format is found by looking at the chat template, which shows the model how to write calls, and at
the vocabulary; or it is named. gpt-oss needs no library of its own: the marks of its messages are
in this table as well, and a library would parse tokens, where everything here is text.
"""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from scheduler_service.frontend.chat_formats.events import Functions
from scheduler_service.frontend.chat_formats.parser import FormatParser
from scheduler_service.frontend.chat_formats.source import Texts
from scheduler_service.frontend.chat_formats.syntax import (
    CallFormat,
    Dialect,
    Parameters,
    ReasoningFormat,
    tokens_in,
)

Record = TypeVar("Record")


def _record(kind: type[Record], values: Mapping[str, Any]) -> Record:
    """A record of a table's values, whose lists are tuples."""
    tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    return kind(**{**values, **tuples})


def _call_format(row: dict[str, Any], forms: Mapping[str, Mapping[str, Any]]) -> CallFormat:
    """A format of calls, with what it has in common with others."""
    form = forms.get(row.pop("form", ""), {})
    parts = {
        name: _record(kind, {**form.get(name, {}), **row.get(name, {})})
        for name, kind in (("parameters", Parameters), ("dialect", Dialect))
    }
    return _record(CallFormat, {**form, **row, **parts})


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
REASONING_FORMATS = tuple(_record(ReasoningFormat, row) for row in _TABLES["reasoning"])
CALL_FORMATS = tuple(_call_format(row, _TABLES["forms"]) for row in _TABLES["calls"])
HERMES = CALL_FORMATS[-1]
_REQUIRED_CALLS = CallFormat(unmarked="[", has_objects=True)

TURN_MARKS = (
    *("<|im_start|>", "<｜Assistant｜>", "<|assistant|>", "<|Assistant|>", "<|im_assistant|>"),
    *("[/INST]", "<|start|>", "<|turn>", "<start_of_turn>", "<|CHATBOT_TOKEN|>"),
    *("<|end_header_id|>", "<|header_end|>", "<|end_of_role|>", "<seed:bos>", "]~b]"),
    *("[|assistant|]", "<|hy_Assistant|>", "<|extra_0|>"),
)
"""What begins a turn in a prompt; a thought that is open is open in the last one."""


class Thought(NamedTuple):
    """See `Thought` in `sampling.proto`."""

    start: str
    ends: Texts
    other_starts: Texts = ()


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model marks the parts of its answers."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None

    @property
    def special_tokens(self) -> frozenset[str]:
        """Marks that may be special tokens and that the parser needs to see in the text."""
        parts = [part for part in (self.reasoning, self.calls) if part is not None]
        return frozenset(tokens_in(mark for part in parts for mark in part.marks))

    def thought(self, prompt: str) -> Thought | None:
        """The thought of an answer that follows `prompt`; None if there is none."""
        if self.reasoning is None:
            return None
        thought, has_thought = self._thought(prompt)
        if has_thought:
            return None
        closings = self.reasoning.answer_openings or self.reasoning.closings
        if thought is not None or self.reasoning.starts_unmarked:
            return Thought("", closings)
        # What announces the answer comes without a thought as well.
        openings = zip(*self.reasoning.openings, *self.reasoning.answer_openings, strict=False)
        prefix = takewhile(lambda characters: len(set(characters)) == 1, openings)
        start = "".join(characters[0] for characters in prefix)
        # An answer that begins with white space must not be forced to continue with a word.
        spaces = () if start.isalpha() else ("\n", "\n\n", " ")
        return Thought(start, closings, tuple(space + start for space in spaces))

    def parser(
        self,
        functions: Functions,
        *,
        prompt: str = "",
        continues: bool = False,
        required: str | None = None,
    ) -> FormatParser:
        """A parser of one choice that follows `prompt`, or `continues` the message in which it
        ends.

        Without functions calls are not looked for. What follows the thoughts is the arguments of
        the function `required`, or a list of calls if that is empty, because the request constrains
        it.
        """
        calls = self.calls if required is None else _REQUIRED_CALLS
        thought, has_thought = self._thought(prompt)
        return FormatParser(
            *(self.reasoning, calls if functions else None, functions),
            thought=thought,
            has_thought=has_thought,
            continues=continues and thought is None,
            required=required or "",
        )

    def _thought(self, prompt: str) -> tuple[str | None, bool]:
        """The thought in which a prompt ends; whether its last turn has one that is over."""
        if self.reasoning is None:
            return None, False
        turn = _last_end(TURN_MARKS, prompt)
        last = prompt[turn:]
        opening = _last_end(self.reasoning.openings, last)
        closing = _last_end(self.reasoning.closings, last)
        if opening <= closing:
            return None, turn > 0 and closing > 0
        thought = last[opening:]
        # Without a turn it may be someone's words, unless nothing follows.
        return (thought, False) if turn > 0 or not thought.strip() else (None, False)


def _last_end(marks: Texts, text: str) -> int:
    """Where the last of the marks ends; 0 without any."""
    return max((text.rfind(mark) + len(mark) for mark in marks if mark in text), default=0)


Format = TypeVar("Format", ReasoningFormat, CallFormat)


def find_format(
    template: str | None,
    tool_template: str | None,
    has_token: Callable[[str], bool],
    *,
    reasoning_parser: str = "auto",
    tool_call_parser: str = "auto",
) -> ChatFormat:
    """The format of a model with these chat templates, without and with tools, and vocabulary.

    A parser is `auto`, `none`, or the name of a format (vLLM's names). Raises ValueError for any
    other name.
    """
    reasoning = _named(REASONING_FORMATS, reasoning_parser, "reasoning_parser")
    if reasoning_parser == "auto":
        reasoning = _shown(REASONING_FORMATS, (template or "") + (tool_template or ""))
    calls = _named(CALL_FORMATS, tool_call_parser, "tool_call_parser")
    if tool_call_parser == "auto":
        calls = _shown(CALL_FORMATS, tool_template or template or "") or _in_vocabulary(has_token)
    return ChatFormat(reasoning, calls)


def _named(formats: tuple[Format, ...], name: str, field: str) -> Format | None:
    if name in ("auto", "none"):
        return None
    for found in formats:
        if name in found.names:
            return found
    names = ", ".join(sorted(name for found in formats for name in found.names))
    raise ValueError(f"{field}: expected auto, none, or one of {names}; got {name!r}")


def _shown(formats: tuple[Format, ...], template: str) -> Format | None:
    for found in formats:
        shown_by = found.shown_by or found.marks[0]
        if any(
            all(map(template.__contains__, texts.split(" and ")))
            for texts in shown_by.split(" or ")
        ):
            return found
    return None


def _in_vocabulary(has_token: Callable[[str], bool]) -> CallFormat:
    """The first format with an opening in the vocabulary that is not one of several formats."""
    for found in CALL_FORMATS:
        opening = found.marks[0]
        if opening not in HERMES.openings and has_token(opening):
            return found
    return HERMES
