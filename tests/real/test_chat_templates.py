"""The chat templates of the Python packages `trl` and `axolotl`, as `transformers` renders them.

`make test-real` installs the packages into a folder of its own; none of their code runs.

The reference renders each conversation in the forms in which templates take messages, beginning
with the one that its documentation describes (arguments as an object, content as the client sent
it), and the first in which the most of the client's words appear counts.
"""

import copy
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from scheduler_service.errors import InvalidArgument
from tests.support.chat_templates import model_with, prompt_of
from tests.support.tokenizers import BOS, EOS
from tools.launch import ROOT

pytestmark = pytest.mark.real

FOLDERS = (
    ROOT / "build/real-templates/trl/chat_templates",
    ROOT / "build/real-templates/axolotl/utils/chat_templates/templates",
)
TEMPLATES = [path for folder in FOLDERS for path in sorted(folder.glob("*.jinja"))]

Messages = list[dict[str, Any]]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def call(number: int) -> dict[str, Any]:
    arguments = json.dumps({"city": f"Town{number}", "days": number})
    function = {"name": "forecast", "arguments": arguments}
    return {"id": f"abcdefgh{number}", "type": "function", "function": function}


def calling(content: Any, *numbers: int, **fields: Any) -> dict[str, Any]:
    calls = [call(number) for number in numbers or (1,)]
    return {"role": "assistant", "content": content, **fields, "tool_calls": calls}


def result(number: int, content: Any = None) -> dict[str, Any]:
    content = content or f"Sunny{number}"
    return {"role": "tool", "tool_call_id": f"abcdefgh{number}", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


THOUGHT = "reasoning_content"
SYSTEM = {"role": "system", "content": "Be brief."}
LATER = {"role": "system", "content": "Be kind."}
PROPERTIES = {"city": {"type": "string", "description": "Where."}, "days": {"type": "integer"}}
FORECAST = {
    "name": "forecast",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
}
TOOLS = {"tools": [{"type": "function", "function": FORECAST}]}
CONTINUED = {"continue_final_message": True}
ASKED, ANSWERED = user("Weather?"), assistant("Fine.")

SITUATIONS: dict[str, tuple[Messages, dict[str, Any]]] = {
    "one question": ([user("Hello?")], {}),
    "a system message": ([SYSTEM, user("Hello?"), assistant("Hi!"), user("And?")], {}),
    "two system messages": ([SYSTEM, LATER, user("Hello?")], {}),
    "a later system message": ([SYSTEM, user("Hello?"), assistant("Hi!"), LATER, user("And?")], {}),
    "no generation prompt": ([user("Hello?"), assistant("Hi!")], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, user("Weather?")], TOOLS),
    "a call without content": ([ASKED, calling(None), result(1)], TOOLS),
    "a call with empty content": ([ASKED, calling(""), result(1), ANSWERED, ASKED], TOOLS),
    "a call with a text": ([ASKED, calling("Let me look."), result(1)], TOOLS),
    "several calls": ([ASKED, calling(None, 1, 2), result(1), result(2), ANSWERED], TOOLS),
    "a call without tools": ([ASKED, calling(None), result(1)], {}),
    "reasoning": (
        [user("Hello?"), assistant("Hi!", reasoning_content="A greeting."), user("And?")],
        {},
    ),
    "reasoning at the end": (
        [user("Hello?"), assistant("Hi!", reasoning_content="A greeting.")],
        {"add_generation_prompt": False},
    ),
    "reasoning before a call": (
        [ASKED, calling(None, reasoning_content="Weather is asked."), result(1)],
        TOOLS,
    ),
    "reasoning and a text before a call": (
        [ASKED, calling("Let me look.", reasoning_content="Weather is asked."), result(1)],
        TOOLS,
    ),
    "one part": ([user(parts("Hello?"))], {}),
    "several parts": (
        [
            {"role": "system", "content": parts("Be", "brief.")},
            user(parts("Hello, ", "how are you?")),
            assistant(parts("Well.", "And you?")),
            user(parts("Fine.")),
        ],
        {},
    ),
    "a result in parts": ([ASKED, calling(None), result(1, parts("Sunny", "Warm"))], TOOLS),
    "continuing": ([user("Count."), assistant("One, two")], CONTINUED),
    "continuing white space": ([user("Count."), assistant("  One,\n\n")], CONTINUED),
    "continuing a part": ([user("Count."), assistant(parts("One, ", "two, "))], CONTINUED),
    "continuing a thought": (
        [user("Count."), assistant("One,\n", reasoning_content="They want numbers.")],
        CONTINUED,
    ),
}


LISTS = ("as sent", "text", "one part")
EMPTY: dict[str, dict[str, Any]] = {
    "absent": {},
    "empty": {"content": ""},
    "null": {"content": None},
}


