"""What options replace in a model's files: keys of its configuration, the defaults of generations,
the chat template."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.v1.sampling_pb2 import SamplingParams
from pagewire.validation import generation_defaults, limits_of
from worker_service.config import ModelConfig
from worker_service.errors import InvalidOption
from worker_service.loader.files.json_files import parse_object

_CONFIG, _GENERATION = "config.json", "generation_config.json"
_TEMPLATE, _VARIABLES = "chat_template.jinja", "chat_template_kwargs.json"
_ENDS = ("bos_token_id", "eos_token_id")
"""Keys of `generation_config.json` that are no defaults."""

_MAX_TOKENS = "max_new_tokens"
_CONVERSATION = ("messages", "tools", "add_generation_prompt", "continue_final_message")
"""Variables of chat templates that every request sets."""

_ROTARY, _SCALING, _THETA = "rope_parameters", "rope_scaling", "rope_theta"
_NO_SCALING = (_THETA, "partial_rotary_factor")
"""Keys of `rope_parameters` that are no part of `rope_scaling`."""

_FULL = "full_attention"
"""The layers to which `rope_scaling` and `rope_theta` apply where others have their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """What the options replace."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `config.json`; those of an inner configuration, such as `text_config`, by its key."""

    generation: Mapping[str, Any] = field(default_factory=dict)
    """Keys of `generation_config.json`."""

    keeps_generation: bool = True
    """Whether the model's own defaults of generations count."""

    chat_template: str | None = None
    """Source of the template that replaces all of the model's."""

    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """Those that requests need not set."""

    @classmethod
    def from_options(cls, options: ModelConfig) -> "Overrides":
        """Raises InvalidOption, naming the option, and the key at fault."""
        generation = _object("override_generation_config", options.override_generation_config)
        for key, value in generation.items():
            _check_default(key, value)
        template, variables = options.chat_template, options.default_chat_template_kwargs
        return cls(
            config=_object("hf_overrides", options.hf_overrides),
            generation=generation,
            keeps_generation=options.generation_config == "auto",
            chat_template=None if template is None else read_template("chat_template", template),
            template_variables=_template_variables("default_chat_template_kwargs", variables),
        )

    def of_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The content of `config.json`. An object is replaced as a whole, unless it is an inner
        configuration; what sets rotary embeddings applies under either of its names."""
        changed = dict(config)
        for key, value in self.config.items():
            before = changed.get(key)
            if key.endswith("_config") and isinstance(before, dict) and isinstance(value, dict):
                changed[key] = Overrides(config=value).of_config(before)
            elif key in (_SCALING, _THETA) and isinstance(rope := changed.get(_ROTARY), dict):
                changed[_ROTARY] = _with_rope(rope, key, value)
            else:
                changed[key] = value
        return changed

    def of_files(self, files: Iterable[tuple[str, bytes]]) -> Iterator[tuple[str, bytes]]:
        """Yield (name, content) of the files that frontends need."""
        changes_defaults = bool(self.generation) or not self.keeps_generation
        defaults: dict[str, Any] = {}
        for name, content in files:
            if name == _GENERATION and changes_defaults:
                defaults = _read(content)
            elif name == _CONFIG and self.config:
                yield name, json.dumps(self.of_config(_read(content))).encode()
            elif not (name.endswith(".jinja") and self.chat_template is not None):
                yield name, content
        if not self.keeps_generation:
            defaults = {key: defaults[key] for key in _ENDS if key in defaults}
        if changes_defaults:
            yield _GENERATION, json.dumps({**defaults, **self.generation}).encode()
        if self.chat_template is not None:
            yield _TEMPLATE, self.chat_template.encode()
        if self.template_variables:
            yield _VARIABLES, json.dumps(self.template_variables).encode()


NO_OVERRIDES = Overrides()


def _with_rope(parameters: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """`rope_parameters` with another `rope_theta`, or another `rope_scaling`, which may be none."""
    if isinstance(own := parameters.get(_FULL), dict):
        return {**parameters, _FULL: _with_rope(own, key, value)}
    if key == _THETA:
        return {**parameters, _THETA: value}
    return {name: parameters[name] for name in _NO_SCALING if name in parameters} | (value or {})


def read_template(option: str, text: str) -> str:
    """The Jinja template in the file that `text` names, or `text` itself. Raises InvalidOption."""
    if "{" in text:
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        expected = "expected a Jinja template, or a file with one"
        raise InvalidOption(f"{option}: {expected}, got {text!r}: {reason}") from None


def _object(option: str, text: str | None) -> dict[str, Any]:
    return {} if text is None else parse_object(option, text)


def _template_variables(option: str, text: str | None) -> dict[str, Any]:
    variables = _object(option, text)
    for name in _CONVERSATION:
        if name in variables:
            raise InvalidOption(f"{option}: expected no {name!r}, which each request sets itself")
    return variables


def _read(content: bytes) -> dict[str, Any]:
    """The object in a file of the model; an empty one if there is none, which others report."""
    try:
        found = json.loads(content)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _check_default(key: str, value: Any) -> None:
    """Raise InvalidOption unless `value` may be the default of a request's field."""
    option = f"override_generation_config: {key}"
    known = generation_defaults(SamplingParams.DESCRIPTOR)
    if key not in known and key != _MAX_TOKENS:
        allowed = ", ".join([*known, _MAX_TOKENS])
        raise InvalidOption(f"{option}: expected one of {allowed}")
    is_whole = key == _MAX_TOKENS or isinstance(known[key], int)
    kinds = int if is_whole else (int, float)
    limits = limits_of(SamplingParams.DESCRIPTOR).get(key)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise InvalidOption(f"{option}: expected a {'whole ' * is_whole}number, got {value!r}")
    if key == _MAX_TOKENS and value < 1:
        raise InvalidOption(f"{option}: expected at least 1, got {value}")
    if limits is not None and (problem := limits.range_violation(value)) is not None:
        raise InvalidOption(f"{option}: {problem}")
