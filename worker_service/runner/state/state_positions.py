"""How many tokens lead to the states in the blocks of both caches."""

import numpy as np

from worker_service.array_types import Int32Array, Int64Array
from worker_service.errors import InvalidPlan
from worker_service.plan import StepPlan

_UNKNOWN = -1


class StatePositions:
    """By block: the tokens after which the state is of which it holds a part, as far as is known.

    A state that is continued at another position would compute wrong tokens silently, so a plan
    that says so is refused.
    """

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self._device = np.full(num_gpu_blocks, _UNKNOWN, np.int64)
        self._host = np.full(num_cpu_blocks, _UNKNOWN, np.int64)

    def move(self, plan: StepPlan) -> None:
        """Follow the plan's operations on blocks, which the cache engine has checked."""
        for pairs, source, target in (
            (plan.swap_out, self._device, self._host),
            (plan.swap_in, self._host, self._device),
            (plan.copy, self._device, self._device),
        ):
            if len(pairs):
                target[pairs[:, 1]] = source[pairs[:, 0]]
        for fetch in plan.fetches:
            self._device[fetch.blocks[:, 1]] = _UNKNOWN

    def set(self, blocks: Int32Array, positions: Int64Array) -> None:
        """Record the states of some sequences, whose rows are computed next. blocks: [num_seqs,
        blocks of a state]; positions: [num_seqs]."""
        self._device[blocks] = positions[:, None]

    def are_at(self, blocks: Int32Array, position: int) -> bool:
        """Whether the state in these blocks is certainly the one at this position."""
        return bool((self._device[blocks] == position).all())

    def check(self, blocks: Int32Array, position: int, field: str) -> None:
        """Raise InvalidPlan unless the state in these blocks may be the one at this position."""
        found = self._device[blocks]
        wrong = found[(found != position) & (found != _UNKNOWN)]
        if position and len(wrong):
            problem = f"expected {wrong[0]}, the tokens that lead to the state in its blocks"
            raise InvalidPlan(field, f"{problem}, got {position}")