def forms_of(messages: Messages, *, split: bool) -> Iterator[Messages]:
    """The messages in all forms, the documented ones first. split: whether calls beside a text are
    a turn of their own."""
    has_calls = any("tool_calls" in message for message in messages)
    call_forms = itertools.product(EMPTY, (True, False)) if has_calls else [("absent", True)]
    for (empty, is_object), *lists in itertools.product(call_forms, LISTS, LISTS, LISTS):
        by_role = dict(zip(("user", "assistant", "others"), lists, strict=True))
        yield [
            turn
            for message in copy.deepcopy(messages)
            for turn in in_form(message, by_role, EMPTY[empty], is_object=is_object, split=split)
        ]


def in_form(
    message: dict[str, Any],
    lists: dict[str, str],
    empty: dict[str, Any],
    *,
    is_object: bool,
    split: bool,
) -> Iterator[dict[str, Any]]:
    content = message["content"]
    form = lists.get(message["role"], lists["others"])
    if content and form != "as sent":
        joined = content if isinstance(content, str) else "\n".join(map(text_of, content))
        message["content"] = joined if form == "text" else parts(joined)
    calls = message.get("tool_calls", ())
    for made in calls if is_object else ():
        made["function"]["arguments"] = json.loads(made["function"]["arguments"])
    if calls and "reasoning_content" in message:
        message["tool_plan"] = message["reasoning_content"]
    if calls and (split or not content):
        if content:
            yield {name: value for name, value in message.items() if name != "tool_calls"}
        del message["content"]
        message |= empty
    yield message


def text_of(part: dict[str, str]) -> str:
    return part["text"]


WRITTEN_OUT = re.compile(r"""text\\*['"]: ?\\*['"]""")
ESCAPED = re.compile(r"""\{'city'|\\+"city""")


def reference(template: str, messages: Messages, fields: dict[str, Any]) -> str | None:
    """What `transformers` makes of the messages; None if it refuses them in every form."""

    def best(split: bool) -> tuple[int, str]:
        found = (-1, "")
        for form in forms_of(messages, split=split):
            prompt = rendered(template, form, fields)
            if prompt is not None and (score := score_of(prompt, messages)) > found[0]:
                found = score, prompt
                if score == score_of(None, messages):
                    break
        return found

    score, prompt = best(split=False)
    if score < 0 and (thoughtful := with_text_in_reasoning(messages)) != messages:
        return reference(template, thoughtful, fields)
    systems = [message for message in messages if message["role"] == "system"]
    if score < score_of(None, messages) and len(systems) > 1:
        content = "\n".join(message["content"] for message in systems)
        others = [message for message in messages if message not in systems]
        joined = reference(template, [{**SYSTEM, "content": content}, *others], fields)
        if joined and score_of(joined, messages) == score_of(None, messages):
            return joined
    if score < CALL_POINTS * num_calls(messages) and (split := best(split=True))[0] > score:
        score, prompt = split
    return prompt if score >= 0 else None


def with_text_in_reasoning(messages: Messages) -> Messages:
    """The messages, the text of those with reasoning and calls at the end of the reasoning."""
    return [
        {**message, "content": None, "reasoning_content": f"{thought}\n{message['content']}"}
        if "tool_calls" in message and message["content"] and (thought := message.get(THOUGHT))
        else message
        for message in messages
    ]


def rendered(template: str, messages: Messages, fields: dict[str, Any]) -> str | None:
    variables = {"add_generation_prompt": not fields.get("continue_final_message"), **fields}
    try:
        (prompt,), _ = render_jinja_template(
            [messages], chat_template=template, bos_token=BOS, eos_token=EOS, **variables
        )
    except (jinja2.TemplateError, TypeError, ValueError, LookupError):
        return None
    return str(prompt)


CALL_POINTS = 1000


def num_calls(messages: Messages) -> int:
    return sum(len(message.get("tool_calls", ())) for message in messages)


def score_of(prompt: str | None, messages: Messages) -> int:
    """Points for what is in the prompt, most of them for calls; None: the most there can be."""
    contents = [message["content"] for message in messages if message["content"]]
    texts = [
        text
        for content in contents
        for text in ([content] if isinstance(content, str) else map(text_of, content))
    ]
    if prompt is None:
        return CALL_POINTS * num_calls(messages) + len(texts)
    calls = sum(f"Town{number}" in prompt for number in (1, 2))
    points = CALL_POINTS * calls + sum(text.strip() in prompt for text in texts)
    return (
        points
        - CALL_POINTS // 2 * bool(ESCAPED.search(prompt))
        - 100 * bool(WRITTEN_OUT.search(prompt))
    )


def ours(template: str, messages: Messages, fields: dict[str, Any]) -> str | None:
    try:
        return prompt_of(model_with(template), messages, **fields)
    except InvalidArgument:
        return None


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_real_template_gets_what_transformers_gives_it(path: Path) -> None:
    template = path.read_text()
    for name, (messages, fields) in SITUATIONS.items():
        expected = reference(template, messages, fields)
        assert (name, ours(template, messages, fields)) == (name, expected)


def test_there_are_over_a_hundred_real_templates() -> None:
    assert len(TEMPLATES) >= 108
