"""A model of the time of a step, fitted to recorded steps.

The time of a step is that seen by the core: from when the worker could start (the plan was sent,
and the previous result had arrived) to its result, the wire included. It is modelled as a sum,

    base + rows · per_row + further tokens · per_token + moved blocks · per_block

where further tokens are those of a row beyond its first, that is, of prefills. The fit is a robust
least squares fit (Huber 1964), in which delayed steps, for example on a busy machine, have limited
weight.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from scheduler_service.core import StepPlan

MIN_STEPS = 32
"""A worker group with fewer steps uses the model of all groups."""

HUBER_BOUND = 2.0
"""Errors up to this many times the median error have full weight: 1.345 standard deviations, with
which almost no efficiency is lost if errors are normally distributed."""

HUBER_ROUNDS = 30

_TINY_S = 1e-12
"""Smaller than any measured time."""


class StepSize(NamedTuple):
    """The work of a step."""

    num_rows: int
    num_further_tokens: int
    num_moved_blocks: int

    @classmethod
    def of(cls, plan: StepPlan) -> "StepSize":
        """The work of a plan."""
        num_further = sum(count - 1 for count in plan.num_tokens or () if count > 1)
        num_moved = (len(plan.swap_out) + len(plan.swap_in)) // 2
        return cls(len(plan.seq_ids), num_further, num_moved)


class StepSample(NamedTuple):
    """One executed step."""

    size: StepSize
    seconds: float


class CostModel(NamedTuple):
    """Costs in seconds; none is negative."""

    base: float
    per_row: float
    per_token: float
    per_block: float

    def seconds(self, size: StepSize) -> float:
        """A step's predicted time."""
        return self.base + sum(cost * count for cost, count in zip(self[1:], size, strict=True))


class Fit(NamedTuple):
    """A cost model, and how well it fits the steps that it was learned from; times in seconds."""

    model: CostModel
    num_steps: int
    mean_seconds: float
    mean_error: float
    """Mean absolute error of a prediction."""


def fit_groups(samples: Mapping[str, Sequence[StepSample]]) -> dict[str, Fit]:
    """A fit per worker group; raises ValueError without any step."""
    everything = list(chain.from_iterable(samples.values()))
    if not everything:
        raise ValueError("the recording has no executed step to learn costs from")
    return {
        group_id: fit(steps if len(steps) >= MIN_STEPS else everything)
        for group_id, steps in samples.items()
    }


def fit(samples: Sequence[StepSample]) -> Fit:
    """The costs that fit these steps best. Of least squares without negative costs: the most
    negative one is set to zero until there is none."""
    sizes = np.array([(1, *sample.size) for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples])
    costs, columns = np.zeros(sizes.shape[1]), list(range(sizes.shape[1]))
    while columns:
        found = _robust_least_squares(sizes[:, columns], seconds)
        if found.min() >= 0:
            costs[columns] = found
            break
        del columns[int(found.argmin())]
    mean_error = float(np.abs(sizes @ costs - seconds).mean())
    return Fit(CostModel(*costs.tolist()), len(samples), float(seconds.mean()), mean_error)


def _robust_least_squares(sizes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Huber's estimate, by iteratively reweighted least squares."""
    weights = np.ones(len(seconds))
    for _ in range(HUBER_ROUNDS):
        roots = np.sqrt(weights)
        costs = np.linalg.lstsq(sizes * roots[:, None], seconds * roots, rcond=None)[0]
        errors = np.abs(sizes @ costs - seconds)
        bound = max(HUBER_BOUND * float(np.median(errors)), _TINY_S)
        weights = bound / np.maximum(errors, bound)
    return costs
