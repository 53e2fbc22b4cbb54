"""Each family's calls, however the text is cut into pieces."""

import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.frontend.chat_formats.constrained import (
    NamedParser,
    RequiredParser,
)
from scheduler_service.frontend.chat_formats.events import (
    CallArguments,
    CallStart,
    Content,
    Event,
    MessageParser,
)
from scheduler_service.frontend.chat_formats.formats import (
    HERMES,
    LLAMA,
    MISTRAL,
    find_format,
)
from scheduler_service.frontend.chat_formats.hermes import HermesParser
from scheduler_service.frontend.chat_formats.llama import LlamaParser
from scheduler_service.frontend.chat_formats.mistral import MistralParser

NAMES = frozenset({"get_weather", "add"})
PARSERS: dict[str, Callable[[], MessageParser]] = {
    "hermes": lambda: HermesParser(NAMES),
    "llama": lambda: LlamaParser(NAMES),
    "mistral": lambda: MistralParser(NAMES),
    "required": lambda: RequiredParser(NAMES),
    "named": lambda: NamedParser("add"),
}
PARIS = '{"city": "Pa\\"r}i]s", "at": [1, {"x": null}]}'
WEATHER = '{"name": "get_weather", "arguments": ' + PARIS + "}"
ADD = '{"parameters": {"a": 1, "b": 2}, "name": "add"}'
SUM = '{"a": 1, "b": 2}'

Outcome = tuple[str, list[tuple[str, str]]]

CASES: list[tuple[str, str, Outcome]] = [
    ("hermes", "no call < here <tool", ("no call < here <tool", [])),
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", ("", [("get_weather", PARIS)])),
    (
        "hermes",
        f"Let me see.\n<tool_call>{WEATHER}</tool_call>\n<tool_call>\n{ADD}</tool_call>",
        ("Let me see.", [("get_weather", PARIS), ("add", SUM)]),
    ),
    ("hermes", f"<tool_call>{WEATHER}", ("", [("get_weather", PARIS)])),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', ("", [("add", "{}")])),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        ("", [("add", '{"a": 1}')]),
    ),
    (
        "hermes",
        '<tool_call>{"name": "other"}</tool_call>',
        ('<tool_call>{"name": "other"}</tool_call>', []),
    ),
    ("hermes", "<tool_call>nonsense", ("<tool_call>nonsense", [])),
    ("hermes", '<tool_call>{"name": "ad', ('<tool_call>{"name": "ad', [])),
    (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "\\ud83d\\ude00 \\ud800"}</tool_call>',
        ("", [("add", "\U0001f600 \ufffd")]),
    ),
    ("llama", "The answer is {5}.", ("The answer is {5}.", [])),
    ("llama", '{"name": "add", "parameters": ' + SUM + "}", ("", [("add", SUM)])),
    ("llama", f"<|python_tag|>{WEATHER}; {ADD}", ("", [("get_weather", PARIS), ("add", SUM)])),
    ("llama", '{"answer": 5}', ('{"answer": 5}', [])),
    ("llama", '{"name": "nobody", "x": 1} yes', ('{"name": "nobody", "x": 1} yes', [])),
    ("llama", "<|python", ("<|python", [])),
    ("llama", f"<|python_tag|>{WEATHER[:-2]}", ("", [("get_weather", PARIS[:-1])])),
    ("llama", f'{ADD}; {{"name": "add", "parameters": {{"a', ("", [("add", SUM), ("add", '{"a')])),
    ("llama", f"{ADD};", ("", [("add", SUM)])),
    ("llama", f"{ADD}; done", ("done", [("add", SUM)])),
    ("llama", "  ", ("", [])),
    ("mistral", "a [TOOL] b", ("a [TOOL] b", [])),
    (
        "mistral",
        f"[TOOL_CALLS] [{WEATHER}, {ADD}]",
        ("", [("get_weather", PARIS), ("add", SUM)]),
    ),
    (
        "mistral",
        f"Well[TOOL_CALLS]get_weather{PARIS}[TOOL_CALLS]add[ARGS]{SUM}",
        ("Well", [("get_weather", PARIS), ("add", SUM)]),
    ),
    ("mistral", f"[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{SUM}", ("", [("add", SUM)])),
    ("mistral", "[TOOL_CALLS]I cannot", ("I cannot", [])),
    ("mistral", '[TOOL_CALLS][{"name": "ad', ('{"name": "ad', [])),
    ("mistral", f"[TOOL_CALLS][{WEATHER[:-2]}", ("", [("get_weather", PARIS[:-1])])),
    ("mistral", f"[TOOL_CALLS]get_weather{PARIS[:-1]}", ("", [("get_weather", PARIS[:-1])])),
    ("required", f"[{ADD},\n {WEATHER}]", ("", [("add", SUM), ("get_weather", PARIS)])),
    ("required", '[{"name": "add", "parameters": {"a', ("", [("add", '{"a')])),
    ("named", SUM, ("", [("add", SUM)])),
]


def outcome(parser: MessageParser, pieces: Iterable[str]) -> Outcome:
    """All text, and all calls with their arguments."""
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish()
    text, calls = "", []
    for event in events:
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + event.text)
        elif isinstance(event, Content):
            text += event.text
    return text, calls


@pytest.mark.parametrize(("kind", "text", "expected"), CASES)
def test_whole_and_letter_by_letter(kind: str, text: str, expected: Outcome) -> None:
    whole = outcome(PARSERS[kind](), [text])
    assert (whole[0].strip(), whole[1]) == (expected[0].strip(), expected[1])
    letters = outcome(PARSERS[kind](), text)
    assert (letters[0].strip(), letters[1]) == (expected[0].strip(), expected[1])


@given(st.sampled_from(CASES), st.data())
def test_any_cut_gives_the_same(case: tuple[str, str, Outcome], data: st.DataObject) -> None:
    kind, text, _ = case
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    cut = outcome(PARSERS[kind](), pieces)
    whole = outcome(PARSERS[kind](), [text])
    assert (cut[0].strip(), cut[1]) == (whole[0].strip(), whole[1])


@given(
    st.sampled_from(["hermes", "llama", "mistral", "required"]),
    st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
                *('{}[]:,"\\ x'),
                *('"name"', "add", '"add"', '"arguments"'),
            ]
        )
    ),
)
def test_no_text_makes_a_parser_fail_or_call_what_there_is_not(kind: str, parts: list[str]) -> None:
    _, calls = outcome(PARSERS[kind](), parts)
    assert all(name in NAMES for name, _ in calls)


def test_a_name_nested_beyond_sense_is_no_call() -> None:
    text = '{"name": ' + "[" * 100_000 + "]" * 100_000 + "}"
    assert outcome(LlamaParser(NAMES), [text]) == (text, [])


@pytest.mark.parametrize("kind", ["hermes", "llama", "mistral", "required"])
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_arguments_of_any_kind_come_through(kind: str, value: object) -> None:
    arguments = json.dumps({"value": value}, ensure_ascii=False)
    call = f'{{"name": "add", "arguments": {arguments}}}'
    text = {
        "hermes": f"<tool_call>{call}</tool_call>",
        "llama": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "required": f"[{call}]",
    }[kind]
    assert outcome(PARSERS[kind](), text) == ("", [("add", arguments)])


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ('… <tool_call>\\n{"name": …', HERMES),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ('{% if message.role == \'ipython\' %} {"name": x, "parameters": y}', LLAMA),
        ("{{ messages }}", HERMES),
        (None, HERMES),
    ],
)
def test_the_template_tells_the_format(template: str | None, expected: object) -> None:
    assert find_format(template, template, lambda token: False).calls is expected
