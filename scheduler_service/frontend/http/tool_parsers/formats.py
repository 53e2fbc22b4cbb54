"""Which parser a model needs, by its chat template: it shows the model how to write calls."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from scheduler_service.frontend.http.tool_parsers.base import ToolCallParser
from scheduler_service.frontend.http.tool_parsers.hermes import HermesParser
from scheduler_service.frontend.http.tool_parsers.llama import LlamaParser
from scheduler_service.frontend.http.tool_parsers.mistral import MARKER, MistralParser


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """How a family of models writes calls."""

    make_parser: Callable[[Collection[str]], ToolCallParser]
    """Makes a parser from the names of the functions."""
    uses_special_tokens: bool
    """Whether a special token announces a call, which then must stay in the text."""


HERMES = ToolCallFormat(HermesParser, uses_special_tokens=False)
LLAMA = ToolCallFormat(LlamaParser, uses_special_tokens=True)
MISTRAL = ToolCallFormat(MistralParser, uses_special_tokens=True)


def detect_format(template: str | None) -> ToolCallFormat:
    """The format that a template shows; Hermes', which no ordinary text resembles, if it shows
    none."""
    if template is None:
        return HERMES
    if MARKER in template:
        return MISTRAL
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA
    return HERMES
