"""What an output must match."""

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


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
