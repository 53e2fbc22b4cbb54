"""Thoughts, calls and text in every format, however the text is cut into pieces.

`well_formed` has what models write; here it is cut, and its marks are dropped, doubled and nested.
Every text has to give the same answer in pieces of 1, 3 and 7 characters as at once, and each of
its words, other than those of the format itself, has to come out again.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler_service.frontend.chat_formats.events import Part
from scheduler_service.frontend.chat_formats.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    ChatFormat,
    find_format,
)
from scheduler_service.frontend.chat_formats.parser import FormatParser
from tests.scheduler_service.frontend.chat_formats.well_formed import (
    ADD,
    CALLS,
    FUNCTIONS,
    PARIS,
    THOUGHTS,
)

WORDS_OF_FORMATS = (
    "function functions functools json name arguments parameters tool_name tool_call_id call to id "
    "commentary analysis final assistant city days a note thought get_weather add 0 1 constrain "
    "Here is s my process response atem invoke CALL_ID 9chars123 ARGS TOOL_CALLS string true false"
)
"""What a format writes around values."""


class Outcome(NamedTuple):
    """Content, reasoning, and calls by name and arguments."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def outcome(parser: FormatParser, pieces: Iterable[str]) -> Outcome:
    parts: list[Part] = []
    for piece in pieces:
        parts += parser.push(piece)
    parts += parser.finish()
    texts = {"text": "", "reasoning": ""}
    calls: list[tuple[str, str]] = []
    for part in parts:
        if part.kind == "call":
            assert part.call == len(calls)
            calls.append((part.text, ""))
        elif part.kind == "arguments":
            assert part.call == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
        else:
            texts[part.kind] += part.text
    return Outcome(texts["text"], texts["reasoning"], calls)


def chat_format(calls: str = "none", reasoning: str = "none") -> ChatFormat:
    return find_format(
        *(None, None, lambda token: False),
        reasoning_parser=reasoning.partition(",")[0],
        tool_call_parser=calls.partition(",")[0],
    )


def pieces(text: str, length: int) -> list[str]:
    return [text[start : start + length] for start in range(0, len(text), length)]


def parsed(form: ChatFormat, text: str) -> Outcome:
    """The outcome of a text, the same in pieces of any length."""
    whole = outcome(form.parser(FUNCTIONS), [text])
    for length in (1, 3, 7):
        assert outcome(form.parser(FUNCTIONS), pieces(text, length)) == whole
    return whole


def values(result: Outcome) -> list[tuple[str, object]]:
    return [(name, json.loads(arguments)) for name, arguments in result.calls]


def marks(form: ChatFormat) -> list[str]:
    """Everything that a format recognizes literally."""
    found: list[str] = []
    if form.calls is not None:
        found += [*form.calls.openings, *form.calls.closings]
        found += [*form.calls.call_openings, *form.calls.call_closings]
        found += [form.calls.parameters.opening, form.calls.parameters.closing]
    if form.reasoning is not None:
        found += [*form.reasoning.openings, *form.reasoning.closings, *form.reasoning.framing]
        found += form.reasoning.answer
    if form.calls is not None:
        found += form.calls.framing
    return sorted({*found, *form.special_tokens} - {""}, key=len, reverse=True)


def assert_nothing_is_lost(form: ChatFormat, text: str, result: Outcome) -> None:
    """Every word of the text that is no mark is in the answer."""
    output = [result.content, result.reasoning]
    for name, arguments in result.calls:
        output += [name, arguments]
    mark = "|".join(map(re.escape, marks(form))) or "(?!)"
    expected, found = words(re.sub(mark, " ", text)), re.sub(mark, " ", " ".join(output))
    lost = expected - words(found)
    for word in WORDS_OF_FORMATS.split():
        del lost[word]
    # Where a call was, the words around it may have become one.
    assert all(found.count(word) >= expected[word] for word in lost), (text, result)


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.replace("\\t", " ").replace("\\n", " ")))


