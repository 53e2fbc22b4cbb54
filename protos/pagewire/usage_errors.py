"""Errors of command lines, each as one line: the option, what is allowed, and the value.

Click's own are a usage text, a box, and words of Python for the kinds of values.
"""

import os
import re
import sys
from collections.abc import Callable, Container
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Click's, which newer versions of typer hold a copy of."""

_KINDS = {"int": "a whole number", "integer": "a whole number", "float": "a number"}
_KINDS |= {"boolean": "true or false", "bool": "true or false"}
"""What is allowed, by the name of a parameter's type."""


class _OneLine:
    """Prints the errors of a command line, and ends with click's exit codes."""

    print_error: Callable[[str], None] = staticmethod(
        lambda text: typer.echo(f"error: {text}", err=True)
    )

    def main(self, *args: Any, standalone_mode: bool = True, **settings: Any) -> Any:
        """Run the command line; in standalone mode, print its error, and exit."""
        run: Callable[..., Any] = super().main  # type: ignore[misc]
        if not standalone_mode:
            return run(*args, standalone_mode=False, **settings)
        try:
            code = run(*args, standalone_mode=False, **settings)
        except UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                error.show()  # type: ignore[attr-defined]
            else:
                self.print_error(explain(error))
            sys.exit(error.exit_code)  # type: ignore[attr-defined]
        except typer.Abort:
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


class OneLineCommand(_OneLine, TyperCommand):
    """A command whose errors are one line."""


class OneLineGroup(_OneLine, TyperGroup):
    """Commands whose errors are one line."""


def explain(error: Any) -> str:
    """One line for an error of click's that names the option, its value and what is allowed."""
    message = (error.message or error.format_message()).rstrip(".")
    if (param := getattr(error, "param", None)) is not None:
        is_missing = type(error).__name__ == "MissingParameter"
        return f"{_name(param, error.ctx)}: {'expected a value' if is_missing else _reason(error)}"
    if match := re.fullmatch(r"Option '(.+)' requires an argument", message):
        return f"{match[1]}: expected a value"
    if match := re.fullmatch(r"Option '(.+)' does not take a value", message):
        return f"{match[1]}: expected no value"
    if match := re.fullmatch(r"No such (command) '(.*?)'.*|No such (option): (\S+).*", message):
        name, kind = match[2] or match[4], match[1] or match[3]
        near = getattr(error, "possibilities", None)
        hint = f"; did you mean {' or '.join(sorted(near))}?" if near else ""
        if kind == "command":
            hint = f"; there are {', '.join(error.ctx.command.list_commands(error.ctx))}"
        return f"{name}: no such {kind}{hint}"
    if match := re.fullmatch(r"Got unexpected extra argument\S* \((.*)\)", message):
        return f"{match[1]}: expected no further argument"
    return message


def _name(param: Any, ctx: Any) -> str:
    """How users write the parameter: its longest name, and the variable if its value is that's."""
    if param.param_type_name == "argument":
        return (param.metavar or param.name).strip("[]{}").upper()
    name = max(param.opts, key=len)
    source = ctx and ctx.get_parameter_source(param.name)
    if source is None or source.name != "ENVIRONMENT":
        return name
    variables = [param.envvar] if isinstance(param.envvar, str) else param.envvar
    return f"{name} ({next(filter(os.environ.get, variables), variables[0])})"


def _reason(error: Any) -> str:
    """What a parameter allows, and its value, from one of click's sentences about it."""
    message, kind = error.message.rstrip("."), error.param.type
    if match := re.fullmatch(r"'(.*)' is not a valid \w+(?: range)?", message, re.DOTALL):
        allowed = _KINDS.get(kind.name.removesuffix(" range"), f"a {kind.name}")
        return f"expected {allowed}{_range(kind, ' of ', ' from ')}, got {match[1]!r}"
    if match := re.fullmatch(r"(\S+) is not in the range .*", message):
        return f"expected {_range(kind)}, got {match[1]}"
    if match := re.fullmatch(r"(.*) (?:is not one of|does not match the formats?) (.*)", message):
        return f"expected one of {match[2]}, got {match[1]}"
    return message


def _range(kind: Any, before: str = "", before_two: str = "") -> str:
    """The range of a number; nothing if any is allowed."""
    least, most = getattr(kind, "min", None), getattr(kind, "max", None)
    if least is None:
        return "" if most is None else f"{before}at most {most:g}"
    return f"{before}at least {least:g}" if most is None else f"{before_two}{least:g} to {most:g}"


def spelled_as_options(message: str, options: Container[str]) -> str:
    """An error of a setting, `max_num_seqs: …`, as users write it: `--max-num-seqs: …`.

    options: names with underscores; what begins with another name is returned unchanged.
    """
    names, colon, reason = message.partition(":")
    if not all(name in options for name in names.split(", ")):
        return message
    return "--" + names.replace("_", "-").replace(", ", ", --") + colon + reason
