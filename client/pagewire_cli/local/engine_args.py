"""The services' flags, and which service takes which, as `engine_args.toml` lists them.

`LLM` takes them as keyword arguments, `pagewire serve` as options; both pass on what was given
and leave defaults, environment variables and checks to the service.
"""

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire_cli import foreign_flags


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag; `--max-model-len` has the name `max_model_len`."""

    name: str
    kind: Any
    """`list[str]`: the option may be repeated."""
    service: str
    """The service that takes it, or `all`."""
    help: str
    negatable: bool = False
    """A switch that also has a `--no-…` form."""
    short: str = ""
    """Another name of the option."""

    def is_for(self, service: str) -> bool:
        """Whether a service takes it."""
        return self.service in (service, "all")

    @property
    def option(self) -> str:
        """The option on a command line."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise ValueError if the flag is a number and `value` is none."""
        try:
            if self.kind in (int, float) and value is not None and math.isnan(self.kind(value)):
                raise ValueError("NaN")
        except (TypeError, ValueError):
            kind = "whole number" if self.kind is int else "number"
            raise ValueError(f"{self.name}: expected a {kind}, got {value!r}") from None

    def arguments(self, value: Any) -> list[str]:
        """The command-line arguments for `value`; an object becomes JSON."""
        if self.kind is not bool:
            values = [value] if isinstance(value, str) or self.kind != list[str] else value
            texts = (json.dumps(v) if isinstance(v, Mapping) else str(v) for v in values)
            return [argument for text in texts for argument in (self.option, text)]
        if value:
            return [self.option]
        return ["--no-" + self.option[2:]] if self.negatable else []


_KINDS = {"text": str, "texts": list[str], "integer": int, "number": float}
_KINDS |= {"switch": bool, "on": bool}
FLAGS = tuple(
    Flag(name, _KINDS[kind], service, text, kind == "switch", *short)
    for service, flags in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
    for name, (kind, text, *short) in flags.items()
)


def check_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without switches of vLLM that are always on. Raises TypeError for other unknown
    flags, which it explains together."""
    flags = {flag.name: flag for flag in FLAGS}
    options = [flag.option for flag in FLAGS]
    accepted, lines = {}, ["unknown engine flags:"]
    for name, value in values.items():
        option = "--" + name.replace("_", "-")
        if name in flags:
            flags[name].check(value)
            accepted[name] = value
        elif not (value and foreign_flags.is_always_on(option)):
            line = foreign_flags.explain(option, options, spell=_as_argument)
            lines.append(line.replace(option, name, 1))
    if len(lines) > 1:
        raise TypeError("\n".join(lines))
    return accepted


def _as_argument(option: str) -> str:
    """An option as a keyword argument of `LLM`; one that `LLM` lacks is returned unchanged."""
    names = {flag.option: flag.name for flag in FLAGS} | {"--workers": "num_workers"}
    if option.startswith("--no-"):
        return f"{names['--' + option.removeprefix('--no-')]}=False"
    return names.get(option, option)


def arguments(service: str, values: Mapping[str, Any]) -> list[str]:
    """Arguments for `service`: those of its flags that have a value other than None."""
    return [
        argument
        for flag in FLAGS
        if flag.is_for(service) and values.get(flag.name) is not None
        for argument in flag.arguments(values[flag.name])
    ]
