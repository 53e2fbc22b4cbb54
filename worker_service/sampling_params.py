"""The sampling parameters of one sequence, its constraint included; see `sampling.proto`."""

from dataclasses import dataclass, field, fields
from enum import Enum

import numpy as np

from worker_service.array_types import Float32Array, Int32Array


class ConstraintKind(Enum):
    """How a constraint is stated."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Constraint:
    """The wire's `Constraint`; `sampling.proto` defines which tokens it allows."""

    kind: ConstraintKind
    texts: tuple[str, ...]
    """One text; several for a choice."""

    end_token_ids: Int32Array
    """Tokens that may end an output that matches."""

    last_token_ids: Int32Array
    """Tokens that may end an output that cannot continue."""


def _no_ids() -> Int32Array:
    return np.empty(0, np.int32)


def _no_values() -> Float32Array:
    return np.empty(0, np.float32)


_FILTER = {"is_filter": True}
"""Marks a number that excludes improbable tokens, unless it has its default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerParams:
    """The wire's `SamplerParams`, with arrays for columns; `sampling.proto` explains each field."""

    temperature: float = 1.0
    """0 is greedy."""

    top_p: float = field(default=1.0, metadata=_FILTER)
    top_k: int = field(default=0, metadata=_FILTER)
    """0 considers all tokens."""

    min_p: float = field(default=0.0, metadata=_FILTER)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    bias_token_ids: Int32Array = field(default_factory=_no_ids)
    """Tokens whose logits get `bias_values` added; no token twice."""

    bias_values: Float32Array = field(default_factory=_no_values)

    seed: int = 0
    """64 bits, unsigned."""

    min_tokens: int = 0
    suppressed_token_ids: Int32Array = field(default_factory=_no_ids)
    """Tokens that are excluded until there are `min_tokens` output tokens."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed; none is empty."""

    num_logprobs: int | None = None
    """Most probable tokens reported in addition to the sampled one; None: no log probabilities."""

    num_prompt_logprobs: int | None = None
    """The same for prompt tokens."""

    num_candidates: int | None = None
    """Tokens reported for the core to choose among; None: the worker chooses."""

    constraint: Constraint | None = None
    """What the output must match; None: anything."""

    @property
    def has_filters(self) -> bool:
        """Whether improbable tokens are excluded."""
        return any(getattr(self, name) != neutral for name, neutral in FILTERS.items())

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on which tokens occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def has_constraints(self) -> bool:
        """Whether some tokens' logits are changed or excluded for other reasons."""
        return bool(
            len(self.bias_token_ids)
            or self.bad_words
            or (self.min_tokens and len(self.suppressed_token_ids))
        )


FILTERS: dict[str, float] = {
    each.name: getattr(SamplerParams(), each.name)
    for each in fields(SamplerParams)
    if each.metadata.get("is_filter")
}
"""The parameters that are filters, by the value that excludes no token: an integer for an integer
parameter."""
