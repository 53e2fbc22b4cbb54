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
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler_service.errors import InvalidArgument

_FAILURES = (
    jinja2.TemplateError,
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
    """A model's template, compiled, with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError for a source that does not compile.

        `special_tokens` maps variables such as `bos_token` to their text.
        """
        self._template = _environment().from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. Raises InvalidArgument if the template refuses the messages.

        `variables` are the caller's own; the standard variables take precedence over them.
        """
        known = {"documents": None, **(variables or {}), **self._special_tokens}
        known |= {
            "messages": [dict(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(known)
        except _FAILURES as error:
            raise InvalidArgument(
                "chat.messages", f"the model's chat template refuses them: {error}"
            ) from error


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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
