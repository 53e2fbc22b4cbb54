"""The table of formats: how families of models mark thoughts and calls, and which one a model uses.

A format is found by looking at the chat template, which shows the model how to write calls, and at
the vocabulary; or it is named. Sources: the models' chat templates, and vLLM's parsers for names.
gpt-oss needs no library of its own: the marks of its messages are in this table as well, and a
library would parse tokens, where everything here is text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple, TypeVar

from scheduler_service.frontend.chat_formats.events import Functions
from scheduler_service.frontend.chat_formats.parser import FormatParser
from scheduler_service.frontend.chat_formats.source import Texts
from scheduler_service.frontend.chat_formats.syntax import (
    PYTHON,
    CallFormat,
    Dialect,
    Parameters,
    ReasoningFormat,
    tokens_in,
)


def _texts(texts: str) -> Texts:
    """The texts in `first or second`."""
    return tuple(filter(None, texts.split(" or ")))


def _around(marks: str) -> tuple[Texts, Texts]:
    """The openings and the closings in `opening…closing`, of which there may be several."""
    opening, _, closing = marks.partition("…")
    return _texts(opening), _texts(closing)


def _thoughts(names: str, marks: str, **fields: Any) -> ReasoningFormat:
    """A format of thoughts between marks."""
    return ReasoningFormat(tuple(names.split()), *_around(marks), **fields)


def _calls(names: str, section: str = "…", call: str = "…", **fields: Any) -> CallFormat:
    """A format of calls between marks, in sections between marks."""
    return CallFormat(tuple(names.split()), *_around(section), *_around(call), **fields)


def _tagged(names: str, section: str, call: str, parameter: str, **fields: Any) -> CallFormat:
    """A format of calls and of their parameters between tags such as `<invoke name=` and
    `</invoke>`."""
    head = r'\s*"?(?P<name>[^\s"<>]+)"?\s*>'
    key = r'\s*"?(?P<key>[^"<>]+?)"?(?:\s+string="\w+")?\s*>'
    end_call, end_parameter = (
        f"</{tag[1:].replace(' ', '=').split('=')[0]}>" for tag in (call, parameter)
    )
    parameters = Parameters(parameter, key, end_parameter)
    return _calls(names, section, f"{call}…{end_call}", head=head, parameters=parameters, **fields)


def _pythonic(names: str, section: str, **fields: Any) -> CallFormat:
    """A format of calls as in Python."""
    name = r"(?P<name>[A-Za-z_][\w.]*)"
    return _calls(names, section, head=rf"{name}(?=\()", head_so_far=name, dialect=PYTHON, **fields)


def _gemma(names: str, call: str, quote: str) -> CallFormat:
    """A format of Gemma's calls, with a mark of their own for quotes."""
    head = r"\s*call:(?P<name>[^\s{}:]+)\s*(?=\{)"
    dialect = Dialect((quote,), has_escapes=False, has_bare_keys=True)
    return _calls(names, call=call, head=head, dialect=dialect)


_FINAL = _texts("<|channel|>final<|message|> or <|channel|>final <|constrain|>json<|message|>")
_COHERE = _texts("<|START_RESPONSE|> or <|END_RESPONSE|> or <|START_TEXT|> or <|END_TEXT|>")

REASONING_FORMATS = (
    _thoughts(
        "openai_gptoss",
        "<|channel|>analysis<|message|>…"
        "<|end|> or <|start|>assistant or <|channel|>final<|message|>",
        shown_by="<|channel|>",
        answer_openings=_FINAL,
        framing=(
            *_texts("<|start|>assistant or <|end|> or <|return|> or <|call|>"),
            *(*_FINAL, "<|channel|>commentary<|message|>"),
        ),
    ),
    _thoughts(
        "muse_glimmer",
        "to=self<|message|>…<|eom|>",
        shown_by="<atem:function_calls>",
        answer_openings=("to=user<|message|>",),
        framing=_texts("<|start|>assistant or to=user<|message|> or <|eom|> or <|eot|>"),
    ),
    _thoughts("mistral", "[THINK]…[/THINK]"),
    _thoughts(
        "cohere_command3 cohere_command4",
        "<|START_THINKING|>…<|END_THINKING|>",
        answer_openings=_COHERE[:1],
        framing=_COHERE,
    ),
    _thoughts("gemma4", "<|channel>thought…<channel|>", shown_by="<|channel>"),
    _thoughts("seed_oss", "<seed:think>…</seed:think>"),
    _thoughts(
        "granite",
        "Here is my thought process: or Here's my thought process:…"
        "Here is my response: or Here's my response:",
        shown_by="Here is my thought process",
    ),
    _thoughts(
        "ernie45",  # and Granite 3.3
        "<think>…</think>",
        shown_by="<think> and <response>",
        answer=("<response>", "</response>"),
    ),
    _thoughts(
        "qwen3 deepseek_v3 glm45 glm47 minimax_m2 kimi_k2 nemotron_v3 holo2 mimo olmo3 step3p5",
        "<think>…</think>",
        shown_by="<think> or </think>",
    ),
    _thoughts("deepseek_r1 step3", "<think>…</think>", starts_unmarked=True),
)
"""The first that a template shows is used."""

