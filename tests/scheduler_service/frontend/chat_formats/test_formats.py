"""Which format a model uses, and what its prompt says about thoughts."""

import json

import pytest

from scheduler_service.frontend.chat_formats.formats import (
    CALL_FORMATS,
    REASONING_FORMATS,
    ChatFormat,
    find_format,
)
from tests.scheduler_service.frontend.chat_formats.test_parser import (
    Outcome,
    chat_format,
    outcome,
    pieces,
)
from tests.scheduler_service.frontend.chat_formats.well_formed import CALLS, FUNCTIONS


def found(template: str | None, *tokens: str) -> tuple[str | None, str | None]:
    """The names of the formats that a template and a vocabulary with these tokens show."""
    form = find_format(template, template, tokens.__contains__)
    reasoning, calls = form.reasoning, form.calls
    return reasoning and reasoning.names[0], calls and calls.names[0]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", (None, "hermes")),
        (None, (None, "hermes")),
        ('… <tool_call>\\n{"name": …', (None, "hermes")),
        ("<think> <tool_call>\n<function=a>\n<parameter=b>", ("qwen3", "qwen3_xml")),
        ("</think> <tool_call>{name}\n<arg_key>", ("qwen3", "glm45")),
        ("{{ '[TOOL_CALLS] [' }} [THINK]", ("mistral", "mistral")),
        ("{{ '<|python_tag|>' }}", (None, "llama3_json")),
        ('\'ipython\' {"name": x, "parameters": y}', (None, "llama3_json")),
        ("<|channel|>analysis<|message|>", ("openai_gptoss", "openai")),
        ("<|channel>thought <|tool_call>", ("gemma4", "gemma4")),
        ("<seed:think> <seed:tool_call> <function=", ("seed_oss", "seed_oss")),
        ("<|START_THINKING|> <|START_ACTION|>", ("cohere_command3", "cohere_command3")),
        ("Here is my thought process <|tool_call|>", ("granite", "granite")),
        ("<think> <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", ("qwen3", "deepseek_v3")),
    ],
)
def test_the_template_shows_the_formats(
    template: str | None, expected: tuple[str | None, str | None]
) -> None:
    assert found(template) == expected


def test_the_vocabulary_shows_calls_that_the_template_does_not() -> None:
    assert found("{{ messages }}", "[TOOL_CALLS]") == (None, "mistral")
    assert found("{{ messages }}", "<|tool_call_start|>", "<|im_end|>") == (None, "lfm2")
    assert found("<tool_call>", "[TOOL_CALLS]") == (None, "hermes")


def test_a_named_parser_takes_precedence_and_an_unknown_one_is_an_error_that_lists_them() -> None:
    form = find_format(
        *("<think> <tool_call>", None, lambda token: False),
        reasoning_parser="none",
        tool_call_parser="mistral",
    )
    assert form == ChatFormat(None, form.calls)
    assert form.calls
    assert form.calls.names == ("mistral",)
    with pytest.raises(ValueError, match=r"reasoning_parser: .*deepseek_r1.*; got 'deepseek'"):
        chat_format(reasoning="deepseek")
    with pytest.raises(
        ValueError, match=r"tool_call_parser: .*hermes, jamba, kimi_k2.*; got 'llama'"
    ):
        chat_format("llama")


def test_names_are_unique() -> None:
    for formats in (CALL_FORMATS, REASONING_FORMATS):
        names = [name for form in formats for name in form.names]
        assert len(names) == len(set(names))


