"""Small templates that each take messages in one form only."""

import logging
from typing import Any

import pytest

from scheduler_service.errors import InvalidArgument
from tests.support.chat_templates import model_with, prompt_of

TURN = "<{{ m.role }}>"
TEXT = f"{{% for m in messages %}}{TURN}{{{{ '' + m.content }}}}{{% endfor %}}"
PARTS = (
    f"{{% for m in messages %}}{TURN}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endfor %}"
)
BOTH = (
    f"{{% for m in messages %}}{TURN}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}"
    "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
)
FIRST_PART = f"{{% for m in messages %}}{TURN}{{{{ m.content[0].text + '' }}}}{{% endfor %}}"
ANY = f"{{% for m in messages %}}{TURN}{{{{ m.content }}}}{{% endfor %}}"
AS_JSON = f"{{% for m in messages %}}{TURN}{{{{ m.content | tojson }}}}{{% endfor %}}"
PER_ROLE = (
    "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% else %}{{ m.content | trim }}{% endif %}|{% endfor %}"
)

ANSWERED = {"role": "assistant", "content": "a"}
TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


SYSTEM, LATER = ({"role": "system", "content": text} for text in ("S", "T"))
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and loop.index0 > 0 %}"
    "{{ raise_exception('The system message comes first') }}{% endif %}"
    f"{TURN}{{{{ '' + m.content }}}}{{% endfor %}}"
)
OTHERS_ONLY = (
    "{% if messages[0].role == 'system' %}{{ '' + messages[0].content }}|{% endif %}"
    f"{{% for m in messages if m.role != 'system' %}}{TURN}{{{{ '' + m.content }}}}{{% endfor %}}"
)
OF_PARTS = PARTS.replace("{% for m in messages %}", FIRST_ONLY[: FIRST_ONLY.index(TURN)])


@pytest.mark.parametrize(
    ("template", "messages", "prompt"),
    [
        (TEXT, [SYSTEM, user("a"), LATER], "<system>S<user>a<system>T"),
        (FIRST_ONLY, [SYSTEM, user("a")], "<system>S<user>a"),
        (FIRST_ONLY, [SYSTEM, LATER, user("a")], "<system>S\nT<user>a"),
        (FIRST_ONLY, [SYSTEM, user("a"), LATER, user("b")], "<system>S\nT<user>a<user>b"),
        (FIRST_ONLY, [user("a"), LATER], "<system>T<user>a"),
        (
            FIRST_ONLY,
            [{**SYSTEM, "content": TWO_PARTS}, LATER, user("a")],
            "<system>a\nb\nT<user>a",
        ),
        (OTHERS_ONLY, [SYSTEM, user("a"), LATER], "S\nT|<user>a"),
        (OTHERS_ONLY, [LATER, user("a")], "T|<user>a"),
        (OF_PARTS, [SYSTEM, user("a"), LATER], "<system>S\nT<user>a"),
    ],
)
def test_system_messages_become_the_first_one_where_the_template_takes_no_others(
    template: str, messages: list[dict[str, Any]], prompt: str
) -> None:
    """Most clients of agents send several, and one template in three refuses or drops them."""
    assert prompt_of(model_with(template), messages) == prompt


def test_a_template_that_takes_no_system_message_is_told_of_as_before() -> None:
    refusing = FIRST_ONLY.replace("loop.index0 > 0", "true")
    with pytest.raises(InvalidArgument, match="comes first"):
        prompt_of(model_with(refusing), [SYSTEM, user("a")])


@pytest.mark.parametrize(
    ("template", "content", "prompt"),
    [
        (TEXT, "a", "<user>a"),
        (TEXT, TWO_PARTS, "<user>a\nb"),
        (PARTS, "a", "<user>a"),
        (PARTS, TWO_PARTS, "<user>ab"),
        (BOTH, "a", "<user>a"),
        (BOTH, TWO_PARTS[:1], "<user>[a]"),
        (BOTH, TWO_PARTS, "<user>[a][b]"),
        (FIRST_PART, "a", "<user>a"),
        (FIRST_PART, TWO_PARTS, "<user>a\nb"),
        (ANY, TWO_PARTS, "<user>a\nb"),
        (AS_JSON, TWO_PARTS, '<user>"a\\nb"'),
        (BOTH, "", "<user>"),
        (TEXT, [], "<user>"),
    ],
)
def test_content_has_the_form_that_the_template_takes(
    template: str, content: Any, prompt: str
) -> None:
    assert prompt_of(model_with(template), [user(content)]) == prompt


