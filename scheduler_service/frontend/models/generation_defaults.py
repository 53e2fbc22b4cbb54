"""A model's own values of absent sampling parameters, from its generation_config.json."""

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagewire.v1.sampling_pb2 import SamplingParams
from pagewire.validation import generation_defaults, limits_of

logger = logging.getLogger(__name__)

SAMPLING_DEFAULTS = generation_defaults(SamplingParams.DESCRIPTOR)
"""Values of absent fields of models that have none of their own, as sampling.proto declares them.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationDefaults:
    """Values of absent fields, within the ranges of sampling.proto."""

    sampling: Mapping[str, float] = field(default_factory=lambda: SAMPLING_DEFAULTS)
    """Defaults by field of SamplingParams; integers for integer fields."""
    named: frozenset[str] = frozenset()
    """The fields for which the model's file has a default."""
    max_tokens: int | None = None
    """None: as many as the model's length allows."""
    eos_token_ids: frozenset[int] = frozenset()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    # math.isfinite raises OverflowError for large integers.
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31


_HONOURED = {name: name for name in SAMPLING_DEFAULTS} | {"max_new_tokens": "max_tokens"}
"""Key in the file: the field of SamplingParams."""


def _is_valid(name: str, value: Any) -> bool:
    """Whether a value may stand in a field of SamplingParams."""
    descriptor = SamplingParams.DESCRIPTOR.fields_by_name[name]
    is_integer = descriptor.type == descriptor.TYPE_UINT32
    if not (_is_count(value) if is_integer else _is_number(value)):
        return False
    limits = limits_of(SamplingParams.DESCRIPTOR).get(name)
    return limits is None or limits.allows(value)


def parse_generation_config(data: bytes | None) -> GenerationDefaults:
    """The defaults in a generation_config.json; invalid values are logged and ignored."""
    try:
        config = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        logger.warning("generation_config.json ignored error=%s", error)
        return GenerationDefaults()
    if not isinstance(config, dict):
        logger.warning("generation_config.json ignored error=not an object")
        return GenerationDefaults()
    values: dict[str, Any] = {}
    for key, name in _HONOURED.items():
        value = config.get(key)
        if value is None:
            continue
        if _is_valid(name, value):
            values[name] = value
        else:
            logger.warning("generation default ignored key=%s value=%r", key, value)
    return GenerationDefaults(
        max_tokens=values.pop("max_tokens", None),
        named=frozenset(values),
        sampling={**SAMPLING_DEFAULTS, **values},
        eos_token_ids=_eos_token_ids(config.get("eos_token_id")),
    )


def _eos_token_ids(value: Any) -> frozenset[int]:
    """One id, a list of ids, or nothing."""
    return frozenset(id for id in (value if isinstance(value, list) else [value]) if _is_count(id))
