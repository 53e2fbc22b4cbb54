"""The form in which a chat template takes messages, found by rendering small conversations.

Templates differ in what they read: a turn's content as a text or as a list of parts, a call's
arguments as an object or as JSON text, `content` absent, empty or null beside calls. What a
template does not read it drops silently. So a template gets its messages, which come in the form of
OpenAI's API, in the first form that keeps everything, as `transformers` would render it.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

Turn = dict[str, Any]
Content = str | list[dict[str, str]]
Render = Callable[[list[Turn], list[Turn] | None], str]
"""The prompt of messages and tools; empty if the template refuses them."""

PART_SEPARATOR = "\n"
"""Joins the parts of a turn's content for a template that takes it as one text."""

REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""What templates call an earlier turn's reasoning."""
CALL_REASONING_NAME = "tool_plan"
"""What Cohere's templates call it in a turn with calls."""


@dataclass(frozen=True, slots=True)
class ContentForm:
    """The form of the content of one role's turns."""

    takes_text: bool = True
    max_parts: int = 0
    """The number of parts in a list of which none is lost."""

    def convert(self, content: Content) -> Content:
        """A text, or a list of text parts, in a form that the template takes."""
        if isinstance(content, str):
            return content if self.takes_text else text_parts(content)
        if 0 < len(content) <= self.max_parts:
            return content
        return self.convert(_joined(content))


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageForms:
    """The forms that one template takes."""

    contents: Mapping[str, ContentForm] = field(default_factory=dict)
    """By role; that of `user` holds for all others."""
    empty_content: Turn = field(default_factory=dict)
    """The content of a turn with calls and no text: absent, empty or null."""
    parses_arguments: bool = True
    """Whether a call's arguments are an object; otherwise JSON text."""
    splits_calls: bool = False
    """Whether calls beside a text are a turn of their own."""
    has_thinking_parts: bool = False
    """Whether reasoning is a part of the content."""
    joins_reasoning: bool = False
    """Whether the text of a turn with reasoning and calls is the end of the reasoning."""
    joins_systems: bool = False
    """Whether all messages of the role `system` become one, the first message."""
    drops: frozenset[str] = frozenset()
    """What the template drops in these forms, in the words of `features_of`."""

    def convert(self, messages: Iterable[Mapping[str, Any]]) -> list[Turn]:
        """Messages of OpenAI's API as the template takes them. They are not changed."""
        if self.joins_systems:
            messages = _with_one_system(messages)
        return [turn for message in messages for turn in self._turns(message)]

    def _turns(self, message: Mapping[str, Any]) -> Iterator[Turn]:
        turn, calls = dict(message), message.get("tool_calls")
        content = self._content_form(turn["role"]).convert(turn["content"])
        reasoning = turn.get("reasoning_content")
        if self.joins_reasoning and reasoning and content and calls:
            reasoning, content = f"{reasoning}{PART_SEPARATOR}{_joined(turn['content'])}", ""
        if reasoning is not None:
            turn |= dict.fromkeys(REASONING_NAMES, reasoning)
            if calls:
                turn[CALL_REASONING_NAME] = reasoning
            if self.has_thinking_parts:
                parts = text_parts(content) if isinstance(content, str) else content
                content = [{"type": "thinking", "thinking": reasoning}, *parts]
        turn["content"] = content
        if calls:
            turn["tool_calls"] = [self._call(call) for call in calls]
            if not content:
                del turn["content"]
                turn |= self.empty_content
            elif self.splits_calls:
                yield {name: value for name, value in turn.items() if name != "tool_calls"}
                turn = {
                    "role": turn["role"],
                    "tool_calls": turn["tool_calls"],
                    **self.empty_content,
                }
        yield turn

    def _content_form(self, role: str) -> ContentForm:
        return self.contents.get(role) or self.contents.get("user") or ContentForm()

    def _call(self, call: Mapping[str, Any]) -> Turn:
        function = dict(call["function"])
        if self.parses_arguments:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        return {**call, "function": function}


def text_parts(*texts: str) -> list[dict[str, str]]:
    """A content of text parts; empty texts are left out."""
    return [{"type": "text", "text": text} for text in texts if text]


