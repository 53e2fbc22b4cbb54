"""Conversations to prompts, with the model's own Jinja template.

The environment is the one that the `transformers` library documents for chat templates: whitespace
control, `tojson` without HTML escapes, `raise_exception`, `strftime_now`, loop controls, the
`generation` tag. Templates come with the model and are not trusted: they run in Jinja's sandbox.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.models.message_forms import Turn, find_forms

_FAILURES = (
    jinja2.TemplateError,
    AttributeError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    RecursionError,
)
"""Errors that a template may raise: it is a program, and can fail for reasons of its own."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; prompts ignore it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's template, compiled, with the variables that every conversation has."""

    def __init__(self, source: str, constants: Mapping[str, Any]) -> None:
        """Raises jinja2.TemplateSyntaxError for a source that does not compile.

        `constants`: special tokens, such as `bos_token`, and the model's own defaults.
        """
        environment = _environment()
        self.source = source
        self._template = environment.from_string(source)
        self._constants = dict(constants)
        self.variables = frozenset(find_undeclared_variables(environment.parse(source)))
        """The variables that the template reads."""
        self.forms = find_forms(self._try_render)
        """The forms in which the template takes messages."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises InvalidArgument if the template refuses the messages.

        `messages` have the form of OpenAI's API; the template gets them in the form that it takes.
        `variables` are the caller's own, and take precedence over the constants.
        """
        standard = {
            "messages": self.forms.convert(messages),
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render({**(variables or {}), **standard})
        except _FAILURES as error:
            raise InvalidArgument(
                "chat.messages", f"the model's chat template refuses them: {error}"
            ) from error

    def answer_surroundings(self) -> tuple[str, str]:
        """The text between a thought and the answer after it, and the text after the answer, in a
        conversation that ends there; empty if the template shows no answers."""
        thought, answer = "zqthought", "zqanswer"
        turns = [
            {"role": "user", "content": "zquser"},
            {"role": "assistant", "content": answer, "reasoning_content": thought},
        ]
        prompt = self._try_render(self.forms.convert(turns), None)
        before, found, after = prompt.rpartition(answer)
        return (before.rpartition(thought)[2], after) if found else ("", "")

    def _try_render(self, messages: list[Turn], tools: list[Turn] | None) -> str:
        """Like `_render` without a generation prompt; empty if the template refuses."""
        try:
            return self._render(
                {"messages": messages, "tools": tools, "add_generation_prompt": False}
            )
        except _FAILURES:
            return ""

    def _render(self, variables: Mapping[str, Any]) -> str:
        return self._template.render({"documents": None, **self._constants, **variables})


class PairTemplate:
    """A model's template of the text that two texts become, compiled."""

    def __init__(self, source: str) -> None:
        """Raises jinja2.TemplateSyntaxError for a source that does not compile."""
        environment = _environment()
        self._template = environment.from_string(source)
        variables = find_undeclared_variables(environment.parse(source))
        self.has_instruction = "instruction" in variables
        """Whether it has a place for an instruction."""

    def render(self, query: str, document: str, instruction: str | None) -> str:
        """The text for a query and a document. Raises ValueError if the template refuses them."""
        variables = {} if instruction is None else {"instruction": instruction}
        try:
            return self._template.render(query=query, document=document, **variables)
        except _FAILURES as error:
            raise ValueError(f"the model's template of pairs refuses it: {error}") from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
