"""Cases of parametrized tests, of which the default run has a part."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def each_with_one_of(names: Sequence[str], *values: tuple[Any, ...]) -> list[Any]:
    """Each name with one of the values in turn, and with the others in the long run."""
    return [
        pytest.param(name, *value, marks=[] if index == place % len(values) else [pytest.mark.long])
        for (place, name), (index, value) in product(enumerate(names), enumerate(values))
    ]
