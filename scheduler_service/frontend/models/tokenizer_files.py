"""What the tokenizer files of a checkpoint say, read as the `transformers` library reads them.

Special tokens and chat templates are found in several places, some of them older than others. What
is found and not used is logged, by the names of its file and of its model.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from scheduler_service.frontend.models.tokenizer import (
    DEFAULT_TEMPLATE,
    TEMPLATE_NAMES,
    ModelTokenizer,
    special_tokens,
)

logger = logging.getLogger(__name__)

Files = Mapping[str, bytes]


def build_tokenizer(files: Files, model: str) -> ModelTokenizer | None:
    """The tokenizer of a model's files; None if there is no `tokenizer.json`.

    A chat template that cannot be used is logged: it leaves a tokenizer that refuses chats. Raises
    ValueError for other malformed files. model: for the log.
    """
    if "tokenizer.json" not in files:
        return None
    config = _config(files, model)
    templates, problem = {}, None
    try:
        templates = _chat_templates(files, config, model)
    except ValueError as error:
        problem = str(error)
    added = _object(files, "added_tokens.json")
    variables = _object(files, "chat_template_kwargs.json")
    tokenizer = ModelTokenizer(files["tokenizer.json"], config, templates, added, variables)
    if problem is not None:
        tokenizer.template_errors[DEFAULT_TEMPLATE] = problem
    for name, reason in tokenizer.template_errors.items():
        logger.error("chat template unusable model=%s template=%s error=%s", model, name, reason)
    for warning in tokenizer.warnings:
        logger.warning("%s model=%s", warning, model)
    return tokenizer


def _object(files: Files, name: str) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises ValueError."""
    try:
        value = json.loads(files.get(name, b"{}"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{name}: expected an object")
    return value


def _config(files: Files, model: str) -> dict[str, Any]:
    """`tokenizer_config.json` with the special tokens that an older file names. They do not count
    if it declares all added tokens itself."""
    config = _object(files, "tokenizer_config.json")
    named = _object(files, "special_tokens_map.json")
    if "added_tokens_decoder" in config:
        lost = set(special_tokens(named)) - set(special_tokens(config))
        for name in sorted(lost):
            logger.warning("special_tokens_map.json: %s is not used model=%s", name, model)
        return config
    return config | named


def _chat_templates(files: Files, config: Mapping[str, Any], model: str) -> dict[str, str]:
    """The chat templates in effect, by name.

    Files of templates replace those of the configuration, from which only a default that they lack
    is used. The older chat_template.json counts if there is no other default. Raises ValueError.
    """
    places = list(_places(files, config))
    _, found = next(((place, named) for place, named in places if named), ("", {}))
    templates = dict(found)
    for _, named in places:
        if DEFAULT_TEMPLATE in named:
            templates.setdefault(DEFAULT_TEMPLATE, named[DEFAULT_TEMPLATE])
    used = {text for name, text in templates.items() if name in TEMPLATE_NAMES}
    for place, named in places:
        unused = [name for name, text in named.items() if text not in used]
        if unused:
            logger.warning(
                "chat templates not used file=%s templates=%s model=%s",
                place,
                ",".join(unused),
                model,
            )
    return templates


def _places(files: Files, config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Where templates are, in order of precedence, with the templates by name."""
    own = {
        name.removesuffix(".jinja"): data.decode()
        for name, data in files.items()
        if name.endswith(".jinja")
    }
    if (default := own.pop("chat_template", None)) is not None:
        own.setdefault(DEFAULT_TEMPLATE, default)
    yield "*.jinja", own
    yield "tokenizer_config.json", _configured(config)
    yield "chat_template.json", _configured(_object(files, "chat_template.json"))


def _configured(config: Mapping[str, Any]) -> dict[str, str]:
    """The templates in a configuration, by name. Raises ValueError."""
    templates = config.get("chat_template")
    try:
        if isinstance(templates, list):
            templates = {entry["name"]: entry["template"] for entry in templates}
    except (TypeError, KeyError):
        raise ValueError("chat_template: expected entries with name and template") from None
    if isinstance(templates, str):
        templates = {DEFAULT_TEMPLATE: templates}
    templates = {} if templates is None else templates
    if not (isinstance(templates, dict) and all(isinstance(t, str) for t in templates.values())):
        raise ValueError("chat_template: expected a text or a list of named ones")
    return templates