def test_the_tokens_that_stay_in_the_text_are_those_of_the_marks() -> None:
    assert chat_format("mistral", "mistral").special_tokens == {
        *("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]")
    }
    assert chat_format("deepseek_v3", "deepseek_r1").special_tokens == {
        *("<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
    }
    assert '<|"|>' in chat_format("gemma4").special_tokens
    assert "<|channel|>" in chat_format("openai").special_tokens


FINAL = ("<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>")


def thought(start: str, *ends: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """A thought that begins with a mark, before which there may be white space."""
    return start, ends, tuple(space + start for space in ("\n", "\n\n", " "))


THOUGHTS = [
    ("qwen3", "<|im_start|>assistant\n", thought("<think>", "</think>")),
    ("qwen3", "<|im_start|>assistant\n<think>\n", ("", ("</think>",), ())),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", None),
    ("deepseek_r1", "<｜Assistant｜>", ("", ("</think>",), ())),
    ("openai_gptoss", "<|start|>assistant", thought("<|channel|>", *FINAL)),
    ("granite", "<|end_of_role|>", ("Here", ("Here is my response:", "Here's my response:"), ())),
    ("cohere_command3", "<|CHATBOT_TOKEN|>", thought("<|START_", "<|START_RESPONSE|>")),
    ("muse_glimmer", "<|start|>assistant", thought("to=", "to=user<|message|>")),
    ("none", "<|im_start|>assistant\n<think>\n", None),
]


@pytest.mark.parametrize(("reasoning", "prompt", "expected"), THOUGHTS)
def test_a_constraint_follows_the_thought_that_an_answer_may_have(
    reasoning: str, prompt: str, expected: object
) -> None:
    assert chat_format(reasoning=reasoning).thought(prompt) == expected


PROMPTS = [
    ("qwen3", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
    ("qwen3", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
    ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("qwen3", "<|im_start|>assistant\n<think>\nI wonder", True),
    ("qwen3", "<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ("qwen3", "What is <think>? ASSISTANT:", False),
    ("qwen3", "What? ASSISTANT: <think>\n", True),
    ("deepseek_r1", "<｜User｜>hi<｜Assistant｜><think>\n", True),
    ("glm45", "<|user|>\nhi<|assistant|>\n<think></think>", False),
    ("openai_gptoss", "<|start|>assistant", False),
    ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>Let", True),
    ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>It", False),
    ("none", "<|im_start|>assistant\n<think>\n", False),
]


@pytest.mark.parametrize(("reasoning", "prompt", "expected"), PROMPTS)
def test_the_last_turn_of_a_prompt_shows_whether_it_opens_a_thought(
    reasoning: str, prompt: str, expected: bool
) -> None:
    form = chat_format(reasoning=reasoning)
    found = form.thought(prompt)
    assert (found is not None and not found.start) is expected
    assert form.parser({}, prompt=prompt).in_reasoning is expected


def answered(form: ChatFormat, text: str, prompt: str = "") -> Outcome:
    """The outcome of a text after a prompt, the same in pieces of any length."""
    whole = outcome(form.parser({}, prompt=prompt), [text])
    for length in (1, 3, 7):
        assert outcome(form.parser({}, prompt=prompt), pieces(text, length)) == whole
    return whole


def test_a_thought_that_the_prompt_opens_goes_on_in_the_answer() -> None:
    form = chat_format(reasoning="qwen3")
    prompt = "<|im_start|>assistant\n<think>\n"
    assert answered(form, "I see.\n</think>\n\nYes.", prompt) == ("Yes.", "I see.", [])
    assert answered(form, " that\n</think>Yes.", prompt + "I see") == ("Yes.", " that", [])
    assert answered(form, "Yes.", prompt + "I see.</think>") == ("Yes.", "", [])


def test_an_answer_of_deepseek_r1_begins_within_a_thought() -> None:
    r1, qwen = chat_format(reasoning="deepseek_r1"), chat_format(reasoning="qwen3")
    assert answered(r1, "I see.\n</think>\n\nYes.") == ("Yes.", "I see.", [])
    assert answered(r1, "I see. Yes.") == ("", "I see. Yes.", [])
    assert answered(r1, "<think>I see.</think>Yes.") == ("Yes.", "I see.", [])
    text = "It ends with </think> there."
    assert answered(qwen, text) == (text, "", [])


def test_text_that_only_mentions_a_thought_is_text() -> None:
    form = chat_format(reasoning="qwen3")
    text = "The tags <think> and </think> surround it.\n"
    assert answered(form, text) == (text, "", [])
    assert answered(form, "<think>a <think> b</think> c </think>") == (
        *("c </think>", "a <think> b"),
        [],
    )


def test_without_functions_calls_are_text_and_thoughts_are_apart() -> None:
    text = CALLS["hermes"].one()
    assert answered(chat_format("hermes", "qwen3"), f"<think>a</think>{text}") == (text, "a", [])
    assert answered(chat_format("hermes"), f"  {text}\n") == (f"  {text}\n", "", [])


def test_text_of_llama_4_between_marks_before_a_call_is_text() -> None:
    call = '{"name": "now", "parameters": {}}'
    text = f"<|python_start|>I look.<|python_end|>{call}"
    form = chat_format("llama4_json")
    for length in (1, 3, 1000):
        result = outcome(form.parser(FUNCTIONS), pieces(text, length))
        assert result == ("I look.", "", [("now", "{}")])
    assert outcome(form.parser(FUNCTIONS), [f"<|python_start|>{call}<|python_end|>"]) == (
        *("", ""),
        [("now", "{}")],
    )


def test_messages_of_gpt_oss_are_apart_by_channel() -> None:
    form = chat_format("openai", "openai_gptoss")
    text = (
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
        "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant"
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
    )
    result = outcome(form.parser(FUNCTIONS), [text])
    assert result == ("I look.", "One.\nTwo.", [("now", "{}")])


def test_a_call_of_gpt_oss_may_follow_the_name_of_its_turn_which_the_prompt_ends_with() -> None:
    form = chat_format("openai", "openai_gptoss")
    call = " to=functions.now<|channel|>commentary json<|message|>{}<|call|>"
    for text in (call, f"<|channel|>analysis<|message|>One.<|end|><|start|>assistant{call}"):
        for length in (1, 3, 1000):
            result = outcome(form.parser(FUNCTIONS), pieces(text, length))
            assert (result[0], result.calls) == ("", [("now", "{}")])
    told = "Use to=functions.now for that."
    assert outcome(form.parser(FUNCTIONS), pieces(told, 1)) == (told, "", [])


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("qwen3_xml", "<tool_call><function=add><parameter=note>\n", "\n</parameter></function>"),
        ("seed_oss", "<function=add><parameter=note>\n", "\n</parameter></function>"),
        ("glm45", "<tool_call>add<arg_key>note</arg_key><arg_value>", "</arg_value></tool_call>"),
        ("minimax_m2", '<invoke name="add"><parameter name="note">', "</parameter></invoke>"),
    ],
)
def test_a_line_break_is_part_of_a_text_where_the_format_puts_none_around_it(
    name: str, begin: str, end: str
) -> None:
    for value in ("a\n", "\na", "\n", "\n\na\n\n"):
        parser = chat_format(name).parser(FUNCTIONS)
        ((_, arguments),) = outcome(parser, pieces(begin + value + end, 3)).calls
        assert json.loads(arguments) == {"note": value}


TAGGED = {
    "qwen3_xml": (
        "<tool_call>\n<function=add>\n<parameter=note>\n",
        "\n</parameter>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "</parameter>",
    ),
    "seed_oss": (
        "<seed:tool_call><function=add><parameter=note>",
        "</parameter><parameter=a>1</parameter></function></seed:tool_call>",
        "</parameter>",
    ),
    "glm45": (
        "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>",
        "</arg_value>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "</arg_value>",
    ),
    "minimax_m2": (
        '<minimax:tool_call><invoke name="add">\n<parameter name="note">',
        '</parameter>\n<parameter name="a">1</parameter>\n</invoke>\n</minimax:tool_call>',
        "</parameter>",
    ),
}


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_may_contain_what_ends_it(name: str) -> None:
    begin, end, mark = TAGGED[name]
    for value in (f"a{mark}b", f"{mark} {mark}, twice", f"<x>{mark}\n text", f"{mark}<"):
        for length in (1, 3, 1000):
            result = outcome(
                chat_format(name).parser(FUNCTIONS), pieces(begin + value + end, length)
            )
            ((_, arguments),) = result.calls
            assert json.loads(arguments) == {"note": value, "a": 1}
            assert result[0] == ""


@pytest.mark.parametrize("name", TAGGED)
def test_a_value_ends_at_its_first_end_if_none_is_certain(name: str) -> None:
    """Text after it is no reason to add the next call to the value."""
    begin, _, mark = TAGGED[name]
    call = f"{begin}1{mark} and text {chat_format(name).calls.all_closings[-1]}"
    for length in (1, 3, 1000):
        result = outcome(chat_format(name).parser(FUNCTIONS), pieces(call + call, length))
        assert [json.loads(arguments) for _, arguments in result.calls] == [{"note": "1"}] * 2


@pytest.mark.parametrize("key", ["a b", "$ref", "src/a.py", "d\\e", "(x)", "é=1"])
def test_keys_of_gemma_may_have_any_characters_that_end_none(key: str) -> None:
    text = f'<|tool_call>call:now{{o:{{{key} :1,k:<|"|>v<|"|>}}}}<tool_call|>'
    for length in (1, 3, 1000):
        parser = chat_format("gemma4").parser(FUNCTIONS)
        ((_, arguments),) = outcome(parser, pieces(text, length)).calls
        assert json.loads(arguments) == {"o": {key: 1, "k": "v"}}


def test_a_required_call_follows_the_thought() -> None:
    form = chat_format("hermes", "qwen3")
    call = '[{"name": "add", "parameters": {"a": 1}}]'
    for text in (f"<think>a</think>\n{call}", call):
        for length in (1, 3, 1000):
            parser = form.parser(FUNCTIONS, required="")
            result = outcome(parser, pieces(text, length))
            assert result == ("", "a" if "think" in text else "", [("add", '{"a": 1}')])
    parser = form.parser(FUNCTIONS, required="add")
    assert outcome(parser, pieces('<think>a</think>{"a": 1}', 2)).calls == [("add", '{"a": 1}')]


def test_required_calls_are_calls_and_incomplete_ones_stay_so() -> None:
    form = chat_format("hermes")
    text = '[{"name": "add", "parameters": {"a": 1}},\n {"name": "now", "parameters": {}}]'
    for length in (1, 3, 1000):
        result = outcome(form.parser(FUNCTIONS, required=""), pieces(text, length))
        assert result == ("", "", [("add", '{"a": 1}'), ("now", "{}")])
    assert outcome(form.parser(FUNCTIONS, required=""), [text[:34]]).calls == [("add", '{"a')]
    assert outcome(form.parser(FUNCTIONS, required="add"), ['{"a"', ": 1}"]).calls == [
        ("add", '{"a": 1}')
    ]


SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
        "place": {"$ref": "#/$defs/Place"},
        "flag": {"type": "boolean"},
        "mode": {"enum": ["1", "2"]},
        "odd": {"type": True, "enum": 5, "anyOf": 6, "allOf": [{"type": [None, "number"]}]},
    },
    "$defs": {"Place": {"type": "object"}},
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        *(("text", "1", "1"), ("text", "true", "true"), ("text", '{"a": 1}', '{"a": 1}')),
        *(("number", "1", 1), ("number", "null", None), ("number", "many", "many")),
        *(("either", "1", "1"), ("either", "true", True), ("either", "x", "x")),
        *(("place", '{"a": [1]}', {"a": [1]}), ("place", "{'a': True}", {"a": True})),
        *(("flag", "True", True), ("mode", "1", "1"), ("other", "1", 1), ("other", "x", "x")),
        ("text", "two\n\nlines\n", "two\n\nlines\n"),
        *(("odd", "1", 1), ("odd", "x", "x")),
    ],
)
def test_the_schema_gives_values_between_tags_their_type(
    name: str, value: str, expected: object
) -> None:
    text = f"<tool_call><function=f>\n<parameter={name}>\n{value}\n</parameter></function>"
    for length in (1, 1000):
        parser = chat_format("qwen3_xml").parser({"f": SCHEMA})
        ((_, arguments),) = outcome(parser, pieces(text, length)).calls
        assert json.loads(arguments) == {name: expected}
