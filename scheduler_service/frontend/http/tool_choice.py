"""What `tools` and `tool_choice` ask for: a constraint on the output, and how to read it."""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_service.errors import InvalidArgument
from scheduler_service.frontend.http.openai.protocol import ChatRequest, NamedToolChoice
from scheduler_service.frontend.http.tool_parsers.base import ToolCallParser
from scheduler_service.frontend.http.tool_parsers.constrained import (
    NamedParser,
    RequiredParser,
    named_schema,
    required_schema,
)
from scheduler_service.frontend.http.tool_parsers.formats import ToolCallFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolPlan:
    """How one request treats tools."""

    shows_tools: bool = False
    """Whether the template is given them."""
    json_schema: str | None = None
    """What the output must be, where a call is required."""
    make_parser: Callable[[], ToolCallParser] | None = None
    """For each choice; None: text is text."""
    is_named: bool = False
    """Whether the request itself names the function."""
    keeps_special_tokens: bool = False


def plan_tools(body: ChatRequest, find_format: Callable[[], ToolCallFormat]) -> ToolPlan:
    """Raises InvalidArgument for a choice that the tools do not allow.

    `find_format` tells how the model writes calls, where that matters.
    """
    choice = body.tool_choice or "auto"
    functions = {tool.function.name: tool.function for tool in body.tools or ()}
    if not functions:
        if choice == "required" or isinstance(choice, NamedToolChoice):
            raise InvalidArgument("tool_choice", "expected tools beside it")
        return ToolPlan()
    if choice == "none":
        return ToolPlan()
    names = frozenset(functions)
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise InvalidArgument("tool_choice.function.name", f"expected one of {sorted(names)}")
        return ToolPlan(
            shows_tools=True,
            json_schema=named_schema(functions[name].parameters),
            make_parser=lambda: NamedParser(name),
            is_named=True,
        )
    if choice == "required":
        tools = [(name, function.parameters) for name, function in functions.items()]
        return ToolPlan(
            shows_tools=True,
            json_schema=required_schema(tools, one=body.parallel_tool_calls is False),
            make_parser=lambda: RequiredParser(names),
        )
    found = find_format()
    return ToolPlan(
        shows_tools=True,
        make_parser=lambda: found.make_parser(names),
        keeps_special_tokens=found.uses_special_tokens,
    )
