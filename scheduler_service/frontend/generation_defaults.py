"""Sampling defaults that a model's author wrote into generation_config.json.

Honoured where a request leaves the field out: `temperature`, `top_p`, `top_k`, `min_p`,
`repetition_penalty` and `max_new_tokens`; `eos_token_id` always, beside the model's own. Everything
else is not. In particular `do_sample: false`, the file's own default, does not make requests
greedy: a request is greedy when it says so with temperature 0.
"""

import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """What takes the place of absent fields; ranges as in sampling.proto."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = None
    """None: as many as the model's length allows."""
    eos_token_ids: frozenset[int] = frozenset()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    # An integer may be too large to be asked whether it is finite.
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


_HONOURED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "temperature": ("temperature", lambda v: _is_number(v) and (v == 0 or 0.01 <= v <= 100)),
    "top_p": ("top_p", lambda v: _is_number(v) and 0 < v <= 1),
    "top_k": ("top_k", _is_count),
    "min_p": ("min_p", lambda v: _is_number(v) and 0 <= v <= 1),
    "repetition_penalty": ("repetition_penalty", lambda v: _is_number(v) and 0 < v <= 100),
    "max_new_tokens": ("max_tokens", lambda v: _is_count(v) and v > 0),
}
"""Key in the file: our field, and whether a value is in its range."""


def parse_generation_config(data: bytes | None) -> GenerationDefaults:
    """The defaults in a generation_config.json; what cannot be used is logged and left out."""
    try:
        config = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        logger.warning("generation_config.json ignored error=%s", error)
        return GenerationDefaults()
    if not isinstance(config, dict):
        logger.warning("generation_config.json ignored error=not an object")
        return GenerationDefaults()
    values: dict[str, Any] = {}
    for key, (field, is_valid) in _HONOURED.items():
        value = config.get(key)
        if value is None:
            continue
        if is_valid(value):
            values[field] = value
        else:
            logger.warning("generation default ignored key=%s value=%r", key, value)
    return GenerationDefaults(eos_token_ids=_eos_token_ids(config.get("eos_token_id")), **values)


def _eos_token_ids(value: Any) -> frozenset[int]:
    """One id, a list of ids, or nothing."""
    return frozenset(id for id in (value if isinstance(value, list) else [value]) if _is_count(id))
