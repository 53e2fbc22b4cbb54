"""How families of models mark thoughts and calls in their answers, and which format a model uses.

A format is found by looking at the chat template, which shows the model how to write calls, and at
the vocabulary; or it is named.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from scheduler_service.frontend.chat_formats.events import Content, Event, MessageParser
from scheduler_service.frontend.chat_formats.hermes import HermesParser
from scheduler_service.frontend.chat_formats.llama import LlamaParser
from scheduler_service.frontend.chat_formats.mistral import MARKER, MistralParser

Functions = Mapping[str, Mapping[str, Any] | None]
"""The functions that may be called: the JSON schema of the parameters of each, by name."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How thoughts are marked."""

    names: tuple[str, ...]
    opening: str
    closing: str


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are marked."""

    names: tuple[str, ...]
    make_parser: Callable[[Collection[str]], MessageParser]
    """Makes a parser from the names of the functions."""
    special_tokens: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model marks the parts of its answers."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None

    @property
    def special_tokens(self) -> frozenset[str]:
        """Markers that may be special tokens and that the parser needs to see in the text."""
        return self.calls.special_tokens if self.calls is not None else frozenset()

    @property
    def thought_end(self) -> str | None:
        """The marker after which the answer begins; None if the model does not mark thoughts."""
        return self.reasoning.closing if self.reasoning is not None else None

    def opens_thought(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside a thought."""
        return False

    def parser(
        self, functions: Functions, *, prompt: str = "", answer: MessageParser | None = None
    ) -> MessageParser:
        """A parser of one choice that follows `prompt`.

        Without functions calls are not looked for. `answer`, where given, reads all text after the
        thought, because the request constrains it (`constrained`).
        """
        if answer is not None:
            return answer
        if functions and self.calls is not None:
            return self.calls.make_parser(functions)
        return PlainParser()


class PlainParser:
    """All text is content; see `MessageParser`."""

    in_reasoning = False

    def push(self, text: str) -> list[Event]:
        """The text."""
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        """Nothing is held back."""
        return []


HERMES = CallFormat(("hermes",), HermesParser)
LLAMA = CallFormat(("llama3_json",), LlamaParser, frozenset({"<|python_tag|>"}))
MISTRAL = CallFormat(("mistral",), MistralParser, frozenset({MARKER, "[ARGS]", "[CALL_ID]"}))


def find_format(
    template: str | None,
    tool_template: str | None,
    has_token: Callable[[str], bool],
    *,
    reasoning_parser: str = "auto",
    tool_call_parser: str = "auto",
) -> ChatFormat:
    """The format of a model with these chat templates, without and with tools, and vocabulary.

    A parser is `auto`, `none`, or the name of a format (vLLM's names). Raises ValueError for any
    other name.
    """
    return ChatFormat(None, _find_calls(tool_template, tool_call_parser))


def _find_calls(template: str | None, name: str) -> CallFormat | None:
    if name == "none":
        return None
    if name != "auto":
        for found in (HERMES, LLAMA, MISTRAL):
            if name in found.names:
                return found
        names = ", ".join(
            sorted(name for found in (HERMES, LLAMA, MISTRAL) for name in found.names)
        )
        raise ValueError(f"tool_call_parser: expected auto, none, or one of {names}, got {name!r}")
    if template is None:
        return HERMES
    if MARKER in template:
        return MISTRAL
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return LLAMA
    return HERMES
