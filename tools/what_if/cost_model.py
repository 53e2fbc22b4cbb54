"""A model of the time of a step, fitted to recorded steps.

The time of a step is that seen by the core: from when the worker could start (the plan was sent,
and the previous result had arrived) to its result, the wire included. It is modelled as a sum,

    base + rows · per_row + further tokens · per_token + moved blocks · per_block

where further tokens are those of a row beyond its first, that is, of prefills. The fit is a robust
least squares fit (Huber 1964), in which delayed steps, for example on a busy machine, have limited
weight.
"""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSample:
    """One executed step."""

    group_id: str
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A cost model, and how well it fits the steps that it was learned from."""

    model: CostModel
    num_steps: int
    mean_seconds: float
    """Mean duration of a step, in seconds."""
    mean_error: float
    """Mean absolute error of a prediction, in seconds."""


def fit_groups(samples: Sequence[StepSample]) -> dict[str, Fit]:
    """A fit per worker group; raises ValueError without any step."""
    if not samples:
        raise ValueError("the recording has no executed step to learn costs from")
    by_group: dict[str, list[StepSample]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, []).append(sample)
    return {
        group_id: fit(steps if len(steps) >= MIN_STEPS else samples)
        for group_id, steps in by_group.items()
    }


def fit(samples: Sequence[StepSample]) -> Fit:
    """The costs that fit these steps best, none of them below zero."""
    sizes = np.array([(1, *sample.size) for sample in samples], dtype=float)
    seconds = np.array([sample.seconds for sample in samples])
    costs = _costs_above_zero(sizes, seconds)
    errors = np.abs(sizes @ costs - seconds)
    return Fit(
        model=CostModel(*map(float, costs)),
        num_steps=len(samples),
        mean_seconds=float(seconds.mean()),
        mean_error=float(errors.mean()),
    )


def _costs_above_zero(sizes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Least squares without negative costs: repeatedly set the most negative one to zero."""
    costs = np.zeros(sizes.shape[1])
    columns = list(range(sizes.shape[1]))
    while columns:
        found = _robust_least_squares(sizes[:, columns], seconds)
        if found.min() >= 0:
            costs[columns] = found
            return costs
        del columns[int(found.argmin())]
    return costs


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