def texts_of_calls(name: str) -> Iterator[str]:
    """Forty texts or more: cut, and with marks dropped, doubled, nested and out of place."""
    form, calls = chat_format(name), CALLS[name]
    text = f"First.\n{calls.two()}\nLast." if calls.opening else f"{calls.two()}\nLast."
    step = max(1, len(text) // 12)
    for end in range(1, len(text), step):
        yield text[:end]
    for mark in marks(form):
        if mark in text:
            yield text.replace(mark, "")
            yield text.replace(mark, "", 1)
            yield text.replace(mark, mark + mark)
            yield text.replace(mark, mark + " word ")
            yield text.replace("Paris", f"in {mark} Paris")
            yield text.replace("First.", f"First {mark} text.")
            yield f"{mark} {text}"
            yield f"{text} {mark}"
    for character in '{}[]()",:<>':
        yield text.replace(character, "", 1)
        yield character.join(text.rsplit(character, 1)[::-1])
        yield text.replace("3", f"3{character}")
    for thought in ("<think>hidden</think>", "<think>", "</think>"):
        yield thought + text
        yield text.replace("Paris", thought + "Paris")
    yield text + text
    yield text.replace("get_weather", "unknown")
    yield text.replace("add", "unknown")
    yield calls.first + calls.second
    yield calls.opening + calls.first + calls.first
    yield calls.opening + calls.opening + calls.first + calls.closing + calls.closing
    yield calls.closing + calls.opening
    yield " \n" + calls.one() + "\n\n" + calls.one() + " \n"


@pytest.mark.parametrize("name", CALLS)
def test_well_formed_calls_are_calls(name: str) -> None:
    calls, form = CALLS[name], chat_format(name)
    assert values(parsed(form, calls.one())) == [("get_weather", PARIS)]
    result = parsed(form, calls.two())
    assert values(result) == [("get_weather", PARIS), ("add", ADD)]
    assert result.content == ""
    result = parsed(form, f"{calls.two()}\n\nDone.")
    assert (values(result), result.content) == ([("get_weather", PARIS), ("add", ADD)], "Done.")
    if calls.opening[:1] not in ("[", "") or calls.first[0] not in "{g":
        result = parsed(form, f"I look.\n{calls.two()}\n\nDone.")
        assert values(result) == [("get_weather", PARIS), ("add", ADD)]
        assert result.content == "I look.\nDone."


@pytest.mark.parametrize("name", CALLS)
def test_malformed_calls_lose_no_word_depend_on_no_cut_and_have_valid_arguments(name: str) -> None:
    form = chat_format(name)
    texts = list(texts_of_calls(name))
    assert len(texts) >= 40
    for text in texts:
        result = parsed(form, text)
        assert_nothing_is_lost(form, text, result)
        for _, arguments in result.calls[:-1]:
            json.loads(arguments)


@pytest.mark.parametrize("name", CALLS)
def test_marks_within_a_text_argument_are_part_of_it(name: str) -> None:
    form, calls = chat_format(name), CALLS[name]
    for mark in marks(form):
        if mark in ends_of_text(form):
            continue
        result = parsed(form, calls.two().replace("Paris", f"near {mark} Paris"))
        city = {"city": f"near {mark} Paris", "days": 3}
        assert values(result) == [("get_weather", city), ("add", ADD)], mark


HALVES = {
    r"\ud83d\ude00!": "\N{GRINNING FACE}!",
    r"\ud83d!": "\ufffd!",
    r"\ude00!": "\ufffd!",
    r"\ud83d\ud83d\ude00": "\ufffd\N{GRINNING FACE}",
    r"\uD83D\n\ude00": "\ufffd\n\ufffd",
    r"\ud83d\u0041": "\ufffdA",
    r"\\ud83d": r"\ud83d",
}
"""Escapes in JSON, and the text that they are."""


@pytest.mark.parametrize("written", HALVES)
def test_half_a_character_in_arguments_is_a_replacement_character(written: str) -> None:
    """Nothing could encode it: not the answer in some of its forms, nor the next turn's prompt."""
    arguments, form = f'{{"city": "{written}"}}', chat_format("hermes")
    call = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    assert values(parsed(form, call)) == [("get_weather", {"city": HALVES[written]})]
    for length in (1, 3, 7, len(arguments)):
        parser = form.parser(FUNCTIONS, required="get_weather")
        found = outcome(parser, pieces(arguments, length))
        assert values(found) == [("get_weather", {"city": HALVES[written]})]


@pytest.mark.parametrize(
    ("inner", "expected"),
    [(r'{"city": "\ud83d!"}', '{"city": "\\ufffd!"}'), ('{"days": 3,}', '{"days": 3}')]
    + [(text, json.dumps(text)) for text in ('{"days": NaN}', "[" * 300 + "]" * 300, "Paris")],
)
def test_arguments_in_a_string_are_as_valid_as_others(inner: str, expected: str) -> None:
    wish = json.dumps({"name": "get_weather", "arguments": inner})
    found = parsed(chat_format("hermes"), f"<tool_call>{wish}</tool_call>")
    assert found.calls == [("get_weather", expected)]


@pytest.mark.parametrize("end", range(1, 13))
def test_required_arguments_that_are_cut_within_an_escape_are_as_they_were(end: int) -> None:
    arguments = '{"city": "' + r"\ud83d\ude00"[:end]
    for length in (1, 3, 7, len(arguments)):
        parser = chat_format("hermes").parser(FUNCTIONS, required="get_weather")
        found = outcome(parser, pieces(arguments, length))
        assert found.calls == [("get_weather", arguments)]


def ends_of_text(form: ChatFormat) -> tuple[str, ...]:
    """The marks that end a text argument where they are."""
    assert form.calls is not None
    tags = form.calls.parameters
    return (tags.opening, tags.closing) if tags.opening else form.calls.dialect.quotes


@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize("call", ["hermes", "qwen3_coder", "kimi_k2"])
def test_thoughts_are_apart_and_calls_within_them_are_part_of_them(name: str, call: str) -> None:
    before, after, end = THOUGHTS[name]
    form = chat_format("openai" if name == "openai_gptoss" else call, name)
    calls = CALLS["openai" if name == "openai_gptoss" else call]
    inner = CALLS[call].one()
    result = parsed(form, f"{before}First {inner} I see.{after}Yes.\n{calls.one()}{end}")
    assert result.reasoning == f"First {inner} I see."
    assert result.content == "Yes."
    assert values(result) == [("get_weather", PARIS)]


@pytest.mark.parametrize("name", THOUGHTS)
def test_malformed_thoughts_lose_no_word_and_depend_on_no_cut(name: str) -> None:
    before, after, end = THOUGHTS[name]
    form = chat_format("hermes", name)
    text = f"{before}Let me see.\nIt rains.{after}It rains, \nmostly.{end}"
    texts = [text[:length] for length in range(len(text))]
    for mark in marks(form):
        texts += [text.replace(mark, ""), text.replace(mark, mark * 2), text.replace(mark, "", 1)]
        texts += [text.replace("rains", f"{mark} rains"), f"{mark}{text}", text + mark]
    texts += [f"Text. {text}", text + text, text.replace("rains", CALLS["hermes"].one())]
    assert len(texts) >= 40
    for changed in texts:
        assert_nothing_is_lost(form, changed, parsed(form, changed))


def test_long_texts_that_turn_out_to_be_no_calls_are_text_and_a_later_call_is_one() -> None:
    form = chat_format("hermes")
    no_call = '<tool_call>{"arguments": "' + "<tool_call> " * 40_000 + '"}\n'
    text = 3 * no_call
    result = outcome(form.parser(FUNCTIONS), pieces(text + CALLS["hermes"].one(), 10_000))
    assert (result.content, values(result)) == (text.strip(), [("get_weather", PARIS)])


EVERY_FORMAT = [
    *(ChatFormat(calls=calls) for calls in CALL_FORMATS),
    *(ChatFormat(reasoning, CALL_FORMATS[-1]) for reasoning in REASONING_FORMATS),
    ChatFormat(REASONING_FORMATS[0], CALL_FORMATS[0]),
]


@given(st.sampled_from(EVERY_FORMAT), st.data())
def test_no_cut_of_any_mixture_of_marks_changes_the_answer(
    form: ChatFormat, data: st.DataObject
) -> None:
    literal = [*marks(form), *"{}[]():=,;\"'\\ \n", '{"name": "add"', '"arguments": {', "call:"]
    literal += ["add", "get_weather", "functions.", "word", "1", '"a": ', "a=", "</", "```json"]
    parts = data.draw(st.lists(st.sampled_from(literal), max_size=25))
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    cut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    result = outcome(form.parser(FUNCTIONS), [text])
    assert outcome(form.parser(FUNCTIONS), cut) == result
    assert outcome(form.parser(FUNCTIONS), text) == result
    assert {name for name, _ in result.calls} <= set(FUNCTIONS)
    for _, arguments in result.calls[:-1]:
        json.loads(arguments)
    assert_nothing_is_lost(form, text, result)


CAPITALS = re.compile("[A-Z]")
"""In the values of calls and in the text around them, but in no name or key."""


@given(st.sampled_from(sorted(CALLS)), st.sampled_from(sorted(THOUGHTS)), st.data())
def test_no_cut_of_a_damaged_answer_changes_it(
    name: str, thought: str, data: st.DataObject
) -> None:
    form = chat_format(name, thought)
    before, after, end = THOUGHTS[thought]
    text = f"{before}See.{after}I look.\n{CALLS[name].two()} Done.\n{CALLS[name].one()}{end}"
    literal = [*marks(form), *"{}[]():=,;\"'\\ \n", "word", "\\u12", "</"]
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.sampled_from([0, 0, 1, 2, 10, 40]))
        added = "".join(data.draw(st.lists(st.sampled_from(literal), max_size=2)))
        text = text[:start] + added + text[start + length :]
    cut = pieces(text, data.draw(st.integers(1, 40)))
    result = outcome(form.parser(FUNCTIONS), [text])
    assert outcome(form.parser(FUNCTIONS), cut) == result
    assert outcome(form.parser(FUNCTIONS), text) == result
    for _, arguments in result.calls[:-1]:
        json.loads(arguments)
    parts = [result.content, result.reasoning, *(part for call in result.calls for part in call)]
    written, output = without_marks(form, text), without_marks(form, " ".join(parts))
    lost = Counter(CAPITALS.findall(written)) - Counter(CAPITALS.findall(output))
    assert not lost, (text, result)


def without_marks(form: ChatFormat, text: str) -> str:
    """What is left of a text when no mark is left in it."""
    mark = re.compile("|".join(map(re.escape, marks(form))))
    while mark.search(text):
        text = mark.sub("", text)
    return text
