"""What an output must match."""

from dataclasses import dataclass
from enum import Enum

from worker_service.array_types import Int32Array


class ConstraintKind(Enum):
    """How a constraint is stated."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Constraint:
    """The wire's `Constraint`; `sampling.proto` tells which tokens it allows."""

    kind: ConstraintKind
    texts: tuple[str, ...]
    """One text; of a choice all of them."""

    end_token_ids: Int32Array
    """Tokens that may end an output that matches."""

    last_token_ids: Int32Array
    """Tokens that may end one that cannot go on."""
