import re

import jinja2
import pytest

from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.models.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi <b>&</b>"}]


def render(source: str, **special_tokens: str) -> str:
    return ChatTemplate(source, special_tokens).render(MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>Hi <b>&</b>"),
        ("{{ messages[0]['role'] }}{% if add_generation_prompt %}:{% endif %}", "user:"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi <b>&</b>"}'),
        ("{{ 'é' | tojson }}", '"é"'),
        ("{% for m in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}", "x\n"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("a{% generation %}b{{ messages[0].role }}{% endgeneration %}c", "abuserc"),
        ("{% if tools %}t{% else %}none{% endif %}{% if documents is none %}!{% endif %}", "none!"),
        ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
    ],
)
def test_templates_see_what_model_authors_expect(source: str, text: str) -> None:
    assert render(source, bos_token="<s>") == text


def test_templates_know_the_day() -> None:
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", render("{{ strftime_now('%Y-%m-%d') }}"))


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages.append(1) }}",
        "{{ messages[7].role }}",
        "{{ 1 / 0 }}",
        "{{ messages | dictsort }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_a_complaint_about_the_messages(source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render(source)
    assert caught.value.field == "chat.messages"


def test_a_template_tells_why_it_refuses() -> None:
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_template_that_does_not_compile_is_told_when_it_is_loaded() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% if %}", {})