CALL_FORMATS = (
    _calls(
        "openai",
        call="<|channel|>commentary to= or <|channel|>analysis to= or <|start|>assistant to=…"
        "<|call|>",
        shown_by="<|channel|>",
        head=(
            r"functions\.(?P<name>[^\s<{]+)"
            r"(?:\s|<\|channel\|>|<\|constrain\|>|commentary|analysis|json|code)*"
            r"<\|message\|>\s*(?=\{|<\|call\|>)"
        ),
    ),
    _calls(
        "muse_glimmer",
        call="to=…</atem:invoke>",
        shown_by="<atem:function_calls>",
        head=(
            r"\s*(?P<name>[^\s<]+)<\|message\|>\s*<atem:function_calls>\s*"
            r'<atem:invoke name="[^"<>]+">'
        ),
        head_so_far=r"\s*[^\s<]*(?s:<.*)?",
        parameters=Parameters("<atem:parameter name=", r'"(?P<key>[^"<>]+)">', "</atem:parameter>"),
        framing=("</atem:function_calls>",),
    ),
    _tagged("seed_oss", "<seed:tool_call>…</seed:tool_call>", "<function=", "<parameter="),
    _tagged(
        "qwen3_xml qwen3_coder mimo step3p5",
        *("<tool_call>…</tool_call>", "<function=", "<parameter="),
        shown_by="<function= and <parameter=",
    ),
    _tagged(
        "minimax_m2",
        *("<minimax:tool_call>…</minimax:tool_call>", "<invoke name=", "<parameter name="),
    ),
    _tagged(
        "deepseek_v32",
        "<｜DSML｜function_calls>…</｜DSML｜function_calls>",
        *("<｜DSML｜invoke name=", "<｜DSML｜parameter name="),
        shown_by="｜DSML｜",
    ),
    _calls(
        "glm45 glm47",
        call="<tool_call>…</tool_call>",
        shown_by="<arg_key>",
        head=r"\s*(?P<name>[^\s<>{}]+)\s*(?=<arg_key>|</tool_call>)",
        parameters=Parameters(
            "<arg_key>", r"\s*(?P<key>[^<]*?)\s*</arg_key>\s*<arg_value>", "</arg_value>"
        ),
    ),
    _calls(
        "deepseek_v3 deepseek_v31",
        "<｜tool▁calls▁begin｜>…<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>…<｜tool▁call▁end｜> or ```<｜tool▁call▁end｜>",
        head=(
            r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<{`]+)"
            r"(?:<｜tool▁sep｜>|\s*```(?:json)?)\s*(?=\{|```|<｜tool▁call▁end｜>)"
        ),
    ),
    _calls(
        "kimi_k2",
        "<|tool_calls_section_begin|>…<|tool_calls_section_end|>",
        "<|tool_call_begin|>…<|tool_call_end|>",
        head=(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<{]+)(?::\d+)?)"
            r"\s*<\|tool_call_argument_begin\|>\s*(?=\{|<\|tool_call_end\|>)"
        ),
    ),
    _calls(
        "mistral",
        "[TOOL_CALLS]…",
        has_objects=True,
        head=(
            r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+)\s*)?"
            r"(?:\[ARGS\])?\s*(?=\{)"
        ),
        head_so_far=r"\s*[^\s\[\]{}]*\s*(?:\[[^{}]*)?",
    ),
    _pythonic(
        "lfm2",
        "<|tool_call_start|>…<|tool_call_end|>",
        shown_by="<|tool_call_start|> or <|tool_list_start|>",
        has_objects=True,
    ),
    _pythonic("olmo3", "<function_calls>…</function_calls>"),
    _pythonic(
        "pythonic llama4_pythonic",
        "<|python_start|>…<|python_end|>",
        shown_by="[func_name1(",
        unmarked="[",
    ),
    _calls(
        "llama3_json llama4_json",
        "<|python_tag|>…",
        shown_by='<|python_tag|> or ipython and "parameters"',
        unmarked="{",
        has_objects=True,
        framing=("<|python_start|>", "<|python_end|>"),
    ),
    _calls(
        "phi4_mini_json",
        "<|tool_call|> or functools…<|/tool_call|>",
        shown_by="functools or <|tool|>",
        has_objects=True,
    ),
    _calls("granite", "<|tool_call|> or <tool_call>…</tool_call>", has_objects=True),
    _calls("cohere_command3 cohere_command4", "<|START_ACTION|>…<|END_ACTION|>", has_objects=True),
    _gemma("gemma4", "<|tool_call>…<tool_call|>", '<|"|>'),
    _gemma("functiongemma", "<start_function_call>…<end_function_call>", "<escape>"),
    _calls("jamba", "<tool_calls>…</tool_calls>", has_objects=True),
    _calls("longcat", "<longcat_tool_call>…</longcat_tool_call>", has_objects=True),
    _calls("granite-20b-fc", "<function_call>…", has_objects=True),
    _calls("hermes granite4 ernie45", "<tool_call>…</tool_call>", has_objects=True),
)
"""The first that a template shows is used; without one, the first of which the vocabulary has the
opening; otherwise the last, which no ordinary text resembles."""
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
        self, functions: Functions, *, prompt: str = "", required: str | None = None
    ) -> FormatParser:
        """A parser of one choice that follows `prompt`.

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
        if any(all(map(template.__contains__, texts.split(" and "))) for texts in _texts(shown_by)):
            return found
    return None


def _in_vocabulary(has_token: Callable[[str], bool]) -> CallFormat:
    """The first format with an opening in the vocabulary that is not one of several formats."""
    for found in CALL_FORMATS:
        opening = found.marks[0]
        if opening not in HERMES.openings and has_token(opening):
            return found
    return HERMES
