"""The table of formats: how families of models mark thoughts and calls, and which one a model uses.

A format is found by looking at the chat template, which shows the model how to write calls, and at
the vocabulary; or it is named. Sources: the models' chat templates, and vLLM's parsers for names.
gpt-oss needs no library of its own: the marks of its messages are in this table as well, and a
library would parse tokens, where everything here is text.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import TypeVar

from scheduler_service.frontend.chat_formats.calls import Functions
from scheduler_service.frontend.chat_formats.events import Content, Event, MessageParser
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

REASONING_FORMATS = (
    ReasoningFormat(
        ("openai_gptoss",),
        ("<|channel|>analysis<|message|>",),
        ("<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"),
        shown_by=(("<|channel|>",),),
        answer_opening="<|channel|>final<|message|>",
        other_answer_openings=("<|channel|>final <|constrain|>json<|message|>",),
        framing=(
            *("<|start|>assistant", "<|end|>", "<|return|>", "<|call|>"),
            *("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
            "<|channel|>final <|constrain|>json<|message|>",
        ),
    ),
    ReasoningFormat(("mistral",), ("[THINK]",), ("[/THINK]",)),
    ReasoningFormat(
        ("cohere_command3", "cohere_command4"),
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        answer_opening="<|START_RESPONSE|>",
        framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    ReasoningFormat(
        ("gemma4",), ("<|channel>thought",), ("<channel|>",), shown_by=(("<|channel>",),)
    ),
    ReasoningFormat(("seed_oss",), ("<seed:think>",), ("</seed:think>",)),
    ReasoningFormat(
        ("granite", "ernie45"),
        ("Here is my thought process:", "Here's my thought process:", "<think>"),
        ("Here is my response:", "Here's my response:", "</think>"),
        shown_by=(("Here is my thought process",), ("<think>", "<response>")),
        answer=("<response>", "</response>"),
    ),
    ReasoningFormat(
        ("hunyuan_a13b",),
        ("<think>",),
        ("</think>",),
        shown_by=(("<think>", "<answer>"),),
        answer=("<answer>", "</answer>"),
    ),
    ReasoningFormat(
        (
            *("qwen3", "deepseek_v3", "glm45", "glm47", "minimax_m2", "kimi_k2", "nemotron_v3"),
            *("holo2", "mimo", "olmo3", "step3p5"),
        ),
        ("<think>",),
        ("</think>",),
        shown_by=(("<think>",), ("</think>",)),
    ),
    ReasoningFormat(("deepseek_r1", "step3"), ("<think>",), ("</think>",), starts_unmarked=True),
)
"""The first that a template shows is used."""

_GEMMA_HEAD = r"\s*call:(?P<name>[^\s{}:]+)\s*(?=\{)"
_PYTHON_HEAD, _PYTHON_NAME = r"(?P<name>[A-Za-z_][\w.]*)(?=\()", r"[A-Za-z_][\w.]*"
_TAGGED_HEAD = r'\s*"?(?P<name>[^\s"<>]+)"?\s*>'
_QWEN_PARAMETERS = Parameters("<parameter=", r"(?P<key>[^<>]+)>", "</parameter>")

CALL_FORMATS = (
    CallFormat(
        ("openai",),
        call_openings=(
            *("<|channel|>commentary to=", "<|channel|>analysis to="),
            "<|start|>assistant to=",
        ),
        call_closings=("<|call|>",),
        shown_by=(("<|channel|>",),),
        head=(
            r"functions\.(?P<name>[^\s<{]+)"
            r"(?:\s|<\|channel\|>|<\|constrain\|>|commentary|analysis|json|code)*"
            r"<\|message\|>\s*(?=\{|<\|call\|>)"
        ),
    ),
    CallFormat(
        ("seed_oss",),
        *(("<seed:tool_call>",), ("</seed:tool_call>",), ("<function=",), ("</function>",)),
        head=_TAGGED_HEAD,
        parameters=_QWEN_PARAMETERS,
    ),
    CallFormat(
        ("qwen3_xml", "qwen3_coder", "mimo", "step3p5"),
        *(("<tool_call>",), ("</tool_call>",), ("<function=",), ("</function>",)),
        shown_by=(("<function=", "<parameter="),),
        head=_TAGGED_HEAD,
        parameters=_QWEN_PARAMETERS,
    ),
    CallFormat(
        ("glm45", "glm47"),
        call_openings=("<tool_call>",),
        call_closings=("</tool_call>",),
        shown_by=(("<arg_key>",),),
        head=r"\s*(?P<name>[^\s<>{}]+)\s*(?=<arg_key>|</tool_call>)",
        parameters=Parameters(
            "<arg_key>", r"\s*(?P<key>[^<]*?)\s*</arg_key>\s*<arg_value>", "</arg_value>"
        ),
    ),
    CallFormat(
        ("minimax_m2",),
        *(("<minimax:tool_call>",), ("</minimax:tool_call>",), ("<invoke name=",), ("</invoke>",)),
        head=_TAGGED_HEAD,
        parameters=Parameters("<parameter name=", r'"?(?P<key>[^"<>]+)"?\s*>', "</parameter>"),
    ),
    CallFormat(
        ("deepseek_v32",),
        *(("<｜DSML｜function_calls>",), ("</｜DSML｜function_calls>",)),
        *(("<｜DSML｜invoke name=",), ("</｜DSML｜invoke>",)),
        shown_by=(("｜DSML｜",),),
        head=_TAGGED_HEAD,
        parameters=Parameters(
            "<｜DSML｜parameter name=",
            r'"(?P<key>[^"<>]+)"(?:\s+string="\w+")?\s*>',
            "</｜DSML｜parameter>",
        ),
    ),
    CallFormat(
        ("deepseek_v3", "deepseek_v31"),
        *(("<｜tool▁calls▁begin｜>",), ("<｜tool▁calls▁end｜>",), ("<｜tool▁call▁begin｜>",)),
        ("<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>"),
        head=(
            r"\s*(?:function<｜tool▁sep｜>)?(?P<name>[^\s<{`]+)"
            r"(?:<｜tool▁sep｜>|\s*```(?:json)?)\s*(?=\{|```|<｜tool▁call▁end｜>)"
        ),
    ),
    CallFormat(
        ("kimi_k2",),
        *(("<|tool_calls_section_begin|>",), ("<|tool_calls_section_end|>",)),
        *(("<|tool_call_begin|>",), ("<|tool_call_end|>",)),
        head=(
            r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<{]+)(?::\d+)?)"
            r"\s*<\|tool_call_argument_begin\|>\s*(?=\{|<\|tool_call_end\|>)"
        ),
    ),
    CallFormat(
        ("mistral",),
        ("[TOOL_CALLS]",),
        has_objects=True,
        head=(
            r"\s*(?P<name>[^\s\[\]{}]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[\]{}]+)\s*)?"
            r"(?:\[ARGS\])?\s*(?=\{)"
        ),
        head_so_far=r"\s*[^\s\[\]{}]*\s*(?:\[[^{}]*)?",
    ),
    CallFormat(
        ("lfm2",),
        *(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        shown_by=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        has_objects=True,
        head=_PYTHON_HEAD,
        head_so_far=_PYTHON_NAME,
        dialect=PYTHON,
    ),
    CallFormat(
        ("olmo3",),
        *(("<function_calls>",), ("</function_calls>",)),
        head=_PYTHON_HEAD,
        head_so_far=_PYTHON_NAME,
        dialect=PYTHON,
    ),
    CallFormat(
        ("pythonic", "llama4_pythonic"),
        *(("<|python_start|>",), ("<|python_end|>",)),
        shown_by=(("[func_name1(",),),
        unmarked="[",
        head=_PYTHON_HEAD,
        head_so_far=_PYTHON_NAME,
        dialect=PYTHON,
    ),
    CallFormat(
        ("llama3_json", "llama4_json"),
        *(("<|python_tag|>", "<|python_start|>"), ("<|python_end|>",)),
        shown_by=(("<|python_tag|>",), ("ipython", '"parameters"')),
        unmarked="{",
        has_objects=True,
    ),
    CallFormat(
        ("phi4_mini_json",),
        *(("<|tool_call|>", "functools"), ("<|/tool_call|>",)),
        shown_by=(("functools",), ("<|tool|>",)),
        has_objects=True,
    ),
    CallFormat(("granite",), ("<|tool_call|>", "<tool_call>"), ("</tool_call>",), has_objects=True),
    CallFormat(
        ("cohere_command3", "cohere_command4"),
        *(("<|START_ACTION|>",), ("<|END_ACTION|>",)),
        has_objects=True,
    ),
    CallFormat(
        ("gemma4",),
        call_openings=("<|tool_call>",),
        call_closings=("<tool_call|>",),
        head=_GEMMA_HEAD,
        dialect=Dialect(('<|"|>',), has_escapes=False, has_bare_keys=True),
    ),
    CallFormat(
        ("functiongemma",),
        call_openings=("<start_function_call>",),
        call_closings=("<end_function_call>",),
        head=_GEMMA_HEAD,
        dialect=Dialect(("<escape>",), has_escapes=False, has_bare_keys=True),
    ),
    CallFormat(("jamba", "hunyuan_a13b"), ("<tool_calls>",), ("</tool_calls>",), has_objects=True),
    CallFormat(
        ("internlm",),
        ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
        ("<|action_end|>",),
        shown_by=(("<|action_start|>",),),
        has_objects=True,
    ),
    CallFormat(("longcat",), ("<longcat_tool_call>",), ("</longcat_tool_call>",), has_objects=True),
    CallFormat(("granite-20b-fc",), ("<function_call>",), has_objects=True),
    CallFormat(
        ("hermes", "granite4", "ernie45"), ("<tool_call>",), ("</tool_call>",), has_objects=True
    ),
)
"""The first that a template shows is used; without one, the first of which the vocabulary has the
opening; otherwise the last, which no ordinary text resembles."""
HERMES = CALL_FORMATS[-1]

TURN_MARKS = (
    *("<|im_start|>", "<｜Assistant｜>", "<|assistant|>", "<|Assistant|>", "<|im_assistant|>"),
    *("[/INST]", "<|start|>", "<|turn>", "<start_of_turn>", "<|CHATBOT_TOKEN|>"),
    *("<|end_header_id|>", "<|header_end|>", "<|end_of_role|>", "<seed:bos>", "]~b]"),
    *("[|assistant|]", "<|hy_Assistant|>", "<|extra_0|>"),
)
"""What begins a turn in a prompt; a thought that is open is open in the last one."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model marks the parts of its answers."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None

    @property
    def special_tokens(self) -> frozenset[str]:
        """Marks that may be special tokens and that the parser needs to see in the text."""
        return frozenset(tokens_in((self.reasoning, self.calls)))

    def thought(self, prompt: str) -> tuple[str, Texts] | None:
        """What begins the thought of an answer that follows `prompt`, empty where it has begun, and
        what ends it; None if there is none."""
        if self.reasoning is None:
            return None
        thought, has_thought = self._thought(prompt)
        if has_thought:
            return None
        opening, closings = self.reasoning.openings[0], self.reasoning.closings
        if answer_opening := self.reasoning.answer_opening:  # comes also without a thought
            equal = takewhile(
                lambda pair: pair[0] == pair[1], zip(opening, answer_opening, strict=False)
            )
            opening = "".join(char for char, _ in equal)
            closings = (answer_opening, *self.reasoning.other_answer_openings)
        is_open = thought is not None or self.reasoning.starts_unmarked
        return "" if is_open else opening, closings

    def parser(
        self, functions: Functions, *, prompt: str = "", answer: MessageParser | None = None
    ) -> MessageParser:
        """A parser of one choice that follows `prompt`.

        Without functions calls are not looked for. `answer`, where given, reads all text after the
        thoughts, because the request constrains it (`constrained`).
        """
        calls = self.calls if functions and answer is None else None
        if self.reasoning is None and calls is None:
            return answer or PlainParser()
        thought, has_thought = self._thought(prompt)
        return FormatParser(
            *(self.reasoning, calls, functions),
            thought=thought,
            has_thought=has_thought,
            answer=answer,
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


class PlainParser:
    """All text is content; see `MessageParser`."""

    in_reasoning = False

    def push(self, text: str) -> list[Event]:
        """The text."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []


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
        shown_by = found.shown_by or ((_opening(found),),)
        if any(all(text in template for text in texts) for texts in shown_by):
            return found
    return None


def _in_vocabulary(has_token: Callable[[str], bool]) -> CallFormat:
    """The first format with an opening in the vocabulary that is not one of several formats."""
    for found in CALL_FORMATS:
        opening = _opening(found)
        if opening not in HERMES.openings and has_token(opening):
            return found
    return HERMES


def _opening(form: ReasoningFormat | CallFormat) -> str:
    return form.openings[0] if isinstance(form, ReasoningFormat) else form.all_openings[0]