def test_a_template_that_refuses_tools_gets_its_form_too() -> None:
    refusing = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}" + PARTS
    assert prompt_of(model_with(refusing), [user("a")]) == "<user>a"


def test_roles_may_take_different_forms() -> None:
    messages = [{"role": "system", "content": TWO_PARTS}, user("c"), user(TWO_PARTS)]
    assert prompt_of(model_with(PER_ROLE), messages) == "a\nb|c|ab|"


CALL_LOOP = "{% for c in m.tool_calls or [] %}({{ c.function.name }} ARGUMENTS){% endfor %}"


def calls_by(arguments: str, content: str = "{{ m.content or '' }}") -> str:
    calls = CALL_LOOP.replace("ARGUMENTS", arguments)
    return f"{{% for m in messages %}}{content}{calls}|{{% endfor %}}"


IF_NULL = (
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
    f"{CALL_LOOP.replace('ARGUMENTS', '{{ c.function.arguments }}')}"
    "{% else %}{{ '' + m.content }}{% endif %}|{% endfor %}"
)
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "look", "arguments": '{"at":  1}'},
}


def calling(content: Any, **fields: Any) -> list[dict[str, Any]]:
    assistant = {"role": "assistant", "content": content, **fields, "tool_calls": [CALL]}
    return [user("q"), assistant, {"role": "tool", "tool_call_id": "c1", "content": "r"}]


@pytest.mark.parametrize(
    ("template", "call"),
    [
        (calls_by("{{ c.function.arguments | tojson }}"), '(look {"at": 1})'),
        (calls_by("{{ '' + c.function.arguments }}"), '(look {"at":  1})'),
        (calls_by("{{ c.function.arguments }}"), '(look {"at":  1})'),
        (calls_by("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}"),
         "(look at=1)"),
        (calls_by("{{ c.function.arguments.at }}", "{{ '' + m.content }}"), "(look 1)"),
        (IF_NULL, '(look {"at":  1})'),
    ],
    ids=["object", "text", "either, written out", "pairs", "content required", "content null"],
)  # fmt: skip
@pytest.mark.parametrize("content", [None, "", []])
def test_a_call_without_text_keeps_its_arguments(template: str, call: str, content: Any) -> None:
    assert prompt_of(model_with(template), calling(content)) == f"q|{call}|r|"


def test_a_call_without_an_id_has_none_in_the_template() -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.id | default('none') }} {{ c.function.arguments.city }};{% endfor %}{% endfor %}"
    )
    call = {"function": {"name": "f", "arguments": {"city": "Bonn"}}}
    calls = [call, {"id": "c2", **call}]
    turn = {"role": "assistant", "tool_calls": calls}
    assert prompt_of(model_with(template), [turn]) == "none Bonn;c2 Bonn;"


def test_a_call_that_a_text_would_hide_is_a_turn_of_its_own() -> None:
    assert prompt_of(model_with(IF_NULL), calling("t")) == 'q|t|(look {"at":  1})|r|'
    beside = calls_by("{{ c.function.arguments.at }}")
    assert prompt_of(model_with(beside), calling("t")) == "q|t(look 1)|r|"


REASONING = "{{% for m in messages %}}{{{{ m.{name} }}}}{{{{ m.content }}}}|{{% endfor %}}"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning"])
def test_reasoning_reaches_templates_under_every_name(name: str, sent: str) -> None:
    messages = [user("q"), ANSWERED | {sent: "why "}]
    assert prompt_of(model_with(REASONING.format(name=name)), messages) == "q|why a|"


def test_reasoning_before_a_call_is_a_plan() -> None:
    template = REASONING.format(name="tool_plan")
    assert prompt_of(model_with(template), calling("", reasoning_content="why")) == "q|why|r|"