def _joined(content: Content) -> str:
    if isinstance(content, str):
        return content
    return PART_SEPARATOR.join(part["text"] for part in content)


def _with_one_system(messages: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    systems, others = list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    for message in messages:
        (systems if message["role"] == "system" else others).append(message)
    if len(systems) > 1:
        text = PART_SEPARATOR.join(_joined(system["content"]) for system in systems)
        systems = [{**systems[0], "content": text}]
    return [*systems, *others]


PromptOf = Callable[[MessageForms, Iterable[Turn]], str]
"""The prompt of turns in these forms, with tools unless the template refuses them."""

# Words that no template contains.
_FIRST, _SECOND, _NAME, _KEY, _VALUE = "zqfirst", "zqsecond", "zqname", "zqkey", "zqvalue"
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string", "description": "A key."}}}
_TOOL = {"name": _NAME, "description": "A function.", "parameters": {**_SCHEMA, "required": [_KEY]}}
_TOOLS: list[Turn] = [{"type": "function", "function": _TOOL}]
_CALL_ID = "zqcall123"
"""Nine letters and digits, as Mistral's templates require."""


def _call(value: str) -> Turn:
    function = {"name": _NAME, "arguments": json.dumps({_KEY: value})}
    return {"id": _CALL_ID, "type": "function", "function": function}


_USER: Turn = {"role": "user", "content": "zquser"}
_ANSWER: Turn = {"role": "assistant", "content": _FIRST}
_CALLING: Turn = {"role": "assistant", "content": "", "tool_calls": [_call(_VALUE)]}
_RESULT: Turn = {"role": "tool", "tool_call_id": _CALL_ID, "name": _NAME, "content": _FIRST}
_THOUGHT = {"reasoning_content": _SECOND}
_REASONING = ([_USER, _ANSWER | _THOUGHT], [_USER, _CALLING | _THOUGHT, _RESULT])

_SYSTEM: Turn = {"role": "system", "content": _FIRST}
_SYSTEMS = (
    [_SYSTEM, _SYSTEM | {"content": _SECOND}, _USER],
    [_SYSTEM, _USER, _SYSTEM | {"content": _SECOND}],
    [
        _SYSTEM,
        _USER,
        {"role": "assistant", "content": "zqthird"},
        _SYSTEM | {"content": _SECOND},
        _USER,
    ],
)

_FEATURES: dict[str, tuple[str, Sequence[list[Turn]]]] = {
    "messages of role system": (_FIRST, ([_ANSWER | {"role": "system"}, _USER],)),
    "messages of role tool": (_FIRST, ([_USER, _CALLING, _RESULT],)),
    "tools": (_NAME, ([_USER],)),
    "tool_calls": (_VALUE, ([_USER, _CALLING],)),
    "content beside tool_calls": (_FIRST, ([_USER, _CALLING | _ANSWER],)),
    "several tool_calls of one message": (
        _SECOND,
        ([_USER, _CALLING | {"tool_calls": [_call(_VALUE), _call(_SECOND)]}],),
    ),
    "reasoning_content": (_SECOND, _REASONING),
}
"""What a template may drop: a word and conversations with it, of which one should show it."""

_QUOTED = re.compile(r"""(text|thinking)\\?['"]: ?\\?['"]zq""")
"""A list of parts written out as a whole, in Python's or JSON's notation."""
_ESCAPED = re.compile(r"""\{'zqkey|\\+["']zqkey""")
"""An object in Python's notation, or JSON text as a string in JSON."""


def features_of(messages: Sequence[Mapping[str, Any]], tools: Any) -> set[str]:
    """What a conversation has that a template may drop."""
    found = {f"messages of role {message['role']}" for message in messages}
    calling = [message for message in messages if message.get("tool_calls")]
    has = {
        "tools": tools,
        "tool_calls": calling,
        "content beside tool_calls": any(message["content"] for message in calling),
        "several tool_calls of one message": any(len(m["tool_calls"]) > 1 for m in calling),
        "reasoning_content": any(message.get("reasoning_content") for message in messages),
    }
    return found.union(feature for feature, is_there in has.items() if is_there)


def find_forms(render: Render) -> MessageForms:
    """The forms that a template takes. One that refuses all of them gets the usual ones."""

    def prompt_of(forms: MessageForms, turns: Iterable[Turn]) -> str:
        converted = forms.convert(turns)
        return render(converted, _TOOLS) or render(converted, None)

    forms = _with_content(prompt_of, MessageForms(), "user")
    forms = _with_content(prompt_of, forms, "assistant", before=[_USER])
    forms = _with_content(prompt_of, forms, "system", after=[_USER])
    if not _shows_systems(prompt_of, forms):
        joined = replace(forms, joins_systems=True)
        forms = joined if _shows_systems(prompt_of, joined) else forms
    forms = _with_calls(prompt_of, forms)
    forms = _with_content(prompt_of, forms, "tool", before=[_USER, _CALLING])
    for tried in (forms, replace(forms, has_thinking_parts=True)):
        if any(_shows(prompt_of, tried, turns, _SECOND) for turns in _REASONING):
            forms = tried
            break
    joined = replace(forms, joins_reasoning=True)
    everything = [_USER, _CALLING | _ANSWER | _THOUGHT]
    if not prompt_of(forms, everything) and _shows(prompt_of, joined, everything, _FIRST, _SECOND):
        forms = joined
    drops = set()
    for feature, (word, conversations) in _FEATURES.items():
        prompts = [render(forms.convert(turns), _TOOLS) for turns in conversations]
        if any(prompts) and not any(word in prompt for prompt in prompts):
            drops.add(feature)
    return replace(forms, drops=frozenset(drops))


def _shows(prompt_of: PromptOf, forms: MessageForms, turns: Iterable[Turn], *words: str) -> bool:
    """Whether words are in a prompt, but not in lists of parts that are written out."""
    prompt = prompt_of(forms, turns)
    return all(word in prompt for word in words) and not _QUOTED.search(prompt)


def _shows_systems(prompt_of: PromptOf, forms: MessageForms) -> bool:
    return all(_shows(prompt_of, forms, turns, _FIRST, _SECOND) for turns in _SYSTEMS)


def _with_content(
    prompt_of: PromptOf,
    forms: MessageForms,
    role: str,
    before: Sequence[Turn] = (),
    after: Sequence[Turn] = (),
) -> MessageForms:
    """The forms with that of a role's content, found between other turns."""

    def shows(content: Content, form: ContentForm, *words: str) -> bool:
        tried = replace(forms, contents={**forms.contents, role: form})
        turn = {**(_RESULT if role == "tool" else {}), "role": role, "content": content}
        return _shows(prompt_of, tried, [*before, turn, *after], *words)

    takes_text = shows(_FIRST, ContentForm(), _FIRST)
    max_parts = 1 if shows(text_parts(_FIRST), ContentForm(max_parts=1), _FIRST) else 0
    if shows(text_parts(_FIRST, _SECOND), ContentForm(max_parts=2), _FIRST, _SECOND):
        max_parts = sys.maxsize
    if not (takes_text or max_parts):
        return forms
    return replace(forms, contents={**forms.contents, role: ContentForm(takes_text, max_parts)})


_CALL_FORMS: list[Turn] = [
    {"empty_content": content, "parses_arguments": is_object}
    for content in ({}, {"content": ""}, {"content": None})
    for is_object in (True, False)
]


def _with_calls(prompt_of: PromptOf, forms: MessageForms) -> MessageForms:
    """The forms with that of calls: one that keeps the arguments as they are, one that keeps them,
    or one that is not refused. Some templates refuse the results of calls."""
    tried = [
        (candidate, text)
        for after in ([_RESULT], [])
        for candidate in (replace(forms, **form) for form in _CALL_FORMS)
        if (text := prompt_of(candidate, [_USER, _CALLING, *after]))
    ]
    shown = [(form, text) for form, text in tried if _VALUE in text]
    intact = [(form, text) for form, text in shown if not _ESCAPED.search(text)]
    found, _ = (intact or shown or tried or [(forms, "")])[0]
    both, split = [_USER, _CALLING | _ANSWER], replace(found, splits_calls=True)
    if not _shows(prompt_of, found, both, _VALUE) and _shows(prompt_of, split, both, _VALUE):
        return split
    return found
