"""How commands read their arguments: all unknown options in one message, and vLLM's spellings."""

from collections.abc import Sequence
from typing import Any, NoReturn

import typer

from pagewire.usage_errors import OneLineCommand, OneLineGroup, spelled_as_options
from pagewire_cli import foreign_flags, terminal
from pagewire_cli.options import spelled_with_parameters
from pagewire_client.errors import InvalidArgument

EXIT_WRONG_OPTION = 2

CONTEXT = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Settings of a command line on which `--max_model_len` is `--max-model-len`."""

_LISTS = ("--served-model-name", "--api-key", "--lora-modules")
"""Options that vLLM gives several values at once."""


class Group(OneLineGroup):
    """Commands whose errors are printed like all output of this process."""

    print_error = staticmethod(terminal.error)


class Command(OneLineCommand):
    """A command that explains all its unknown options together."""

    has_foreign_flags = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; exits with an explanation of each unknown option."""
        values, rest = self._parse(ctx, args)
        unknown = dict.fromkeys(arg for arg in rest if arg.startswith("-") and len(arg) > 1)
        if self.has_foreign_flags:
            always = {arg for arg in unknown if foreign_flags.is_always_on(_name(arg))}
            unknown = {arg: None for arg in unknown if arg not in always}
            num_values = sum(arg not in always for arg in rest) - ("model" not in values)
            args = _repeat_lists([arg for arg in args if arg not in always], num_values)
        if unknown:
            known = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
            refuse([_name(arg) for arg in unknown], known, foreign=self.has_foreign_flags)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a ValueError of one of its options names that as users write it."""
        try:
            return super().invoke(ctx)
        except ValueError as error:
            names = {str(p.name) for p in self.params if p.param_type_name == "option"}
            text = str(error)
            if isinstance(error, InvalidArgument):
                text = spelled_with_parameters(error)
            raise ValueError(spelled_as_options(text, names)) from error

    def _parse(self, ctx: Any, args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Values by parameter, and the arguments that are none: unknown options, further values."""
        parser = self.make_parser(ctx)
        parser.ignore_unknown_options = True
        options = list(args[: args.index("--")]) if "--" in args else list(args)
        values, rest, _ = parser.parse_args(options)
        first = [values.pop(str(p.name)) for p in self.params if p.param_type_name == "argument"]
        return values, [*(arg for arg in first if isinstance(arg, str)), *rest]


class ServeCommand(Command):
    """`pagewire serve`, which understands the flags of `vllm serve` too: switches without effect,
    and `--served-model-name A B` as the option given twice."""

    has_foreign_flags = True


def _repeat_lists(args: Sequence[str], num_further: int) -> list[str]:
    """Put the option before each of at most `num_further` values that follow its first one."""
    repeated: list[str] = []
    option, num_values = "", 0
    for arg in args:
        if arg.startswith("-"):
            option, num_values = arg.replace("_", "-"), 0
        elif option in _LISTS:
            num_values += 1
            if num_values > 1 and num_further > 0:
                repeated.append(option)
                num_further -= 1
        repeated.append(arg)
    return repeated


def refuse(names: Sequence[str], known: Sequence[str] = (), *, foreign: bool) -> NoReturn:
    """Print what to use instead of each unknown option, and exit."""
    terminal.error("\n".join(foreign_flags.explain(name, known, foreign=foreign) for name in names))
    raise typer.Exit(EXIT_WRONG_OPTION)


def _name(argument: str) -> str:
    """An option's name without its value: `-O` of `-O3`."""
    name = argument.partition("=")[0]
    if name.startswith("--"):
        return name.replace("_", "-")
    return name if foreign_flags.rows_of(name) else name[:2]