def test_a_text_beside_reasoning_and_calls_ends_the_reasoning_where_both_are_refused() -> None:
    """As gpt-oss' template does, though the model itself writes such turns."""
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}"
        "{{ raise_exception('Cannot pass both content and thinking') }}{% endif %}"
        "[{{ m.thinking }}]{{ m.content }}{% for call in m.tool_calls or [] %}"
        "({{ call.function.arguments.at }}){% endfor %}|{% endfor %}"
    )
    turns = calling("t", reasoning_content="why")
    assert prompt_of(model_with(template), turns) == "[]q|[why\nt](1)|[]r|"
    assert prompt_of(model_with(template), calling("t")) == "[]q|[]t(1)|[]r|"
    both = template.replace("m.tool_calls and m.content and", "false and")
    assert prompt_of(model_with(both), turns) == "[]q|[why]t(1)|[]r|"


def test_reasoning_may_be_a_part_of_the_content() -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]"
        "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}|{% endfor %}"
    )
    messages = [user("q"), ANSWERED | {"reasoning_content": "why"}]
    assert prompt_of(model_with(template), messages) == "q|[THINK]why[/THINK]a|"


@pytest.mark.parametrize(
    ("messages", "fields", "feature"),
    [
        ([user("q")], {"tools": [{"type": "function", "function": {"name": "look"}}]}, "tools"),
        (calling(None), {}, "tool_calls"),
        ([user("q"), ANSWERED | {"reasoning": "why"}], {}, "reasoning_content"),
        ([{"role": "system", "content": "s"}, user("q")], {}, "messages of role system"),
    ],
)  # fmt: skip
def test_what_the_template_drops_is_logged(
    messages: list[dict[str, Any]],
    fields: dict[str, Any],
    feature: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    model = model_with(template)
    model.info.name = f"without {feature}"
    for _ in range(2):
        prompt_of(model, messages, **fields)
    (record,) = (r for r in caplog.records if f"not show {feature} " in r.getMessage())
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(f"model=without {feature}")


def test_nothing_is_logged_about_a_template_that_shows_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    template = "{{ tools | tojson }}" + calls_by("{{ c.function.arguments }}{{ m.thinking }}")
    prompt_of(model_with(template), calling("t", reasoning="why"))
    assert "does not show" not in caplog.text


KEEPS = f"{{% for m in messages %}}{TURN}{{{{ m.content }}}}</s>{{% endfor %}}"
TRIMS = f"{{% for m in messages %}}{TURN}{{{{ m.content | trim }}}}</s>{{% endfor %}}"
ANSWER = "<user>q</s><assistant>"


@pytest.mark.parametrize(
    ("template", "begun", "prompt"),
    [
        (KEEPS, "One,\n", ANSWER + "One,\n"),
        (KEEPS, "  One, ", ANSWER + "  One, "),
        (TRIMS, "  One,\n", ANSWER + "One,"),
        (PARTS.replace("{% endfor %}{% endfor %}", "{% endfor %}</s>{% endfor %}"),
         [*TWO_PARTS, {"type": "text", "text": "c\n"}], ANSWER + "abc\n"),
        (TRIMS, TWO_PARTS, ANSWER + "a\nb"),
    ],
)  # fmt: skip
def test_a_turn_is_continued_with_the_white_space_that_the_template_keeps(
    template: str, begun: Any, prompt: str
) -> None:
    messages = [user("q"), {"role": "assistant", "content": begun}]
    assert prompt_of(model_with(template), messages, continue_final_message=True) == prompt


@pytest.mark.parametrize("begun", ["", " \n", [], [*TWO_PARTS, {"type": "text", "text": " "}]])
def test_a_turn_without_text_is_not_continued(begun: Any) -> None:
    messages = [user("q"), {"role": "assistant", "content": begun}]
    with pytest.raises(InvalidArgument, match="with a text"):
        prompt_of(model_with(KEEPS), messages, continue_final_message=True)


def test_template_arguments_override_special_tokens_but_not_the_conversation() -> None:
    model = model_with("{{ bos_token }}{{ messages[0].content }}{{ mood }}")
    assert prompt_of(model, [user("q")]) == "<s>q"
    arguments = {"bos_token": "", "mood": "!"}
    assert prompt_of(model, [user("q")], chat_template_kwargs=arguments) == "q!"
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(InvalidArgument, match=f"'{name}', which has a field of its own"):
            prompt_of(model, [user("q")], chat_template_kwargs={name: None})


def test_parts_messages_and_tools_may_ask_for_prompt_caching() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    message = user([{"type": "text", "text": "a", **cached}]) | cached
    tool = {"type": "function", "function": {"name": "look"}, **cached}
    assert prompt_of(model_with(TEXT), [message], tools=[tool]) == "<user>a"
